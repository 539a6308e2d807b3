//! Describes model families: how media are written into the text, and which tensors the model accepts.
//!
//! Every family's processor replaces a medium placeholder by as many copies as the encoder produces tokens.
//! Each file in this module defines a family, with placeholders, pixel layout, chat template and image
//! processor; [`ProcessorFamilies`] finds the family by the id in a
//! [`ModelSpec`](dflop_costmodel::ModelSpec).

mod clip_siglip;
mod gemma3;
mod glm4v;
mod idefics3;
mod intern_vl;
mod llava;
mod llava_next;
mod llava_onevision;
mod pixtral;
mod processor_family;
mod qwen2_5_omni;
mod qwen2_audio;
mod qwen3_omni;
mod qwen_vl;
mod registry;

pub use self::clip_siglip::Square;
pub use self::idefics3::Idefics3;
pub use self::intern_vl::InternVl;
pub use self::llava_next::LlavaNext;
pub use self::llava_onevision::LlavaOneVision;
pub use self::pixtral::Pixtral;
pub use self::processor_family::{Arrangement, AudioInputs, ProcessorFamily, VisionInputs};
pub use self::qwen_vl::QwenVl;
pub use self::registry::ProcessorFamilies;
use std::num::NonZeroU32;

use dflop_samples::media::Modality;

use crate::message::MessagePart;

/// Built-in families by file.
static BUILT_IN: &[&[&dyn ProcessorFamily]] = &[
    llava_onevision::FAMILIES,
    intern_vl::FAMILIES,
    qwen_vl::FAMILIES,
    qwen2_audio::FAMILIES,
    qwen2_5_omni::FAMILIES,
    qwen3_omni::FAMILIES,
    gemma3::FAMILIES,
    clip_siglip::FAMILIES,
    llava::FAMILIES,
    llava_next::FAMILIES,
    pixtral::FAMILIES,
    idefics3::FAMILIES,
    glm4v::FAMILIES,
];

/// Text form for a modality.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placeholder {
    /// Token that represents an encoder output, and before expansion the whole medium.
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

/// Pixel layout for several images in a tensor, with companion tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PixelLayout {
    /// `pixel_values [images, max tiles, 3, side, side]`, padded with zeros, with `image_sizes` and
    /// `batch_num_images`: LLaVA-OneVision.
    PaddedTiles,
    /// The same without `batch_num_images`: LLaVA-NeXT.
    SizedTiles,
    /// `pixel_values [tiles, 3, side, side]`: InternVL.
    Tiles,
    /// The same, and `token_type_ids` that distinguish image tokens from other tokens: Gemma 3.
    TypedTiles,
    /// `pixel_values [1, tiles, 3, side, side]`: Idefics3. The pixel mask from the Hugging Face processor is
    /// omitted: it is all ones, which the model assumes without a mask.
    TileRow,
    /// `pixel_values [images, 3, max rows, max columns]`, padded with zeros at the right and the bottom, with
    /// `image_sizes`: Pixtral.
    PaddedImages,
    /// `pixel_values [patches, values]` with `image_grid_thw`: Qwen2-VL.
    Patches {
        /// Number of patches along each side of the square that becomes one token.
        merge: u32,
        /// Positions of video layers.
        time: LayerTime,
    },
}

/// Time positions for video frame layers, with the tensor required in addition to the grids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerTime {
    /// Layers are counted: Qwen2-VL.
    Counted,
    /// Layers are positioned by start time, rounded down to a position, with `second_per_grid_ts`; tokens
    /// have types: Qwen2.5-VL.
    TypedSeconds {
        /// Positions per second.
        positions: u32,
    },
    /// The same with `video_second_per_grid`; all tokens have the same type: Qwen2.5-Omni, Qwen3-Omni.
    Seconds {
        /// Positions per second.
        positions: u32,
    },
}

impl LayerTime {
    /// Returns the name of the tensor with the seconds per layer for every video, if there is such a tensor.
    pub(crate) const fn tensor(self) -> Option<&'static str> {
        match self {
            Self::Counted => None,
            Self::TypedSeconds { .. } => Some("second_per_grid_ts"),
            Self::Seconds { .. } => Some("video_second_per_grid"),
        }
    }

    /// Returns whether the model accepts token types, `mm_token_type_ids`.
    pub(crate) const fn has_token_types(self) -> bool {
        !matches!(self, Self::Seconds { .. })
    }
}

