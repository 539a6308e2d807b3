//! What processors of pictures and clips give: the one place where they meet the text.
//!
//! A processor turns decoded media into the tensors of its family and says how many LLM tokens each becomes. The ones
//! here only count, by the token rules that planning uses: a pipeline stage that holds the language model needs ids,
//! grids and labels, but no pixels.

use std::fmt::Debug;

use dflop_costmodel::tokens::audio::whisper_windows;
use dflop_costmodel::tokens::{EncoderWork, VisionRule};
use dflop_costmodel::{AudioLength, ImageSize};

use crate::decode::{Audio, BoxError, RgbImage};

/// One picture as its model takes it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PixelValues {
    /// Normalised pixels in `shape`; empty if they were only counted.
    pub values: Vec<f32>,
    /// `[tiles, 3, side, side]`, or `[patches, values of a patch]`.
    pub shape: Vec<usize>,
    /// Frames, rows and columns of patches, for models of native resolution.
    pub grid_thw: Option<[u32; 3]>,
    /// Height and width of the picture before it was cut into tiles, for models that take it.
    pub image_size: Option<[u32; 2]>,
    /// Copies of the placeholder that stand for the picture, markers not among them.
    pub tokens: u32,
}

/// One clip as its model takes it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct AudioFeatures {
    /// Log-mel values in `shape`; empty if they were only counted.
    pub values: Vec<f32>,
    /// Mel bins and frames.
    pub shape: [usize; 2],
    /// 1 for every frame of sound, 0 for padding.
    pub attention_mask: Vec<u8>,
    /// Copies of the placeholder that stand for the clip, markers not among them.
    pub tokens: u32,
}

/// Makes tensors of pictures.
pub trait ImageTensors: Debug + Send + Sync {
    /// Processes all pictures of one sample, which some families treat unlike one alone.
    ///
    /// # Errors
    /// Why the model cannot take a picture.
    fn images(&self, pictures: &[&RgbImage]) -> Result<Vec<PixelValues>, BoxError>;

    /// Returns about how many bytes the tensors of a sample's pictures take, so that they can be bounded before any
    /// is made.
    fn tensor_bytes(&self, sizes: &[ImageSize]) -> u64;
}

/// Makes tensors of clips.
pub trait AudioTensors: Debug + Send + Sync {
    /// Processes one clip.
    ///
    /// # Errors
    /// Why the model cannot take it.
    fn clip(&self, audio: &Audio) -> Result<AudioFeatures, BoxError>;

    /// Returns about how many bytes the features of a clip take.
    fn tensor_bytes(&self, length: AudioLength) -> u64;
}

/// Counts the tokens of pictures and makes no pixels.
#[derive(Debug, Clone, Copy)]
pub struct CountedImages(
    /// The rule that planning uses.
    pub VisionRule,
);

impl ImageTensors for CountedImages {
    fn images(&self, pictures: &[&RgbImage]) -> Result<Vec<PixelValues>, BoxError> {
        let size = |picture: &&RgbImage| ImageSize { width: picture.width, height: picture.height };
        let sizes: Vec<ImageSize> = pictures.iter().map(size).collect();
        let works = self.works(&sizes)?;
        let values = |(size, work): (&ImageSize, EncoderWork)| -> Result<PixelValues, BoxError> {
            let markers = match self.0 {
                VisionRule::AnyRes(_) => 0,
                VisionRule::DynamicTiles(rule) => rule.marker_tokens,
                VisionRule::Native(rule) => rule.marker_tokens,
            };
            let tokens = u32::try_from(work.tokens.saturating_sub(u64::from(markers)))?;
            let mut values = PixelValues { tokens, ..PixelValues::default() };
            match self.0 {
                VisionRule::AnyRes(_) => values.image_size = Some([size.height, size.width]),
                VisionRule::Native(rule) => {
                    let [columns, rows] = rule.grid(*size)?;
                    values.grid_thw = Some([1, u32::try_from(rows)?, u32::try_from(columns)?]);
                }
                VisionRule::DynamicTiles(_) => {}
            }
            Ok(values)
        };
        sizes.iter().zip(works).map(values).collect()
    }

    fn tensor_bytes(&self, _: &[ImageSize]) -> u64 {
        0
    }
}

impl CountedImages {
    fn works(&self, sizes: &[ImageSize]) -> Result<Vec<EncoderWork>, dflop_costmodel::Error> {
        let alone = |size: &ImageSize| self.0.images(std::slice::from_ref(size));
        if let (VisionRule::AnyRes(rule), [_, _, ..]) = (self.0, sizes) {
            let each = |size: &ImageSize| rule.several_images(std::slice::from_ref(size));
            return sizes.iter().map(each).collect();
        }
        sizes.iter().map(alone).collect()
    }
}

/// Counts the tokens of clips and makes no features.
#[derive(Debug, Clone, Copy)]
pub struct CountedAudio;

impl AudioTensors for CountedAudio {
    fn clip(&self, audio: &Audio) -> Result<AudioFeatures, BoxError> {
        let length = AudioLength { frames: audio.frames() as u64, sample_rate_hz: audio.sample_rate_hz };
        let tokens = u32::try_from(whisper_windows(length)?.tokens)?;
        Ok(AudioFeatures { tokens, ..AudioFeatures::default() })
    }

    fn tensor_bytes(&self, _: AudioLength) -> u64 {
        0
    }
}
