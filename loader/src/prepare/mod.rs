//! Samples to what a model takes: ids with the chat template applied and media in place, labels, pixels, mel values.
//!
//! A [`Preparer`] does to a sample what the Hugging Face processor of the model's family does, and [`ModelInputs`] are
//! a microbatch of such samples, ready for `model(**inputs)`. It runs in the decode pool, right behind decoding.
//!
//! ```text
//! fields ─conversation─▶ turns ─chat_template, labels─▶ text, learned parts ─tokenizer─▶ ids
//! images, clips, videos ─media─▶ tensors and token counts ──────────────expand─▶ ids with media ─length─▶ sample
//! samples ─pack─▶ tensors of a microbatch
//! ```
//!
//! Pure: no file is read and no clock is looked at once a preparer is built.

mod account;
pub mod audio;
mod builder;
mod chat_template;
mod conversation;
mod count;
mod error;
mod expand;
mod family;
mod frames;
pub mod image;
mod labels;
mod length;
pub mod media;
mod pack;
mod pixels;
mod positions;
mod tensors;
#[cfg(test)]
mod tests;
mod tokenizer;
mod video;

use std::sync::Arc;

use dflop_costmodel::{ModelSpec, SampleShape};

pub(crate) use self::account::PrepareLog;
pub use self::account::{PrepareReport, Truncated};
pub use self::audio::AudioFeatures;
pub use self::builder::PreparerBuilder;
pub use self::chat_template::{ChatTemplate, Message, MessagePart};
pub use self::conversation::{Conversation, SampleConversation, read_conversation};
pub use self::count::{PreparedTexts, TokenizedTexts};
pub use self::error::PrepareError;
pub use self::expand::MediaRun;
pub use self::family::{Family, PixelLayout, Placeholder, VideoText};
pub use self::image::PixelValues;
pub use self::labels::IGNORED;
pub use self::length::LongSample;
pub use self::media::{AudioTensors, ImageTensors};
pub use self::pack::ModelInputs;
pub use self::tensors::{NamedTensor, TensorValues};
pub use self::tokenizer::{Encoded, Tokenizer};
pub use self::video::{VideoTensors, VideoValues};

use self::count::MarkerTokens;
use self::expand::{Expanded, Expander};
use self::frames::{Shown, write_frames};
use self::labels::{Labeler, Marked, target_tokens};
use self::pack::Packer;
use crate::media::Media;
use crate::sample::text::MediumSlot;
use crate::sample::{BatchLayout, Sample};

/// Why a video that was not decoded is refused.
const UNDECODED_VIDEO: &str = if cfg!(feature = "video") {
    "the video is not decoded"
} else {
    "the video is not decoded: this build has no FFmpeg; build with the feature `video`"
};

/// What is done with text that is no conversation, such as a caption.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum PlainText {
    /// It is learned as it stands, behind its media and without a chat template, and ends with the end-of-sequence
    /// token.
    #[default]
    Continue,
    /// It is what the assistant answers to these words about the media.
    Answer {
        /// What the user says; may be empty.
        question: String,
    },
}

/// A sample as a model takes it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PreparedSample {
    /// Ids of the whole sample, media in place.
    pub input_ids: Vec<u32>,
    /// The id where it is learned, else [`IGNORED`]; never for media or for the first token, which nothing predicts.
    pub labels: Vec<i32>,
    /// Where media stand, in the order of the ids.
    pub runs: Vec<MediaRun>,
    /// The images, in the order of their placeholders; where frames are images ([`VideoText::Frames`]) each video
    /// is one of them.
    pub images: Vec<PixelValues>,
    /// The clips, in the order of their placeholders.
    pub clips: Vec<AudioFeatures>,
    /// The videos, in the order of their placeholders.
    pub videos: Vec<VideoValues>,
    /// Tokens that were cut from the text to fit the limit.
    pub cut_tokens: usize,
}

impl PreparedSample {
    /// Returns the number of tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.input_ids.len()
    }

    /// Returns the number of tokens that the loss is computed on.
    #[must_use]
    pub fn target_tokens(&self) -> usize {
        self.labels.iter().filter(|&&label| label != IGNORED).count()
    }
}

/// Turns samples into what a model takes, and microbatches of them into tensors.
#[derive(Debug, Clone)]
pub struct Preparer {
    family: Family,
    tokenizer: Arc<Tokenizer>,
    labeler: Arc<Labeler>,
    expander: Expander,
    images: Option<Arc<dyn ImageTensors>>,
    audio: Option<Arc<dyn AudioTensors>>,
    videos: Option<Arc<dyn VideoTensors>>,
    plain_text: PlainText,
    packer: Packer,
    tokens_max: Option<u64>,
    long_sample: LongSample,
    markers: MarkerTokens,
    /// Source of the chat template.
    chat_template: Arc<str>,
}

impl Preparer {
    /// Starts the settings of a preparer for a model; a tokenizer is all that must be set.
    #[must_use]
    pub fn builder(model: &ModelSpec) -> PreparerBuilder {
        PreparerBuilder::new(Family::of(model), model)
    }

