//! Converts images and videos to vision encoder input tensors.
//!
//! Every value equals, bit for bit, the output of the model's processor in Hugging Face transformers 4.57.1
//! with NumPy and Pillow; grids, sizes and token counts follow the cost model's rules. Pillow means versions
//! up to 12.1, with which the published models were trained: later versions run the vertical pass in
//! `Image.resize` first for some images (12.2: more than 100 times as high as wide; 13.0: if the height
//! shrinks by more than twice as many pixels as the width), which rounds differently. Processors that work on
//! `PyTorch` tensors ("fast") use different resizing arithmetic and differ by a few steps of 1/255.
//!
//! [`ImageProcessor`] holds a family's processor, which implements [`VisionProcessor`]; resizing and tile
//! layout are shared. Buffers are kept per thread.

mod filter;
pub(crate) mod processor;
pub(crate) mod resample;
pub(crate) mod tiles;

use std::borrow::Borrow;
use std::sync::Arc;

use dflop_costmodel::ImageSize;
use dflop_costmodel::tokens::VisionRule;
use dflop_samples::inputs::PixelValues;
use dflop_samples::media::{PixelType, RgbImage, Video};
use dflop_samples::{Error, Result};

pub use self::filter::Filter;
pub(crate) use self::processor::GenericProcessor;
pub use self::processor::{PixelSettings, SquareResize, VisionProcessor};
pub(crate) use dflop_samples::media::Pixel;

/// Image processor for a model family, shared.
///
/// Cloning is cheap.
#[derive(Clone, Debug)]
pub struct ImageProcessor(Arc<dyn VisionProcessor>);

impl ImageProcessor {
    /// Wraps a family's processor.
    #[must_use]
    pub fn new(processor: impl VisionProcessor + 'static) -> Self {
        Self(Arc::new(processor))
    }

    /// Returns the filter, the statistics and the crop.
    #[must_use]
    pub fn settings(&self) -> PixelSettings {
        self.0.settings()
    }

    /// Copies filter, statistics and cropping from another processor; the token rule stays.
    #[must_use]
    pub fn with_pixels_from(self, other: &Self) -> Self {
        self.0.with_settings(&other.settings())
    }

    /// Returns the conversion from bytes to values.
    #[must_use]
    pub fn normalization(&self) -> Normalization {
        self.settings().normalization
    }

    /// Returns the token rule; `None` if every image and every frame is a single item and none is omitted.
    #[must_use]
    pub fn rule(&self) -> Option<VisionRule> {
        self.0.rule()
    }

    /// Returns the pixel bytes per encoder item, a tile or a patch, in single precision.
    #[must_use]
    pub fn item_bytes(&self) -> u64 {
        self.0.item_bytes()
    }

    /// Prepares all images in a sample together, because LLaVA-OneVision treats a single image differently
    /// from several.
    ///
    /// # Errors
    /// [`Error::Medium`] if the model rejects an image.
    pub fn images<I: Borrow<RgbImage>>(&self, images: &[I]) -> Result<Vec<PixelValues>> {
        self.images_as(images, PixelType::Float32)
    }

    /// Prepares all images in a sample, with a pixel type.
    ///
    /// # Errors
    /// See [`Self::images`].
    pub fn images_as<I: Borrow<RgbImage>>(
        &self,
        images: &[I],
        pixels: PixelType,
    ) -> Result<Vec<PixelValues>> {
        let image = |image: &I| {
            let view = RgbView::from(image.borrow());
            check_pixels(view)?;
            let made = self.0.image(view, images.len(), pixels);
            made.map_err(|source| Error::Medium { medium: "image", source })
        };
        images.iter().map(image).collect()
    }

    /// Prepares the sampled frames of a video; if there are more frames than the model accepts, some are
    /// selected evenly, including the first and the last.
    ///
    /// # Errors
    /// [`Error::Medium`] if the model rejects the frames or there are none.
    pub fn video<I: Borrow<RgbImage>>(&self, frames: &[I]) -> Result<PixelValues> {
        let frames: Vec<_> = frames.iter().map(|frame| RgbView::from(frame.borrow())).collect();
        self.frames(&frames, PixelType::Float32)
    }

    /// Prepares a decoded video with a pixel type, without copying the frames.
    ///
    /// # Errors
    /// See [`Self::video`].
    pub fn sampled_video_as(&self, video: &Video, pixels: PixelType) -> Result<PixelValues> {
        let frames = RgbView::video_frames(video);
        if frames.len() != video.frames() {
            let reason = format!("expected the pixels of {} frames, got {}", video.frames(), frames.len());
            return Err(Error::Medium { medium: "video", source: reason.into() });
        }
        self.frames(&frames, pixels)
    }

    fn frames(&self, frames: &[RgbView<'_>], pixels: PixelType) -> Result<PixelValues> {
        if frames.is_empty() {
            return Err(Error::Medium { medium: "video", source: "the video has no frames".into() });
        }
        frames.iter().try_for_each(|&frame| check_pixels(frame))?;
        self.0.video(frames, pixels).map_err(|source| Error::Medium { medium: "video", source })
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

/// Selects at most `frames_max` frames, evenly spaced from the first to the last.
pub(crate) fn frames_taken<'a>(frames: &[RgbView<'a>], frames_max: u32) -> Vec<RgbView<'a>> {
    places_taken(frames.len(), frames_max).map(|place| frames[place]).collect()
}

