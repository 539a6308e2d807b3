//! Images and videos to the tensors of a vision tower.
//!
//! Every value is the one that the model's processor of Hugging Face transformers 4.57.1 makes with NumPy and
//! Pillow, bit for bit; grids, sizes and token counts are those of the cost model's rules. Pillow means the
//! versions up to 12.1, with which the published models were trained: later ones take the vertical pass of
//! `Image.resize` first for some images (12.2: over 100 times as high as wide; 13.0: where the height shrinks
//! by more than twice as many pixels as the width), which rounds otherwise. Processors that work on `PyTorch`
//! tensors ("fast") resize by other arithmetic and differ by a few steps of 1/255.
//!
//! One family a file; resizing and the layout of tiles are shared. Buffers are kept per thread.

mod clip;
mod config;
mod convolve;
mod filter;
mod intern_vl;
mod llava_onevision;
mod normalize;
mod qwen_vl;
mod resample;
mod rgb_view;
mod squares;
mod tiles;

use std::borrow::Borrow;
use std::cell::RefCell;

use dflop_costmodel::ModelSpec;
use dflop_costmodel::tokens::VisionRule;
use serde_json::Value;

pub use self::clip::Square;
pub use self::filter::Filter;
pub use self::intern_vl::InternVl;
pub use self::llava_onevision::LlavaOneVision;
pub use self::normalize::{CLIP_DEVIATION, CLIP_MEAN, IMAGENET_DEVIATION, IMAGENET_MEAN, Normalization};
pub use self::qwen_vl::QwenVl;
use self::resample::Resampler;
use self::rgb_view::RgbView;
use crate::error::{Error, Result};
use crate::media::{RgbImage, Video};

/// One image, or all tiles or patches of it, or a video, ready for the vision tower.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PixelValues {
    /// Row-major; empty if the image was only counted.
    pub values: Vec<f32>,
    /// `[tiles, 3, side, side]`, or `[patches, values of a patch]` for Qwen.
    pub shape: Vec<usize>,
    /// Qwen: layers of frames, rows and columns, in patches.
    pub grid_thw: Option<[u32; 3]>,
    /// LLaVA-OneVision images: height and width before resizing.
    pub image_size: Option<[u32; 2]>,
    /// LLM positions that features take: newlines of the family included, markers around the medium not.
    pub tokens: u32,
}

/// How a model family turns images into pixel values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ImageProcessor {
    /// Any-resolution tiles.
    LlavaOneVision(LlavaOneVision),
    /// Dynamic tiles with a thumbnail.
    InternVl(InternVl),
    /// Patches at native resolution.
    QwenVl(QwenVl),
    /// One square, resized and cropped.
    Clip(Square),
    /// One square, stretched.
    Siglip(Square),
}

thread_local! {
    static RESAMPLER: RefCell<Resampler> = RefCell::default();
}

impl ImageProcessor {
    /// Returns the processor of a model of the cost model, by its vision rule, with the statistics of the
    /// published checkpoints; `None` if the model cannot see.
    #[must_use]
    pub fn for_model(model: &ModelSpec) -> Option<Self> {
        let filter = Filter::Bicubic;
        Some(match model.vision?.rule {
            VisionRule::AnyRes(rule) => {
                Self::LlavaOneVision(LlavaOneVision { rule, filter, normalization: Normalization::SIGNED })
            }
            VisionRule::DynamicTiles(rule) => {
                Self::InternVl(InternVl { rule, filter, normalization: Normalization::IMAGENET })
            }
            VisionRule::Native(rule) => {
                Self::QwenVl(QwenVl { rule, filter, normalization: Normalization::CLIP })
            }
            VisionRule::Fixed(rule) if rule.is_cropped => Self::Clip(Square::of(rule)),
            VisionRule::Fixed(rule) => Self::Siglip(Square::of(rule)),
        })
    }

    /// Reads a `preprocessor_config.json` of Hugging Face.
    ///
    /// Known are the processors of LLaVA-OneVision, InternVL (`GotOcr2`), Qwen2-VL, CLIP and SigLIP, their
    /// "fast" forms included; what the file leaves out has the processor's default.
    ///
    /// # Errors
    /// [`Error::Config`] if the processor is unknown or a setting has no counterpart here.
    pub fn from_preprocessor_config(json: &Value) -> Result<Self> {
        config::image_processor(json)
    }

