//! Describes model families: how media are written into the text, and which tensors the model takes.
//!
//! The processor of every family replaces the placeholder of a medium by as many copies as the encoder
//! produces tokens. One file has one family, with its placeholders, pixel layout, chat template and image
//! processor; [`ProcessorFamilies`] finds it by the id that a [`ModelSpec`](dflop_costmodel::ModelSpec)
//! carries.

mod clip_siglip;
mod gemma3;
mod intern_vl;
mod llava_onevision;
mod qwen2_audio;
mod qwen_vl;
mod registry;

pub use self::clip_siglip::Square;
pub use self::intern_vl::InternVl;
pub use self::llava_onevision::LlavaOneVision;
pub use self::qwen_vl::QwenVl;
pub use self::registry::{AudioInputs, ProcessorFamilies, ProcessorFamily, VisionInputs};
use dflop_samples::media::Modality;

use crate::message::MessagePart;

/// Text form of one modality.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placeholder {
    /// Token that represents one encoder output, and before expansion the whole medium.
    pub token: &'static str,
    /// Tokens before and after the copies.
    pub markers: Option<[&'static str; 2]>,
    /// Whether the chat template writes the markers; else the expansion adds them.
    pub has_markers_in_text: bool,
}

impl Placeholder {
    /// Returns the medium as a chat template writes it.
    #[must_use]
    pub fn to_text(&self) -> String {
        match self.markers {
            Some([open, close]) if self.has_markers_in_text => [open, self.token, close].concat(),
            _ => self.token.to_owned(),
        }
    }
}

/// Layout of the pixels of several images in one tensor, with its companion tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PixelLayout {
    /// `pixel_values [images, most tiles, 3, side, side]`, padded with zeros, with `image_sizes` and
    /// `batch_num_images`: LLaVA-OneVision.
    PaddedTiles,
    /// `pixel_values [tiles, 3, side, side]`: InternVL.
    Tiles,
    /// The same, and `token_type_ids` that tell tokens of images from others: Gemma 3.
    TypedTiles,
    /// `pixel_values [patches, values]` with `image_grid_thw`: Qwen2-VL.
    Patches {
        /// Patches along each side of the square that becomes one token.
        merge: u32,
        /// Positions per second of video, with `second_per_grid_ts` in addition to the grids: Qwen2.5-VL.
        /// `None` if layers of frames are counted: Qwen2-VL.
        tokens_per_second: Option<u32>,
    },
}

/// Word that chat templates write for an image, which the text form of the image replaces before
/// tokenization: Gemma 3.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ImageWord {
    /// Word in the text of a chat template.
    pub word: &'static str,
    /// Text with the placeholder and its markers.
    pub text: &'static str,
}

/// Text form of a video. Its pixels are in separate tensors, `pixel_values_videos`, or among those of images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VideoText {
    /// One medium with its own placeholder.
    Whole(Placeholder),
    /// One line per frame, `Frame1: ` and the placeholder of an image, which replace one word: InternVL.
    Frames {
        /// Word that the chat template writes for the whole video.
        word: &'static str,
    },
}

impl VideoText {
    /// Returns the video as a chat template writes it.
    #[must_use]
    pub fn to_text(&self) -> String {
        match self {
            Self::Whole(placeholder) => placeholder.to_text(),
            Self::Frames { word } => (*word).to_owned(),
        }
    }
}

/// Properties of a model family that preparation depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Family {
    image: Option<(Placeholder, PixelLayout)>,
    image_word: Option<ImageWord>,
    video: Option<VideoText>,
    audio: Option<Placeholder>,
}

impl Family {
    /// Returns the family of a text-only model.
    #[must_use]
    pub const fn text() -> Self {
        Self { image: None, image_word: None, video: None, audio: None }
    }

    /// Returns the text form of images; `None` for a model without vision.
    #[must_use]
    pub fn image(&self) -> Option<&Placeholder> {
        self.image.as_ref().map(|(placeholder, _)| placeholder)
    }

    /// Returns the word that chat templates write for an image, if its text form replaces one.
    #[must_use]
    pub const fn image_word(&self) -> Option<ImageWord> {
        self.image_word
    }

    /// Returns an image as a chat template writes it; empty for a model without vision.
    #[must_use]
    pub fn image_text(&self) -> String {
        match self.image_word {
            Some(word) => word.word.to_owned(),
            None => self.image().map_or_else(String::new, Placeholder::to_text),
        }
    }

    /// Returns the text form of videos; `None` for a model without vision.
    #[must_use]
    pub fn video(&self) -> Option<&VideoText> {
        self.video.as_ref()
    }

    /// Returns the text form of audio clips; `None` for a model without audio.
    #[must_use]
    pub fn audio(&self) -> Option<&Placeholder> {
        self.audio.as_ref()
    }

    /// Returns the layout of pixels; `None` for a model without vision.
    #[must_use]
    pub fn pixel_layout(&self) -> Option<PixelLayout> {
        self.image.as_ref().map(|(_, layout)| *layout)
    }

    /// Returns whether the model takes any medium besides text, so that it has a processor and not only a
    /// tokenizer.
    #[must_use]
    pub fn has_media(&self) -> bool {
        self.image.is_some() || self.audio.is_some()
    }

    /// Writes the parts of a turn as one string: media as their placeholders, each followed by `separator`.
    #[must_use]
    pub fn inline(&self, parts: &[MessagePart], separator: &str) -> String {
        let placeholder =
            |of: Option<&Placeholder>| of.map(|of| of.to_text() + separator).unwrap_or_default();
        let part = |part: &MessagePart| match part {
            MessagePart::Text(text) => text.clone(),
            MessagePart::Medium(Modality::Image) => {
                self.image().map(|_| self.image_text() + separator).unwrap_or_default()
            }
            MessagePart::Medium(Modality::Audio) => placeholder(self.audio()),
            MessagePart::Medium(Modality::Video) => {
                self.video().map(|of| of.to_text() + separator).unwrap_or_default()
            }
        };
        parts.iter().map(part).collect()
    }
}