    /// Returns the tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns the text of ids, special tokens included.
    ///
    /// # Errors
    /// The tokenizer's own words.
    pub fn decode(&self, ids: &[u32]) -> Result<String, String> {
        self.tokenizer.decode(ids)
    }

    /// Lowers the limit of tokens in a sample, as the cap of a planned microbatch does.
    #[must_use]
    pub fn tokens_at_most(mut self, tokens: u64) -> Self {
        self.tokens_max = Some(self.tokens_max.map_or(tokens, |already| already.min(tokens)));
        self
    }

    /// Fills packed rows, or each row of padded layouts, up to a fixed number of tokens with padding that is not learned.
    /// A balanced loader sets this as its planner says, and ends with an error before a microbatch is longer.
    #[must_use]
    pub fn pad_to_tokens(mut self, tokens: usize) -> Self {
        self.packer.pad_to_tokens = Some(tokens);
        self
    }

    /// Returns how samples of a microbatch share tensors.
    #[must_use]
    pub fn layout(&self) -> BatchLayout {
        self.packer.layout
    }

    /// Prepares a decoded sample.
    ///
    /// # Errors
    /// Why the model cannot take it; the sample is at fault, except where [`PrepareError::is_dropped`] says that a
    /// setting is.
    pub fn prepare(&self, sample: &Sample) -> Result<PreparedSample, PrepareError> {
        let said = read_conversation(sample, |slot| self.takes(slot))?;
        let (mut marked, has_special) = self.write(said.conversation)?;
        let (images, clips) = (self.images(sample, &said.images)?, self.clips(sample, &said.clips)?);
        let videos = self.videos(sample, &said.videos)?;
        let (shown, videos) = self.with_frames(&mut marked, images, videos)?;
        let tokens_of = |slot| match slot {
            MediumSlot::Image => shown.tokens.clone(),
            MediumSlot::Audio => clips.iter().map(|clip| clip.tokens).collect(),
            MediumSlot::Video => videos.iter().map(|video| video.pixels.tokens).collect(),
        };
        let refused = |reason| PrepareError::Tokenizer { reason };
        let encoded = self.tokenizer.encode(&marked.text, has_special).map_err(refused)?;
        let is_target = target_tokens(&encoded, &marked.targets);
        let mut expanded = self.expander.expand(&encoded.ids, &is_target, tokens_of)?;
        let cut_tokens = match self.tokens_max {
            Some(tokens_max) => length::limit(&mut expanded, tokens_max as usize, self.long_sample)?,
            None => 0,
        };
        let labels = labels(&expanded);
        let Expanded { ids: input_ids, runs, .. } = expanded;
        Ok(PreparedSample { input_ids, labels, runs, images: shown.media, clips, videos, cut_tokens })
    }

    /// Whether the model takes media of a kind.
    fn takes(&self, slot: MediumSlot) -> bool {
        match slot {
            MediumSlot::Image => self.images.is_some(),
            MediumSlot::Audio => self.audio.is_some(),
            MediumSlot::Video => self.videos.is_some(),
        }
    }

    /// Returns whether images have to be decoded; without, their sizes are enough.
    #[must_use]
    pub fn reads_pixels(&self) -> bool {
        self.images.as_ref().is_some_and(|images| images.reads_pixels())
    }

    /// Returns about how many bytes the tensors of a sample's media take.
    #[must_use]
    pub fn tensor_bytes(&self, shape: &SampleShape) -> u64 {
        let images = self.images.as_ref().map_or(0, |images| images.tensor_bytes(&shape.images));
        let clips = self.audio.as_ref().map_or(0, |audio| {
            shape.audio.iter().map(|&length| audio.tensor_bytes(length)).fold(0, u64::saturating_add)
        });
        let videos = self.videos.as_ref().map_or(0, |videos| {
            shape.videos.iter().map(|&video| videos.tensor_bytes(video)).fold(0, u64::saturating_add)
        });
        images.saturating_add(clips).saturating_add(videos)
    }

    /// Makes the tensors of a microbatch, samples in their order; `None` for no samples, unless rows have a fixed length.
    #[must_use]
    pub fn pack(&self, samples: Vec<PreparedSample>) -> Option<ModelInputs> {
        self.packer.pack(samples)
    }

    /// Writes a conversation down; says whether the tokenizer adds its own special tokens.
    ///
    /// Chat templates write special tokens themselves: a processor adds the tokenizer's unless the beginning token is
    /// there already, a tokenizer alone never does.
    fn write(&self, conversation: Conversation) -> Result<(Marked, bool), PrepareError> {
        let messages = match (conversation, &self.plain_text) {
            (Conversation::Turns(messages), _) => messages,
            (Conversation::Plain(parts), PlainText::Answer { question }) => answer(parts, question),
            (Conversation::Plain(parts), PlainText::Continue) => return Ok((self.write_plain(&parts), true)),
        };
        let refused = |reason| PrepareError::ChatTemplate { reason };
        let marked = self.labeler.render(&messages).map_err(refused)?;
        let bos = self.tokenizer.special_tokens().get("bos_token");
        let has_bos = bos.is_some_and(|bos| marked.text.starts_with(bos.as_str()));
        let has_special = self.family.has_media() && !has_bos;
        Ok((marked, has_special))
    }

