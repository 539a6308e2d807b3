//! Prepares samples: [`Preparer`] converts decoded samples to model inputs, and microbatches to tensors.
//!
//! ```text
//! fields ─conversation─▶ turns ─chat_template, labels─▶ text, targets ─tokenizer─▶ ids
//! images, clips, videos ─tensors─▶ tensors and token counts ────────────expand─▶ ids with media ─length─▶
//! sample samples ─pack─▶ tensors of a microbatch
//! ```

mod builder;
mod count;
mod expand;
mod frames;
mod pack;
mod pixels;

use std::sync::Arc;

use dflop_costmodel::tokens::native::NativeResolution;
use dflop_costmodel::tokens::pan_and_scan::PanAndScan;
use dflop_costmodel::{ModelSpec, Module, SampleShape};
use dflop_samples::inputs::{
    AudioFeatures, Filler, IGNORED, ModelInputs, PixelValues, PrepareError, PreparedSample, SampleProcessor,
    VideoValues,
};
use dflop_samples::media::{Media, Modality, RgbImage};
use dflop_samples::sample::{BatchLayout, Sample};
use dflop_samples::{BoxError, Result};

use self::count::MarkerTokens;
use self::expand::{Expanded, Expander};
use self::frames::{ImagesInText, write_frames, write_images, write_times};
use self::pack::Packer;
use crate::chat::{Conversation, Labeler, MarkedText, Tokenizer, read_conversation, target_tokens};
use crate::family::{Family, ProcessorFamilies, VideoText};
use crate::image::Normalization;
use crate::message::{Dialogue, Message, MessagePart};
use crate::tensors::{AudioTensors, CountedImages, ImageTensors, VideoTensors};

pub use self::builder::PreparerBuilder;
pub use self::count::{PreparedTexts, TokenizedTexts};
pub use count::LongSample;
pub use pack::Buckets;

/// Reason for rejecting a video that was not decoded.
const UNDECODED_VIDEO: &str = if cfg!(feature = "video") {
    "the video is not decoded"
} else {
    "the video is not decoded: this build has no FFmpeg; build with the feature `video`"
};

/// Treatment for text that is not a conversation, such as a caption.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum PlainText {
    /// The text follows the media without a chat template and ends with the end-of-sequence token; all text
    /// is a training target.
    #[default]
    Continue,
    /// The text is the assistant's answer to a question about the media.
    Answer {
        /// User question; may be empty.
        question: String,
    },
}

/// Converts samples to model inputs, and microbatches to tensors.
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
    media_buckets: Option<Buckets>,
    tokens_max: Option<u64>,
    long_sample: LongSample,
    markers: MarkerTokens,
    /// Token rule for a family that writes video times as text.
    timed_videos: Option<NativeResolution>,
    /// Token rule for a family that writes words around image crops.
    cut_images: Option<PanAndScan>,
    /// Token rule for images without pixels.
    counted_images: Option<CountedImages>,
    /// Chat template source.
    chat_template: Arc<str>,
    /// Whether a step without a target is an error.
    requires_targets: bool,
}

impl Preparer {
    /// Returns a builder for a model in a built-in family; only the tokenizer is required.
    #[must_use]
    pub fn builder(model: &ModelSpec) -> PreparerBuilder {
        Self::builder_with_families(model, &ProcessorFamilies::default())
    }

    /// Returns a builder for a model whose family is in `families`.
    #[must_use]
    pub fn builder_with_families(model: &ModelSpec, families: &ProcessorFamilies) -> PreparerBuilder {
        PreparerBuilder::new(families, model)
    }

    /// Returns the tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Decodes ids to text, including special tokens.
    ///
    /// # Errors
    /// The tokenizer's error message.
    pub fn decode(&self, ids: &[u32]) -> Result<String, String> {
        self.tokenizer.decode(ids)
    }

