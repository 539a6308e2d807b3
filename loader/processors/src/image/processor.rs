//! Defines the interface of a family's image processor.
//!
//! Reads the settings that all families' image processors share from a `preprocessor_config.json`.

use super::filter::Filter;
use super::resample::Resampler;
use super::{ImageProcessor, Normalization, Pixel, RgbView};
use dflop_costmodel::Result;
use dflop_costmodel::config::ConfigFields;
use dflop_costmodel::tokens::VisionRule;
use dflop_samples::BoxError;
use dflop_samples::inputs::PixelValues;
use dflop_samples::media::PixelType;
use half::bf16;
use serde_json::Value;
use std::cell::RefCell;
use std::fmt::Debug;

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
    fn image(
        &self,
        image: RgbView<'_>,
        images: usize,
        pixels: PixelType,
    ) -> std::result::Result<PixelValues, BoxError>;

    /// Creates the tensor for video frames, at least one, with a pixel type.
    ///
    /// # Errors
    /// The reason why the model rejects the frames.
    fn video(&self, frames: &[RgbView<'_>], pixels: PixelType) -> std::result::Result<PixelValues, BoxError>;
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

    fn image(
        &self,
        image: RgbView<'_>,
        images: usize,
        pixels: PixelType,
    ) -> std::result::Result<PixelValues, BoxError> {
        let made = RESAMPLER.with_borrow_mut(|resampler| match pixels {
            PixelType::Float32 => GenericProcessor::image::<f32>(self, image, images, resampler),
            PixelType::BFloat16 => GenericProcessor::image::<bf16>(self, image, images, resampler),
            PixelType::UInt8 => GenericProcessor::image::<u8>(self, image, images, resampler),
        });
        Ok(made?)
    }

    fn video(&self, frames: &[RgbView<'_>], pixels: PixelType) -> std::result::Result<PixelValues, BoxError> {
        let made = RESAMPLER.with_borrow_mut(|resampler| match pixels {
            PixelType::Float32 => GenericProcessor::video::<f32>(self, frames, resampler),
            PixelType::BFloat16 => GenericProcessor::video::<bf16>(self, frames, resampler),
            PixelType::UInt8 => GenericProcessor::video::<u8>(self, frames, resampler),
        });
        Ok(made?)
    }
}

/// Patch size in pixels for encoders whose configuration does not declare it.
pub(crate) const PATCH_PIXELS: u64 = 14;
/// Maximum side of a square in pixels; a file comes with a model and must not cause an allocation of
/// gigabytes.
const SIDE_MAX: u16 = 8_192;

/// Returns the side length of a square: a number, `{"shortest_edge"}` or equal `{"height", "width"}`.
pub(crate) fn square_side(fields: &ConfigFields<'_>, key: &str, default: u16) -> Result<u16> {
    let Some(size) = fields.value(key) else { return Ok(default) };
    let side = match size {
        Value::Number(_) => size.as_u64(),
        _ if size.get("shortest_edge").is_some() => size["shortest_edge"].as_u64(),
        _ if size.get("height").is_some() && size.get("height") == size.get("width") => {
            size["height"].as_u64()
        }
        _ => None,
    };
    let side = side.and_then(|side| u16::try_from(side).ok()).filter(|side| (1..=SIDE_MAX).contains(side));
    side.ok_or_else(|| {
        fields.invalid(key, format!("= {size} must be a square of at most {SIDE_MAX} pixels a side"))
    })
}

/// Reads the resampling filter. Default: bicubic.
pub(crate) fn filter(fields: &ConfigFields<'_>) -> Result<Filter> {
    filter_or(fields, Filter::Bicubic)
}

/// Reads the resampling filter.
pub(crate) fn filter_or(fields: &ConfigFields<'_>, default: Filter) -> Result<Filter> {
    let key = "resample";
    let Some(value) = fields.value(key) else { return Ok(default) };
    let number = fields.whole_number(key, value, 0)?;
    Filter::from_pillow(u64::from(number))
        .ok_or_else(|| fields.invalid(key, format!("= {number} is not supported")))
}

/// Reads the conversion from bytes to values.
pub(crate) fn normalization(fields: &ConfigFields<'_>, default: Normalization) -> Result<Normalization> {
    let scale = fields.number("rescale_factor", default.scale)?;
    let mean = channels(fields, "image_mean", default.mean)?;
    let deviation = channels(fields, "image_std", default.deviation)?;
    if deviation.contains(&0.0) {
        return Err(fields.invalid("image_std", "must not contain zeros"));
    }
    Ok(Normalization { scale, mean, deviation })
}

fn channels(fields: &ConfigFields<'_>, key: &str, default: [f64; 3]) -> Result<[f64; 3]> {
    match fields.value(key) {
        None => Ok(default),
        Some(Value::Number(all)) => Ok([all.as_f64().unwrap_or_default(); 3]),
        Some(values) => serde_json::from_value(values.clone())
            .map_err(|error| fields.invalid(key, format!("must be three numbers: {error}"))),
    }
}