    /// Takes filter and statistics from another processor, and how a square is cut; the token rule stays.
    #[must_use]
    pub fn with_pixels_of(mut self, other: &Self) -> Self {
        let (filter, normalization) = match other {
            Self::LlavaOneVision(family) => (family.filter, family.normalization),
            Self::InternVl(family) => (family.filter, family.normalization),
            Self::QwenVl(family) => (family.filter, family.normalization),
            Self::Clip(square) | Self::Siglip(square) => (square.filter, square.normalization),
        };
        match (&mut self, other) {
            (Self::Clip(square) | Self::Siglip(square), Self::Clip(other) | Self::Siglip(other)) => {
                let (side, tokens) = (square.side, square.tokens);
                let shortest_side = other.shortest_side.map(|shortest| shortest.max(side));
                *square = Square { shortest_side, side, tokens, ..*other };
            }
            (Self::LlavaOneVision(family), _) => {
                (family.filter, family.normalization) = (filter, normalization);
            }
            (Self::InternVl(family), _) => (family.filter, family.normalization) = (filter, normalization),
            (Self::QwenVl(family), _) => (family.filter, family.normalization) = (filter, normalization),
            (Self::Clip(square) | Self::Siglip(square), _) => {
                (square.filter, square.normalization) = (filter, normalization);
            }
        }
        self
    }

    /// Prepares all images of one sample, together because LLaVA-OneVision treats a lone image unlike
    /// several.
    ///
    /// # Errors
    /// [`Error::Medium`] if the model refuses an image.
    pub fn images<I: Borrow<RgbImage>>(&self, images: &[I]) -> Result<Vec<PixelValues>> {
        RESAMPLER.with_borrow_mut(|resampler| {
            images
                .iter()
                .map(|image| self.image(RgbView::from(image.borrow()), images.len(), resampler))
                .collect()
        })
    }

    /// Prepares the frames of one video, which are sampled already; more than the model takes are sampled
    /// further, evenly and with the first and the last.
    ///
    /// # Errors
    /// [`Error::Medium`] if the model refuses the frames or there are none.
    pub fn video<I: Borrow<RgbImage>>(&self, frames: &[I]) -> Result<PixelValues> {
        self.frames(&frames.iter().map(|frame| RgbView::from(frame.borrow())).collect::<Vec<_>>())
    }

    /// Prepares a decoded video, without a copy of its frames.
    ///
    /// # Errors
    /// As [`Self::video`].
    pub fn sampled_video(&self, video: &Video) -> Result<PixelValues> {
        let frames = RgbView::frames_of(video);
        if frames.len() != video.frames() {
            let reason = format!("{} times for {} frames of pixels", video.frames(), frames.len());
            return Err(Error::Medium { medium: "video", source: reason.into() });
        }
        self.frames(&frames)
    }

    fn frames(&self, frames: &[RgbView<'_>]) -> Result<PixelValues> {
        if frames.is_empty() {
            return Err(Error::Medium { medium: "video", source: "it has no frames".into() });
        }
        frames.iter().try_for_each(|&frame| check_pixels(frame))?;
        let taken = RESAMPLER.with_borrow_mut(|resampler| match self {
            Self::LlavaOneVision(family) => Ok(family.video(frames, resampler)),
            Self::InternVl(family) => Ok(family.video(frames, resampler)),
            Self::QwenVl(family) => family.video(frames, resampler),
            Self::Clip(square) | Self::Siglip(square) => Ok(square.frames(frames, resampler)),
        });
        taken.map_err(|refusal| Error::Medium { medium: "video", source: refusal.into() })
    }

    fn image(&self, image: RgbView<'_>, images: usize, resampler: &mut Resampler) -> Result<PixelValues> {
        check_pixels(image)?;
        let taken = match self {
            Self::LlavaOneVision(family) if images == 1 => family.lone_image(image, resampler),
            Self::LlavaOneVision(family) => family.one_of_several(image, resampler),
            Self::InternVl(family) => family.image(image, resampler),
            Self::QwenVl(family) => family.image(image, resampler),
            Self::Clip(square) | Self::Siglip(square) => Ok(square.frames(&[image], resampler)),
        };
        taken.map_err(|refusal| Error::Medium { medium: "image", source: refusal.into() })
    }
}

fn check_pixels(image: RgbView<'_>) -> Result<()> {
    let bytes = 3 * image.width as usize * image.height as usize;
    if bytes == 0 || image.pixels.len() != bytes {
        let reason = format!(
            "{} x {} pixels do not fill {} bytes of RGB",
            image.width,
            image.height,
            image.pixels.len()
        );
        return Err(Error::Medium { medium: "image", source: reason.into() });
    }
    Ok(())
}

/// At most `frames_max` of the frames, evenly spaced from the first to the last.
fn frames_taken<'a>(frames: &[RgbView<'a>], frames_max: u32) -> Vec<RgbView<'a>> {
    let most = (frames_max as usize).max(1);
    if frames.len() <= most {
        return frames.to_vec();
    }
    let steps = (most - 1).max(1);
    (0..most).map(|frame| frames[frame * (frames.len() - 1) / steps]).collect()
}

/// Tokens of one medium, which fit: a feature map is bounded by the rule.
fn positions(tokens: u64) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}