    /// Lowers the token limit per sample, for example to the cap of a planned microbatch.
    #[must_use]
    pub fn tokens_at_most(mut self, tokens: u64) -> Self {
        self.tokens_max = Some(self.tokens_max.map_or(tokens, |already| already.min(tokens)));
        self
    }

    /// Pads packed rows, or each row in a padded layout, to a fixed number of tokens without targets. A
    /// balanced loader gets the number from the planner, and fails rather than deliver a longer microbatch.
    #[must_use]
    pub fn pad_to_tokens(mut self, tokens: usize) -> Self {
        self.packer.pad_to_tokens = Some(tokens);
        self
    }

    /// Returns how microbatch tensors arrange samples.
    #[must_use]
    pub fn layout(&self) -> BatchLayout {
        self.packer.layout
    }

    /// Prepares a decoded sample.
    ///
    /// # Errors
    /// The reason why the model rejects the sample; if [`PrepareError::is_dropped`], a setting excludes the
    /// sample.
    pub fn prepare(&self, sample: &Sample) -> Result<PreparedSample, PrepareError> {
        let read = read_conversation(sample, |modality| self.takes(modality))?;
        let (mut marked, has_special) = self.render_conversation(read.conversation)?;
        let (images, clips) = (self.images(sample, &read.images)?, self.clips(sample, &read.clips)?);
        let videos = self.videos(sample, &read.videos)?;
        let VisionInText { images, videos, video_tokens } = self.place_vision(&mut marked, images, videos)?;
        let tokens_of = |modality| match modality {
            Modality::Image => images.tokens.clone(),
            Modality::Audio => clips.iter().map(|clip| clip.tokens).collect(),
            Modality::Video => video_tokens.clone(),
        };
        let refused = |reason| PrepareError::Tokenizer { reason };
        let encoded = self.tokenizer.encode(&marked.text, has_special).map_err(refused)?;
        let is_target = target_tokens(&encoded, &marked.targets);
        let mut expanded = self.expander.expand(&encoded.ids, &is_target, tokens_of, &images.media)?;
        let cut_tokens = match self.tokens_max {
            Some(tokens_max) => count::limit(&mut expanded, tokens_max as usize, self.long_sample)?,
            None => 0,
        };
        let labels = labels(&expanded);
        let Expanded { ids: input_ids, runs, .. } = expanded;
        let media_order = [
            media_order(sample, &read.images, |media| matches!(media, Media::Image(_))),
            media_order(sample, &read.clips, |media| matches!(media, Media::Audio(_))),
            media_order(sample, &read.videos, |media| matches!(media, Media::Video(_))),
        ];
        let images = images.media;
        Ok(PreparedSample { input_ids, labels, runs, images, clips, videos, media_order, cut_tokens })
    }

    /// Returns whether the model supports a modality.
    fn takes(&self, modality: Modality) -> bool {
        match modality {
            Modality::Image => self.images.is_some(),
            Modality::Audio => self.audio.is_some(),
            Modality::Video => self.videos.is_some(),
        }
    }

    /// Returns whether images must be decoded; if not, image sizes are sufficient.
    #[must_use]
    pub fn reads_pixels(&self) -> bool {
        self.images.as_ref().is_some_and(|images| images.reads_pixels())
    }

    /// Returns the conversion from bytes to pixel values, if the image processor has a conversion.
    #[must_use]
    pub fn pixel_normalization(&self) -> Option<Normalization> {
        self.images.as_ref().and_then(|images| images.normalization())
    }

    /// Estimates the size of a sample's media tensors in bytes.
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

    /// Creates the tensors for a microbatch, in sample order; `None` without samples, unless rows have a
    /// fixed length.
    #[must_use]
    pub fn pack(&self, samples: Vec<PreparedSample>) -> Option<ModelInputs> {
        self.packer.pack(samples, Vec::new())
    }

