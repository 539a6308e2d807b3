//! Converts images and videos to the input tensors of a vision encoder.
//!
//! Every value equals, bit for bit, the output of the model's processor in Hugging Face transformers 4.57.1
//! with NumPy and Pillow; grids, sizes and token counts follow the cost model's rules. Pillow means versions
//! up to 12.1, with which the published models were trained: later ones run the vertical pass of
//! `Image.resize` first for some images (12.2: more than 100 times as high as wide; 13.0: if the height
//! shrinks by more than twice as many pixels as the width), which rounds differently. Processors that work on
//! `PyTorch` tensors ("fast") use another resizing arithmetic and differ by a few steps of 1/255.
//!
//! There is one file per family; resizing and the layout of tiles are shared. Buffers are kept per thread.

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
use dflop_samples::inputs::PixelValues;
use dflop_samples::media::{PixelType, RgbImage, Video};
use dflop_samples::{Error, Result};
use serde_json::Value;

pub use self::clip::Square;
pub use self::filter::Filter;
pub use self::intern_vl::InternVl;
pub use self::llava_onevision::LlavaOneVision;
pub use self::normalize::{CLIP_DEVIATION, CLIP_MEAN, IMAGENET_DEVIATION, IMAGENET_MEAN, Normalization};
pub use self::qwen_vl::QwenVl;
use self::resample::Resampler;
use self::rgb_view::RgbView;
pub(crate) use dflop_samples::media::Pixel;

