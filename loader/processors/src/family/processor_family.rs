//! Trait that every model family implements, and the inputs that it describes.

use std::fmt::Debug;
use std::sync::Arc;

use dflop_costmodel::FamilyId;
use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::model::{AudioSpec, VisionSpec};

use super::{ImageWord, PixelLayout, Placeholder, VideoText};
use crate::image::ImageProcessor;
use crate::tensors::AudioTensors;

/// Token that begins a turn in `ChatML`.
pub(super) const CHATML_TOKEN: &str = "<|im_start|>";
/// Template of models that have no media, or media of several families.
pub(super) const CHATML: &str = include_str!("templates/chatml.jinja");

/// Text form, layout and processor of the images and videos of a model.
#[derive(Debug, Clone)]
pub struct VisionInputs {
    /// Text form of an image.
    pub image: Placeholder,
    /// Text form of a video.
    pub video: VideoText,
    /// Layout of the pixels of several images in one tensor.
    pub layout: PixelLayout,
    /// Processor of images and videos, with the statistics of the published checkpoints.
    pub processor: ImageProcessor,
}

/// Text form and processor of the audio clips of a model.
#[derive(Debug, Clone)]
pub struct AudioInputs {
    /// Text form of a clip.
    pub clip: Placeholder,
    /// Processor of clips.
    pub processor: Arc<dyn AudioTensors>,
}

/// Model family as its Hugging Face processor treats it: placeholders, tensors and chat template.
///
/// A family outside this crate implements this trait and goes into
/// [`ProcessorFamilies::with`](super::ProcessorFamilies::with). A modality that it does not have returns
/// `None`, as does an encoder whose token rule is not the family's.
pub trait ProcessorFamily: Debug + Send + Sync {
    /// Returns the id that encoders of this family carry.
    fn id(&self) -> FamilyId;

    /// Returns text form, layout and processor of images and videos. Default: none.
    fn vision(&self, vision: &VisionSpec) -> Option<VisionInputs> {
        let _ = vision;
        None
    }

    /// Returns the arrangement of the tokens of an image. Default: one run of the placeholder.
    fn arrangement(&self, vision: &VisionSpec) -> Arrangement {
        let _ = vision;
        Arrangement::Run
    }

    /// Returns text form and processor of audio clips. Default: none.
    fn audio(&self, audio: &AudioSpec) -> Option<AudioInputs> {
        let _ = audio;
        None
    }

    /// Returns the word that chat templates write for an image, if its text form replaces one before
    /// tokenization. Default: none, they write the placeholder.
    fn image_word(&self, vision: &VisionSpec) -> Option<ImageWord> {
        let _ = vision;
        None
    }

    /// Returns the chat template, in Jinja, for models whose files contain none. Default: `ChatML`.
    fn chat_template(&self) -> &'static str {
        CHATML
    }

    /// Returns the token that the vocabulary must have for this chat template; `None` if the template writes
    /// turns as words, and stands back for the formats of `ChatML` and Llama 3. Default: that of `ChatML`.
    fn turn_token(&self) -> Option<&'static str> {
        Some(CHATML_TOKEN)
    }

    /// Returns the values of `image_processor_type` that this family reads, without `Fast` and `Pil` at the
    /// end.
    /// Default: none.
    fn image_processor_types(&self) -> &[&str] {
        &[]
    }

    /// Reads the image processor from a `preprocessor_config.json`; missing settings have its defaults.
    ///
    /// # Errors
    /// [`dflop_costmodel::Error::Configuration`] that names the field. Default: the family has no image
    /// processor.
    fn read_image_processor(&self, fields: &ConfigFields<'_>) -> dflop_costmodel::Result<ImageProcessor> {
        Err(fields.invalid("image_processor_type", "belongs to a family without an image processor"))
    }
}

/// Arrangement of the tokens that represent an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrangement {
    /// A single run of placeholder copies.
    Run,
    /// Rows of copies, with the number of rows in the image grid: Pixtral.
    Rows {
        /// Token after each row but the last.
        row_end: &'static str,
        /// Token after the last row.
        image_end: &'static str,
    },
    /// Tiles, each after a token and a token that names the tile's row and column, with a line break after
    /// each row; then a blank line and a tile with the whole image: Idefics3.
    NamedTiles {
        /// Number of placeholder copies per tile.
        tile_tokens: u32,
        /// Token before each tile and after the last.
        edge: &'static str,
        /// Token that names the tile with the whole image.
        whole: &'static str,
    },
}