    /// Writes a conversation as text; also returns whether the tokenizer adds special tokens.
    ///
    /// Chat templates write special tokens themselves. As in `transformers`, a model's processor still adds
    /// the tokenizer's special tokens unless the text starts with the beginning-of-sequence token, and a
    /// text-only model never adds them.
    fn render_conversation(&self, conversation: Conversation) -> Result<(MarkedText, bool), PrepareError> {
        let dialogue = match (conversation, &self.plain_text) {
            (Conversation::Turns(dialogue), _) => dialogue,
            (Conversation::Plain(parts), PlainText::Answer { question }) => answer(parts, question),
            (Conversation::Plain(parts), PlainText::Continue) => {
                return Ok((self.render_plain(&parts), true));
            }
        };
        let refused = |reason| PrepareError::ChatTemplate { reason };
        let marked = self.labeler.render(dialogue).map_err(refused)?;
        let bos = self.tokenizer.special_tokens().get("bos_token");
        let has_bos = bos.is_some_and(|bos| marked.text.starts_with(bos.as_str()));
        let has_special = self.family.has_media() && !has_bos;
        Ok((marked, has_special))
    }

    /// Writes text without turns and the media, followed by the end-of-sequence token.
    fn render_plain(&self, parts: &[MessagePart]) -> MarkedText {
        let mut marked = MarkedText::default();
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
        let is_counted = |image: &&&RgbImage| image.pixels.is_empty();
        match &self.counted_images {
            Some(counted) if processor.reads_pixels() && images.iter().any(|image| is_counted(&image)) => {
                partly_counted(&**processor, counted, &images).map_err(refused)
            }
            _ => processor.images(&images).map_err(refused),
        }
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
            if let Some(placeholder) = self.family.video().and_then(VideoText::placeholder)
                && !self.expander.has_placeholder(Modality::Video)
            {
                let token = placeholder.token;
                let reason =
                    format!("the vocabulary has no `{token}`, the placeholder of this model's videos");
                return Err(refused(reason.into()));
            }
            if self.family.video() == Some(&VideoText::None) {
                return Err(refused("the model takes no videos".into()));
            }
            let Media::Video(video) = &field.media else {
                return Err(refused(UNDECODED_VIDEO.into()));
            };
            videos.push(processor.video(video).map_err(refused)?);
        }
        Ok(videos)
    }

    /// Returns the token count of each image placeholder run: a single run for an image, or a run for the
    /// image and a run for each crop.
    fn image_runs(&self, images: &[PixelValues]) -> Vec<u32> {
        let tokens = images.iter().map(|image| image.tokens);
        match self.family.image_word() {
            Some(word) => tokens.flat_map(|tokens| word.runs(tokens)).collect(),
            None => tokens.collect(),
        }
    }

    /// Writes images as text, and the videos of families whose text has separate frames or layers. In a
    /// family that writes frames as images, all visual media are images.
    fn place_vision(
        &self,
        marked: &mut MarkedText,
        images: Vec<PixelValues>,
        videos: Vec<VideoValues>,
    ) -> Result<VisionInText, PrepareError> {
        if let Some(word) = self.family.image_word() {
            write_images(marked, word, &images);
        }
        let video_tokens = match (self.family.video(), self.family.image()) {
            (Some(VideoText::Frames { word }), Some(image)) => {
                let images = write_frames(marked, [image.token, word], images, videos)?;
                return Ok(VisionInText { images, ..VisionInText::default() });
            }
            (Some(VideoText::Timed(placeholder)), _) if self.expander.has_placeholder(Modality::Video) => {
                write_times(marked, placeholder, &videos)?
            }
            _ => videos.iter().map(|video| video.pixels.tokens).collect(),
        };
        let tokens = self.image_runs(&images);
        Ok(VisionInText { images: ImagesInText { media: images, tokens }, videos, video_tokens })
    }
}

