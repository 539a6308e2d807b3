//! Defines the interface of a family's image processor.

use std::cell::RefCell;
use std::fmt::Debug;

use dflop_costmodel::tokens::VisionRule;
use dflop_samples::BoxError;
use dflop_samples::inputs::PixelValues;
use dflop_samples::media::PixelType;
use half::bf16;

use super::filter::Filter;
use super::resample::Resampler;
use super::{ImageProcessor, Normalization, Pixel, RgbView};

/// Image processor settings that do not affect token counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PixelSettings {
    /// Resampling filter.
    pub filter: Filter,
    /// Conversion from bytes to values.
    pub normalization: Normalization,
    /// Crop for a processor that converts an image to a square; `None` for all others.
    pub square: Option<SquareResize>,
}

/// Method for converting an image to a square.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SquareResize {
    /// The whole image is stretched.
    Stretched,
    /// The shorter side is resized to this number of pixels, then the center is cropped.
    Cropped {
        /// Shorter side in pixels.
        shortest_side: u16,
    },
    /// The image is padded to a square with the mean color.
    Padded,
}

/// Image processor for a model family: creates tensors from images and videos.
///
/// [`ImageProcessor`] checks that the number of pixels matches the image size and that there is a frame,
/// before it calls this trait.
pub trait VisionProcessor: Debug + Send + Sync {
    /// Returns the token rule; `None` if every image and every frame is a single item and none is omitted.
    fn rule(&self) -> Option<VisionRule>;

    /// Returns filter, statistics and crop.
    fn settings(&self) -> PixelSettings;

    /// Returns the same processor with other settings.
    fn with_settings(&self, settings: &PixelSettings) -> ImageProcessor;

    /// Returns the pixel bytes per encoder item, a tile or a patch, in single precision.
    fn item_bytes(&self) -> u64;

    /// Creates the tensor for an image, in a sample with `images` images, with a pixel type.
    ///
    /// # Errors
    /// The reason why the model rejects the image.
    fn image(&self, image: RgbView<'_>, images: usize, pixels: PixelType) -> Result<PixelValues, BoxError>;

    /// Creates the tensor for video frames, at least one, with a pixel type.
    ///
    /// # Errors
    /// The reason why the model rejects the frames.
    fn video(&self, frames: &[RgbView<'_>], pixels: PixelType) -> Result<PixelValues, BoxError>;
}

thread_local! {
    static RESAMPLER: RefCell<Resampler> = RefCell::default();
}

/// Image processor that creates pixels with any type, using this crate's resampler.
pub(crate) trait GenericProcessor: Copy + Debug + Send + Sync + 'static {
    fn rule(&self) -> Option<VisionRule>;
    fn settings(&self) -> PixelSettings;
    fn set(&mut self, settings: &PixelSettings);
    fn item_bytes(&self) -> u64;
    fn image<T: Pixel>(
        &self,
        image: RgbView<'_>,
        images: usize,
        resampler: &mut Resampler,
    ) -> dflop_costmodel::Result<PixelValues>;
    fn video<T: Pixel>(
        &self,
        frames: &[RgbView<'_>],
        resampler: &mut Resampler,
    ) -> dflop_costmodel::Result<PixelValues>;
}

impl<F: GenericProcessor> VisionProcessor for F {
    fn rule(&self) -> Option<VisionRule> {
        GenericProcessor::rule(self)
    }

    fn settings(&self) -> PixelSettings {
        GenericProcessor::settings(self)
    }

    fn with_settings(&self, settings: &PixelSettings) -> ImageProcessor {
        let mut changed = *self;
        changed.set(settings);
        ImageProcessor::new(changed)
    }

    fn item_bytes(&self) -> u64 {
        GenericProcessor::item_bytes(self)
    }

    fn image(&self, image: RgbView<'_>, images: usize, pixels: PixelType) -> Result<PixelValues, BoxError> {
        let made = RESAMPLER.with_borrow_mut(|resampler| match pixels {
            PixelType::Float32 => GenericProcessor::image::<f32>(self, image, images, resampler),
            PixelType::BFloat16 => GenericProcessor::image::<bf16>(self, image, images, resampler),
            PixelType::UInt8 => GenericProcessor::image::<u8>(self, image, images, resampler),
        });
        Ok(made?)
    }

    fn video(&self, frames: &[RgbView<'_>], pixels: PixelType) -> Result<PixelValues, BoxError> {
        let made = RESAMPLER.with_borrow_mut(|resampler| match pixels {
            PixelType::Float32 => GenericProcessor::video::<f32>(self, frames, resampler),
            PixelType::BFloat16 => GenericProcessor::video::<bf16>(self, frames, resampler),
            PixelType::UInt8 => GenericProcessor::video::<u8>(self, frames, resampler),
        });
        Ok(made?)
    }
}
