//! Interface of the image processor of a family.

use std::cell::RefCell;
use std::fmt::Debug;

use dflop_costmodel::tokens::VisionRule;
use dflop_samples::BoxError;
use dflop_samples::inputs::PixelValues;
use dflop_samples::media::PixelType;
use half::bf16;

use super::filter::Filter;
use super::normalize::Normalization;
use super::resample::Resampler;
use super::rgb_view::RgbView;
use super::{ImageProcessor, Pixel};

/// Settings of an image processor that no token depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PixelSettings {
    /// The resampling filter.
    pub filter: Filter,
    /// Conversion from bytes to values.
    pub normalization: Normalization,
    /// Crop of a processor that makes one square of an image; `None` for all others.
    pub square: Option<SquareResize>,
}

/// Way in which an image becomes one square.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SquareResize {
    /// The whole image is stretched.
    Stretched,
    /// The shorter side gets this many pixels, then the center is cut out.
    Cropped {
        /// Shorter side in pixels.
        shortest_side: u16,
    },
    /// The image is padded to a square with its mean color.
    Padded,
}

/// Image processor of one model family: makes tensors of images and videos.
///
/// [`ImageProcessor`] checks that images have their pixels and that there is a frame, before it calls this.
pub trait VisionProcessor: Debug + Send + Sync {
    /// Returns the token rule; `None` if every image and every frame is one item and none is left out.
    fn rule(&self) -> Option<VisionRule>;

    /// Returns filter, statistics and crop.
    fn settings(&self) -> PixelSettings;

    /// Returns the same processor with other settings.
    fn with_settings(&self, settings: &PixelSettings) -> ImageProcessor;

    /// Returns the bytes of the pixels of one item of the encoder, a tile or a patch, in single precision.
    fn item_bytes(&self) -> u64;

    /// Makes the tensor of one of `images` images of a sample, with pixels of a type.
    ///
    /// # Errors
    /// The reason why the model cannot take the image.
    fn image(&self, image: RgbView<'_>, images: usize, pixels: PixelType) -> Result<PixelValues, BoxError>;

    /// Makes the tensor of the frames of a video, of which there is at least one, with pixels of a type.
    ///
    /// # Errors
    /// The reason why the model cannot take the frames.
    fn video(&self, frames: &[RgbView<'_>], pixels: PixelType) -> Result<PixelValues, BoxError>;
}

thread_local! {
    static RESAMPLER: RefCell<Resampler> = RefCell::default();
}

/// Image processor that makes pixels of any type with the resampler of this crate.
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