/// Images and videos in a sample, with the token count of each placeholder run in the text.
#[derive(Debug, Default)]
struct VisionInText {
    images: ImagesInText,
    videos: Vec<VideoValues>,
    /// Number of tokens in each video, or in each layer of every video.
    video_tokens: Vec<u32>,
}

/// Returns the index of each field among the sample's fields of the same modality.
fn media_order(sample: &Sample, places: &[usize], is_same: fn(&Media) -> bool) -> Vec<u32> {
    let before = |&place: &usize| sample.fields[..place].iter().filter(|field| is_same(&field.media)).count();
    places.iter().map(|place| before(place) as u32).collect()
}

/// Counts images that have only a size, because another rank encodes them, and processes the others.
fn partly_counted(
    processor: &dyn ImageTensors,
    counted: &CountedImages,
    images: &[&RgbImage],
) -> Result<Vec<PixelValues>, BoxError> {
    let mut values = counted.images(images)?;
    let has_pixels = |image: &&&RgbImage| !image.pixels.is_empty();
    let mut own: Vec<&RgbImage> = images.iter().filter(has_pixels).copied().collect();
    // Some families process several images unlike one, so one is beside itself.
    if own.len() == 1 && images.len() > 1 {
        own.push(own[0]);
    }
    let mut made = if own.is_empty() { Vec::new() } else { processor.images(&own)? }.into_iter();
    for (value, _) in values.iter_mut().zip(images).filter(|(_, image)| has_pixels(image)) {
        if let Some(made) = made.next() {
            *value = made;
        }
    }
    Ok(values)
}

/// Converts a text to the answer to a question about the media.
fn answer(parts: Vec<MessagePart>, question: &str) -> Dialogue {
    let (answer, mut asked): (Vec<_>, Vec<_>) =
        parts.into_iter().partition(|part| matches!(part, MessagePart::Text(_)));
    if !question.is_empty() {
        asked.push(MessagePart::Text(question.to_owned()));
    }
    Dialogue::new(vec![Message::new("user", asked), Message::new("assistant", answer)])
}

/// Returns the labels; the first token in a sample has no predecessor that could predict it.
fn labels(expanded: &Expanded) -> Vec<i32> {
    let is_learned = |(place, is_target): (usize, &bool)| *is_target && place > 0;
    let learned = expanded.is_target.iter().enumerate().map(is_learned);
    learned.zip(&expanded.ids).map(|(is_learned, &id)| if is_learned { id as i32 } else { IGNORED }).collect()
}

impl SampleProcessor for Preparer {
    fn prepare(&self, sample: &Sample) -> Result<PreparedSample, PrepareError> {
        Self::prepare(self, sample)
    }

    fn pack(&self, samples: Vec<PreparedSample>, filler: &Filler) -> ModelInputs {
        self.pack_filled(samples, filler)
    }

    fn filler(&self, encoders: &[Module]) -> Result<Filler> {
        self.make_filler(encoders)
    }

    fn limited(&self, tokens_max: Option<u64>, pad_to_tokens: Option<usize>) -> Arc<dyn SampleProcessor> {
        let mut limited = self.clone();
        if let Some(tokens) = tokens_max {
            limited = limited.tokens_at_most(tokens);
        }
        if let Some(tokens) = pad_to_tokens {
            limited = limited.pad_to_tokens(tokens);
        }
        Arc::new(limited)
    }

    fn layout(&self) -> BatchLayout {
        Self::layout(self)
    }

    fn has_buckets(&self) -> bool {
        self.packer.length_buckets.is_some()
            || self.media_buckets.is_some()
            || self.packer.sample_multiple > 1
    }

    fn requires_targets(&self) -> bool {
        self.requires_targets
    }

    fn reads_pixels(&self) -> bool {
        Self::reads_pixels(self)
    }

    fn tensor_bytes(&self, shape: &SampleShape) -> u64 {
        Self::tensor_bytes(self, shape)
    }
}

#[cfg(test)]
mod tests;