    /// Text without turns and its media, then the end-of-sequence token.
    fn write_plain(&self, parts: &[MessagePart]) -> Marked {
        let mut marked = Marked::default();
        for part in parts {
            let start = marked.text.len();
            marked.text += &self.family.inline(std::slice::from_ref(part), "");
            if matches!(part, MessagePart::Text(_)) {
                marked.targets.push(start..marked.text.len());
            }
        }
        let end = self.tokenizer.special_tokens().get("eos_token");
        if let (Some(end), Some(target)) = (end, marked.targets.last_mut()) {
            let is_last = target.end == marked.text.len();
            let start = marked.text.len();
            marked.text += end;
            if is_last {
                target.end = marked.text.len();
            } else {
                marked.targets.push(start..marked.text.len());
            }
        }
        marked
    }

    fn images(&self, sample: &Sample, places: &[usize]) -> Result<Vec<PixelValues>, PrepareError> {
        let Some(processor) = self.images.as_ref().filter(|_| !places.is_empty()) else {
            return Ok(Vec::new());
        };
        let image = |&place: &usize| match &sample.fields[place].media {
            Media::Image(image) => Some(image),
            _ => None,
        };
        let images: Vec<_> = places.iter().filter_map(image).collect();
        let extensions: Vec<&str> = places.iter().map(|&place| &*sample.fields[place].extension).collect();
        let refused = |source| PrepareError::Medium { field: extensions.join(", "), source };
        processor.images(&images).map_err(refused)
    }

    fn clips(&self, sample: &Sample, places: &[usize]) -> Result<Vec<AudioFeatures>, PrepareError> {
        let mut clips = Vec::with_capacity(places.len());
        for &place in places {
            let field = &sample.fields[place];
            let (Some(processor), Media::Audio(clip)) = (&self.audio, &field.media) else { continue };
            let refused = |source| PrepareError::Medium { field: field.extension.to_string(), source };
            clips.push(processor.clip(clip).map_err(refused)?);
        }
        Ok(clips)
    }

    fn videos(&self, sample: &Sample, places: &[usize]) -> Result<Vec<VideoValues>, PrepareError> {
        let Some(processor) = &self.videos else { return Ok(Vec::new()) };
        let mut videos = Vec::with_capacity(places.len());
        for &place in places {
            let field = &sample.fields[place];
            let refused = |source| PrepareError::Medium { field: field.extension.to_string(), source };
            if let Some(VideoText::Whole(placeholder)) = self.family.video()
                && !self.expander.knows(MediumSlot::Video)
            {
                let token = placeholder.token;
                let reason =
                    format!("the vocabulary has no `{token}`, which stands for videos of this model");
                return Err(refused(reason.into()));
            }
            let Media::Video(video) = &field.media else {
                return Err(refused(UNDECODED_VIDEO.into()));
            };
            videos.push(processor.video(video).map_err(refused)?);
        }
        Ok(videos)
    }

    /// Images, and videos that stand as one medium; where frames are images, all are images.
    fn with_frames(
        &self,
        marked: &mut Marked,
        images: Vec<PixelValues>,
        videos: Vec<VideoValues>,
    ) -> Result<(Shown, Vec<VideoValues>), PrepareError> {
        if let (Some(VideoText::Frames { word }), Some(image)) = (self.family.video(), self.family.image()) {
            let shown = write_frames(marked, [image.token, word], images, videos)?;
            return Ok((shown, Vec::new()));
        }
        let tokens = images.iter().map(|image| image.tokens).collect();
        Ok((Shown { media: images, tokens }, videos))
    }
}

/// A text as the answer to a question about its media.
fn answer(parts: Vec<MessagePart>, question: &str) -> Vec<Message> {
    let (answer, mut asked): (Vec<_>, Vec<_>) =
        parts.into_iter().partition(|part| matches!(part, MessagePart::Text(_)));
    if !question.is_empty() {
        asked.push(MessagePart::Text(question.to_owned()));
    }
    let turn = |role: &str, content| Message { role: role.to_owned(), content };
    vec![turn("user", asked), turn("assistant", answer)]
}

/// The ids that are learned; the first token of a sample has nothing before it that could predict it.
fn labels(expanded: &Expanded) -> Vec<i32> {
    let is_learned = |(place, is_target): (usize, &bool)| *is_target && place > 0;
    let learned = expanded.is_target.iter().enumerate().map(is_learned);
    learned.zip(&expanded.ids).map(|(is_learned, &id)| if is_learned { id as i32 } else { IGNORED }).collect()
}