/// Word that chat templates write for an image, replaced by the image's text form before tokenization: Gemma
/// 3.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ImageWord {
    /// Word in a chat template's text.
    pub word: &'static str,
    /// Text with the placeholder and markers.
    pub text: &'static str,
    /// Words around image crops, if the model accepts crops.
    pub crops: Option<CropWords>,
}

/// Words around an image and the crops; the image and each crop have the full text of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CropWords {
    /// Words before the image.
    pub before: &'static str,
    /// Words between the image and the first crop.
    pub between: &'static str,
    /// Text between crops.
    pub separator: &'static str,
    /// Number of LLM positions for the image, and for each crop.
    pub tile_tokens: NonZeroU32,
}

impl ImageWord {
    /// Returns the token count of each placeholder run for an image with `tokens` in total.
    pub(crate) fn runs(&self, tokens: u32) -> impl Iterator<Item = u32> + use<> {
        let (tiles, each) = match self.crops {
            Some(crops) => ((tokens / crops.tile_tokens).max(1), crops.tile_tokens.get().min(tokens)),
            None => (1, tokens),
        };
        std::iter::repeat_n(each, tiles as usize)
    }

    /// Writes an image with `tokens` in total, including crops.
    pub(crate) fn write(&self, tokens: u32) -> String {
        let crops = self.runs(tokens).count() - 1;
        match self.crops.filter(|_| crops > 0) {
            Some(words) => {
                let of_crops = vec![self.text; crops].join(words.separator);
                [words.before, self.text, words.between, &of_crops].concat()
            }
            None => self.text.to_owned(),
        }
    }
}

/// Text form for a video. Video pixels are in separate tensors, `pixel_values_videos`, or among the image
/// tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VideoText {
    /// A single medium with a separate placeholder.
    Whole(Placeholder),
    /// A medium per frame layer, each after a time, `<0.5 seconds>`, in place of the placeholder token:
    /// Qwen3-VL.
    Timed(Placeholder),
    /// A line per frame, `Frame1: ` and an image placeholder, which replace a single word: InternVL.
    Frames {
        /// Word that the chat template writes for the whole video.
        word: &'static str,
    },
    /// None: the model does not support videos, and rejects samples with a video.
    None,
}

impl VideoText {
    /// Returns the video as a chat template writes it.
    #[must_use]
    pub fn to_text(&self) -> String {
        match self {
            Self::Whole(placeholder) | Self::Timed(placeholder) => placeholder.to_text(),
            Self::Frames { word } => (*word).to_owned(),
            Self::None => String::new(),
        }
    }

    /// Returns the placeholder for a video or a video layer; `None` if frames are written as images.
    #[must_use]
    pub fn placeholder(&self) -> Option<&Placeholder> {
        match self {
            Self::Whole(placeholder) | Self::Timed(placeholder) => Some(placeholder),
            Self::Frames { .. } | Self::None => None,
        }
    }
}

/// Model family properties that preparation depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Family {
    image: Option<(Placeholder, PixelLayout)>,
    arrangement: Arrangement,
    image_word: Option<ImageWord>,
    video: Option<VideoText>,
    audio: Option<Placeholder>,
}

impl Family {
    /// Returns the family for a text-only model.
    #[must_use]
    pub const fn text() -> Self {
        Self { image: None, arrangement: Arrangement::Run, image_word: None, video: None, audio: None }
    }

    /// Returns the text form for images; `None` for a model without vision.
    #[must_use]
    pub fn image(&self) -> Option<&Placeholder> {
        self.image.as_ref().map(|(placeholder, _)| placeholder)
    }

    /// Returns the arrangement of image tokens.
    #[must_use]
    pub fn arrangement(&self) -> Arrangement {
        self.arrangement
    }

    /// Returns the word that chat templates write for an image, if the image's text form replaces a word.
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

    /// Returns the text form for videos; `None` for a model without vision.
    #[must_use]
    pub fn video(&self) -> Option<&VideoText> {
        self.video.as_ref()
    }

    /// Returns the text form for audio clips; `None` for a model without audio.
    #[must_use]
    pub fn audio(&self) -> Option<&Placeholder> {
        self.audio.as_ref()
    }

    /// Returns the pixel layout; `None` for a model without vision.
    #[must_use]
    pub fn pixel_layout(&self) -> Option<PixelLayout> {
        self.image.as_ref().map(|(_, layout)| *layout)
    }

    /// Returns whether the model supports any medium besides text, so that it has a processor and not only a
    /// tokenizer.
    #[must_use]
    pub fn has_media(&self) -> bool {
        self.image.is_some() || self.audio.is_some()
    }

    /// Writes turn parts as a string: media as placeholders, each followed by `separator`.
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