/// Selects the indices of the same frames in `frames`.
pub(crate) fn places_taken(frames: usize, frames_max: u32) -> impl Iterator<Item = usize> {
    let most = (frames_max as usize).max(1).min(frames);
    let steps = (most.saturating_sub(1)).max(1);
    (0..most).map(move |frame| if frames == most { frame } else { frame * (frames - 1) / steps })
}

/// Converts a medium's token count, which fits because the rule bounds the feature map.
pub(crate) fn positions(tokens: u64) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// Returns the bytes in a square of f32 pixels with three colors.
pub(crate) fn square_bytes(side: u16) -> u64 {
    3 * u64::from(side).pow(2) * size_of::<f32>() as u64
}

/// Mean of CLIP's training pixels: red, green, blue, on a scale from 0 to 1.
pub const CLIP_MEAN: [f64; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
/// Standard deviation of CLIP's training pixels.
pub const CLIP_DEVIATION: [f64; 3] = [0.268_629_54, 0.261_302_58, 0.275_777_11];
/// `ImageNet` pixel mean, on the same scale.
pub const IMAGENET_MEAN: [f64; 3] = [0.485, 0.456, 0.406];
/// `ImageNet` pixel standard deviation.
pub const IMAGENET_DEVIATION: [f64; 3] = [0.229, 0.224, 0.225];

/// Byte normalization: `(byte * scale - mean) / deviation`, channel by channel.
///
/// The product is computed in double precision and rounded to single; the rest is single precision, as in the
/// NumPy processors in Hugging Face transformers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalization {
    /// Factor for each byte, usually 1 / 255.
    pub scale: f64,
    /// Red, green and blue mean, subtracted after scaling.
    pub mean: [f64; 3],
    /// Red, green and blue standard deviation, the divisor.
    pub deviation: [f64; 3],
}

/// Value for every byte in every channel.
pub(crate) type Tables<T> = [[T; 256]; 3];

impl Normalization {
    const BYTE: f64 = 1.0 / 255.0;
    /// CLIP pixel statistics.
    pub const CLIP: Self = Self { scale: Self::BYTE, mean: CLIP_MEAN, deviation: CLIP_DEVIATION };
    /// `ImageNet` statistics.
    pub const IMAGENET: Self = Self { scale: Self::BYTE, mean: IMAGENET_MEAN, deviation: IMAGENET_DEVIATION };
    /// Maps bytes to the range -1 to 1.
    pub const SIGNED: Self = Self { scale: Self::BYTE, mean: [0.5; 3], deviation: [0.5; 3] };

    pub(crate) fn tables<T: Pixel>(&self) -> Tables<T> {
        std::array::from_fn(|channel| {
            let mean = self.mean[channel] as f32;
            let deviation = self.deviation[channel] as f32;
            let normalized = |byte| ((f64::from(byte) * self.scale) as f32 - mean) / deviation;
            std::array::from_fn(|byte| T::of(byte as u8, normalized(byte as u8)))
        })
    }

    /// Returns the mean as a color, rounded down as the processors do.
    pub(crate) fn mean_color(&self) -> [u8; 3] {
        self.mean.map(|mean| (mean * 255.0) as u8)
    }
}

/// Borrowed pixels, `[height, width, 3]`.
#[derive(Clone, Copy, Debug)]
pub struct RgbView<'a> {
    /// Number of columns.
    pub width: u32,
    /// Number of rows.
    pub height: u32,
    /// Red, green and blue for every pixel, row by row.
    pub pixels: &'a [u8],
}

impl<'a> RgbView<'a> {
    /// Returns the frames in a video; the last frame may lack pixels.
    fn video_frames(video: &'a Video) -> Vec<Self> {
        let (width, height) = (video.width, video.height);
        let bytes = 3 * width as usize * height as usize;
        video.pixels.chunks(bytes.max(1)).map(|pixels| Self { width, height, pixels }).collect()
    }

    /// Returns columns and rows.
    #[must_use]
    pub const fn size(self) -> ImageSize {
        ImageSize { width: self.width, height: self.height }
    }
}

impl<'a> From<&'a RgbImage> for RgbView<'a> {
    fn from(image: &'a RgbImage) -> Self {
        Self { width: image.width, height: image.height, pixels: &image.pixels }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signed_bytes_fill_the_range() {
        let tables = Normalization::SIGNED.tables::<f32>();
        assert_eq!((tables[0][0], tables[2][255]), (-1.0, 1.0));
    }

    #[test]
    fn the_mean_color_is_rounded_down() {
        assert_eq!(Normalization::CLIP.mean_color(), [122, 116, 104]);
        assert_eq!(Normalization::SIGNED.mean_color(), [127; 3]);
    }
}