/// Image processor of a model family.
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
    /// published checkpoints; `None` for a model without vision.
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
            VisionRule::Fixed(rule) if rule.is_cropped => Self::Clip(Square::from_rule(rule)),
            VisionRule::Fixed(rule) => Self::Siglip(Square::from_rule(rule)),
        })
    }

    /// Reads a `preprocessor_config.json` of Hugging Face.
    ///
    /// Supported are the processors of LLaVA-OneVision, InternVL (`GotOcr2`), Qwen2-VL, CLIP and SigLIP,
    /// including their "fast" variants; missing settings have the processor's defaults.
    ///
    /// # Errors
    /// [`Error::Config`] if the processor is unknown or a setting is not supported.
    pub fn from_preprocessor_config(json: &Value) -> Result<Self> {
        config::image_processor(json)
    }

    /// Takes filter, statistics and cropping from another processor; the token rule stays.
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

    /// Prepares all images of one sample together, because LLaVA-OneVision treats a single image differently
    /// from several.
    ///
    /// # Errors
    /// [`Error::Data`] if the model cannot take an image.
    pub fn images<I: Borrow<RgbImage>>(&self, images: &[I]) -> Result<Vec<PixelValues>> {
        self.images_of::<f32, I>(images)
    }

    /// Prepares all images of one sample, with pixels of a type.
    ///
    /// # Errors
    /// See [`Self::images`].
    pub fn images_as<I: Borrow<RgbImage>>(
        &self,
        images: &[I],
        pixels: PixelType,
    ) -> Result<Vec<PixelValues>> {
        match pixels {
            PixelType::Float32 => self.images_of::<f32, I>(images),
            PixelType::BFloat16 => self.images_of::<half::bf16, I>(images),
            PixelType::UInt8 => self.images_of::<u8, I>(images),
        }
    }

    /// Returns the conversion from bytes to values.
    #[must_use]
    pub fn normalization(&self) -> Normalization {
        match self {
            Self::LlavaOneVision(family) => family.normalization,
            Self::InternVl(family) => family.normalization,
            Self::QwenVl(family) => family.normalization,
            Self::Clip(square) | Self::Siglip(square) => square.normalization,
        }
    }

    fn images_of<T: Pixel, I: Borrow<RgbImage>>(&self, images: &[I]) -> Result<Vec<PixelValues>> {
        RESAMPLER.with_borrow_mut(|resampler| {
            images
                .iter()
                .map(|image| self.image::<T>(RgbView::from(image.borrow()), images.len(), resampler))
                .collect()
        })
    }

    /// Prepares the sampled frames of one video; if there are more than the model takes, some are selected
    /// evenly, including the first and the last.
    ///
    /// # Errors
    /// [`Error::Data`] if the model cannot take the frames or there are none.
    pub fn video<I: Borrow<RgbImage>>(&self, frames: &[I]) -> Result<PixelValues> {
        self.frames::<f32>(&frames.iter().map(|frame| RgbView::from(frame.borrow())).collect::<Vec<_>>())
    }

    /// Prepares a decoded video with pixels of a type, without a copy of its frames.
    ///
    /// # Errors
    /// See [`Self::video`].
    pub fn sampled_video_as(&self, video: &Video, pixels: PixelType) -> Result<PixelValues> {
        let frames = RgbView::frames_of(video);
        if frames.len() != video.frames() {
            let reason = format!("expected the pixels of {} frames, got {}", video.frames(), frames.len());
            return Err(Error::Medium { medium: "video", source: reason.into() });
        }
        match pixels {
            PixelType::Float32 => self.frames::<f32>(&frames),
            PixelType::BFloat16 => self.frames::<half::bf16>(&frames),
            PixelType::UInt8 => self.frames::<u8>(&frames),
        }
    }

    fn frames<T: Pixel>(&self, frames: &[RgbView<'_>]) -> Result<PixelValues> {
        if frames.is_empty() {
            return Err(Error::Medium { medium: "video", source: "the video has no frames".into() });
        }
        frames.iter().try_for_each(|&frame| check_pixels(frame))?;
        let taken = RESAMPLER.with_borrow_mut(|resampler| match self {
            Self::LlavaOneVision(family) => Ok(family.video::<T>(frames, resampler)),
            Self::InternVl(family) => Ok(family.video::<T>(frames, resampler)),
            Self::QwenVl(family) => family.video::<T>(frames, resampler),
            Self::Clip(square) | Self::Siglip(square) => Ok(square.frames::<T>(frames, resampler)),
        });
        taken.map_err(|refusal| Error::Medium { medium: "video", source: refusal.into() })
    }

    fn image<T: Pixel>(
        &self,
        image: RgbView<'_>,
        images: usize,
        resampler: &mut Resampler,
    ) -> Result<PixelValues> {
        check_pixels(image)?;
        let taken = match self {
            Self::LlavaOneVision(family) if images == 1 => family.lone_image::<T>(image, resampler),
            Self::LlavaOneVision(family) => family.one_of_several::<T>(image, resampler),
            Self::InternVl(family) => family.image::<T>(image, resampler),
            Self::QwenVl(family) => family.image::<T>(image, resampler),
            Self::Clip(square) | Self::Siglip(square) => Ok(square.frames::<T>(&[image], resampler)),
        };
        taken.map_err(|refusal| Error::Medium { medium: "image", source: refusal.into() })
    }
}

fn check_pixels(image: RgbView<'_>) -> Result<()> {
    let bytes = 3 * image.width as usize * image.height as usize;
    if bytes == 0 || image.pixels.len() != bytes {
        let reason = format!(
            "{} x {} pixels do not match {} bytes of RGB",
            image.width,
            image.height,
            image.pixels.len()
        );
        return Err(Error::Medium { medium: "image", source: reason.into() });
    }
    Ok(())
}

/// Selects at most `frames_max` of the frames, evenly spaced from the first to the last.
fn frames_taken<'a>(frames: &[RgbView<'a>], frames_max: u32) -> Vec<RgbView<'a>> {
    let most = (frames_max as usize).max(1);
    if frames.len() <= most {
        return frames.to_vec();
    }
    let steps = (most - 1).max(1);
    (0..most).map(|frame| frames[frame * (frames.len() - 1) / steps]).collect()
}

/// Converts the tokens of one medium, which fit because the rule bounds the feature map.
fn positions(tokens: u64) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}
