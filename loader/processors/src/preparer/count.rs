//! Counts the text tokens of a sample exactly, so that a plan matches what is delivered.
//!
//! The index stores these counts in addition to its estimates, see [`crate::index::TokenCounts`].

use dflop_costmodel::ModelSpec;
use dflop_costmodel::tokens::VisionRule;
use dflop_samples::BoxError;
use dflop_samples::inputs::{IGNORED, PixelValues, PrepareError, TextCounter, VideoValues};
use dflop_samples::media::{Modality, TextLength};
use dflop_samples::sample::Sample;
use dflop_samples::sample::text::ASSISTANT_ROLES;
use xxhash_rust::xxh3::Xxh3;

use super::{Preparer, labels};
use crate::chat::Tokenizer;
use crate::chat::target_tokens;
use crate::chat::{Conversation, read_conversation};
use crate::message::MessagePart;

/// Counts the tokens that a [`Preparer`] writes for text: words, chat template and special tokens.
///
/// Markers around media are left out, because the cost model counts them with their media: both together give
/// the length of the prepared sample.
#[derive(Debug, Clone)]
pub struct PreparedTexts {
    preparer: Preparer,
    markers: MarkerTokens,
    digest: String,
}

/// Numbers of marker tokens around one medium, by the token rules of the model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct MarkerTokens {
    pub(super) image: u8,
    pub(super) audio: u8,
    pub(super) video: u8,
}

impl MarkerTokens {
    /// Returns the markers of a model's token rules.
    pub(super) fn from_model(model: &ModelSpec) -> Self {
        let vision = model.vision.map(|vision| Self::from_vision_rule(&vision.rule)).unwrap_or_default();
        Self { audio: model.audio.map_or(0, |audio| audio.rule.marker_tokens), ..vision }
    }

    fn from_vision_rule(rule: &VisionRule) -> Self {
        match rule {
            VisionRule::AnyRes(_) => Self::default(),
            VisionRule::Fixed(rule) => Self { image: rule.marker_tokens, ..Self::default() },
            // The frames of a video are written as text, whose labels the rule counts.
            VisionRule::DynamicTiles(rule) => Self { image: rule.marker_tokens, ..Self::default() },
            VisionRule::Native(rule) => {
                Self { image: rule.marker_tokens, video: rule.marker_tokens, ..Self::default() }
            }
        }
    }
}

impl Preparer {
    /// Returns a counter of the texts that this preparer writes.
    #[must_use]
    pub fn text_counter(&self) -> PreparedTexts {
        let mut digest = Xxh3::new();
        digest.update(self.tokenizer.serialized().as_bytes());
        // The digest covers `Debug` texts: after a rename inside these types, indexes count their texts
        // again.
        let rest = (&self.family, &self.chat_template, &self.plain_text, self.markers);
        digest.update(format!("{rest:?}").as_bytes());
        PreparedTexts { preparer: self.clone(), markers: self.markers, digest: hex(&digest) }
    }

    /// Returns the tokens of a sample without those of its media.
    ///
    /// If the frames of a video are written as text, their labels are left out too, because the cost model
    /// counts them.
    fn text_length(&self, sample: &Sample, markers: MarkerTokens) -> Result<TextLength, PrepareError> {
        let read = read_conversation(sample, |modality| self.takes(modality))?;
        let media = [read.images.len(), read.clips.len(), read.videos.len()];
        let (mut marked, has_special) = self.render_conversation(read.conversation)?;
        let images = vec![PixelValues::default(); media[0]];
        let videos = vec![VideoValues::default(); media[2]];
        let (in_text, videos) = self.merge_frames(&mut marked, images, videos)?;
        // A family that writes frames as text has no videos left, but one empty image for each of them.
        let [media_images, media_videos] = [in_text.media.len() - (media[2] - videos.len()), videos.len()];
        let has_frames = media_videos < media[2];
        let counts = [media_images, media[1], media_videos];
        let one_token = |modality| match modality {
            Modality::Image => vec![1; counts[0]],
            Modality::Audio => vec![1; counts[1]],
            Modality::Video => vec![1; counts[2]],
        };
        let refused = |reason| PrepareError::Tokenizer { reason };
        let encoded = self.tokenizer.encode(&marked.text, has_special).map_err(refused)?;
        let is_target = target_tokens(&encoded, &marked.targets);
        let expanded = self.expander.expand(&encoded.ids, &is_target, one_token)?;
        let of_markers = [markers.image, markers.audio, markers.video].into_iter().zip(media);
        let marker_tokens: usize = of_markers.map(|(tokens, media)| usize::from(tokens) * media).sum();
        let learned = labels(&expanded).iter().filter(|&&label| label != IGNORED).count();
        // The frames precede the caption, so its first token has a predecessor and is a target after all.
        let learned = learned + usize::from(has_frames && expanded.is_target.first() == Some(&true));
        let media_tokens: usize = counts.iter().sum();
        let tokens = expanded.ids.len().saturating_sub(media_tokens + marker_tokens);
        Ok(TextLength { tokens: to_u32(tokens), target_tokens: to_u32(learned) })
    }
}

impl TextCounter for PreparedTexts {
    fn digest(&self) -> String {
        self.digest.clone()
    }

    fn count(&self, sample: &Sample) -> Result<TextLength, BoxError> {
        Ok(self.preparer.text_length(sample, self.markers)?)
    }
}

/// Counts texts by a tokenizer alone, without chat template and special tokens.
#[derive(Debug, Clone)]
pub struct TokenizedTexts {
    tokenizer: Tokenizer,
    digest: String,
}

impl Tokenizer {
    /// Returns a counter of bare texts.
    #[must_use]
    pub fn text_counter(&self) -> TokenizedTexts {
        let mut digest = Xxh3::new();
        digest.update(self.serialized().as_bytes());
        TokenizedTexts { tokenizer: self.clone(), digest: hex(&digest) }
    }
}

impl TokenizedTexts {
    fn length(&self, parts: &[MessagePart]) -> Result<usize, BoxError> {
        let mut tokens = 0;
        for part in parts {
            if let MessagePart::Text(text) = part {
                tokens += self.tokenizer.encode(text, false)?.ids.len();
            }
        }
        Ok(tokens)
    }
}

impl TextCounter for TokenizedTexts {
    fn digest(&self) -> String {
        self.digest.clone()
    }

    fn count(&self, sample: &Sample) -> Result<TextLength, BoxError> {
        let (mut tokens, mut learned) = (0, 0);
        match read_conversation(sample, |_| true)?.conversation {
            Conversation::Plain(parts) => {
                tokens = self.length(&parts)?;
                learned = tokens;
            }
            Conversation::Turns(turns) => {
                for turn in turns {
                    let of_turn = self.length(&turn.content)?;
                    tokens += of_turn;
                    let is_learned = ASSISTANT_ROLES.contains(&turn.role.as_str());
                    learned += if is_learned { of_turn } else { 0 };
                }
            }
        }
        Ok(TextLength { tokens: to_u32(tokens), target_tokens: to_u32(learned) })
    }
}

fn hex(digest: &Xxh3) -> String {
    format!("{:016x}", digest.digest())
}

fn to_u32(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}
