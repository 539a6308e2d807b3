//! `dflop.Image` and `dflop.Augment`: image conversion to an array, and random augmentation.

use std::num::NonZeroU32;

use dflop_loader::media::augment::{Augment, ColorJitter};
use dflop_loader::media::{PixelFormat, PixelLayout, PixelStatistics, PixelType};
use pyo3::prelude::*;

use super::convert::{Arguments, arguments};
use crate::arrays::framework::Framework;
use crate::error::DflopError;

/// Default width-to-height ratio for a random crop, from 3:4 to 4:3.
const CROP_RATIO: (f64, f64) = (0.75, 4.0 / 3.0);
/// Default changes for brightness, contrast, saturation and hue.
const NO_JITTER: (f64, f64, f64, f64) = (0.0, 0.0, 0.0, 0.0);

/// Converts images to one array: shorter side to ``size`` (bilinear, antialiased), center crop, normalized;
/// float32 ``[images, 3, size, size]`` by default.
///
/// Args:
///     size (int): height and width in pixels. Default: 224.
///     mean (Sequence[float]): red, green and blue mean, on a scale from 0 to 1. Default: the ImageNet mean.
///     std (Sequence[float]): red, green and blue standard deviation, on the same scale. Default: the
///         ImageNet standard deviation.
///     dtype (str): value type: ``float32``, the default, ``bfloat16``, or ``uint8``, which is not
///         normalized.
///     layout (str): ``nchw``, the default, for ``[images, 3, size, size]``; ``nhwc`` for ``[images, size,
///         size, 3]``.
///     augment (Augment): random augmentation; a random crop replaces the center crop. Default: none.
///     scaled_decode (bool): decodes a JPEG at a fraction of the full size if that is still large enough:
///         faster, slightly different pixels; needs a build with libjpeg-turbo. Default: ``False``.
///
/// Raises:
///     ConfigError: a setting is invalid.
///
/// Examples:
///     >>> image = dflop.Image(96, dtype="uint8", layout="nhwc")
///     >>> image.size
///     96
///     >>> batch = next(iter(dflop.Loader("shards/", batch_size=8, image=image)))
///     >>> batch["image"].dtype, batch["image"].shape
///     (dtype('uint8'), (7, 96, 96, 3))
#[pyclass(frozen, from_py_object, module = "dflop._native")]
#[derive(Debug, Clone)]
pub(crate) struct Image {
    pub(crate) side: NonZeroU32,
    pub(crate) augment: Option<AugmentSettings>,
    pub(crate) is_scaled: bool,
    mean: Option<[f64; 3]>,
    std: Option<[f64; 3]>,
    dtype: String,
    layout: String,
}

#[pymethods]
impl Image {
    #[new]
    #[pyo3(signature = (
        size=224, *, mean=None, std=None, dtype="float32", layout="nchw", augment=None, scaled_decode=false
    ))]
    fn new(
        size: u32,
        mean: Option<[f64; 3]>,
        std: Option<[f64; 3]>,
        dtype: &str,
        layout: &str,
        augment: Option<PyRef<'_, PyAugment>>,
        scaled_decode: bool,
    ) -> PyResult<Self> {
        let side = NonZeroU32::new(size).ok_or_else(|| DflopError::config("size", "must be at least 1"))?;
        let augment = augment.map(|augment| augment.settings.clone());
        let (dtype, layout) = (dtype.to_owned(), layout.to_owned());
        let image = Self { side, augment, is_scaled: scaled_decode, mean, std, dtype, layout };
        if image.format(Framework::Auto)?.pixels == PixelType::UInt8 && (mean.is_some() || std.is_some()) {
            let reason = "uint8 values are not normalized: leave out `mean` and `std`, or take float32";
            return Err(DflopError::config("dtype", reason).into());
        }
        Ok(image)
    }

    /// Height and width in pixels.
    #[getter]
    fn size(&self) -> u32 {
        self.side.get()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, ())> {
        Ok((slf.get().arguments(slf.py())?.constructor(&slf.get_type())?, ()))
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        slf.get().arguments(slf.py())?.repr(&slf.get_type())
    }
}

impl Image {
    /// Returns the pixel statistics for normalization.
    pub(crate) fn statistics(&self) -> PixelStatistics {
        let single = |of: Option<[f64; 3]>| of.map(|values| values.map(|value| value as f32));
        let PixelStatistics { mean, deviation } = PixelStatistics::default();
        PixelStatistics {
            mean: single(self.mean).unwrap_or(mean),
            deviation: single(self.std).unwrap_or(deviation),
        }
    }

    /// Returns value type and order, for a library's arrays.
    pub(crate) fn format(&self, framework: Framework) -> Result<PixelFormat, DflopError> {
        let layout = match self.layout.as_str() {
            "nchw" => PixelLayout::ChannelsFirst,
            "nhwc" => PixelLayout::ChannelsLast,
            other => {
                return Err(DflopError::config("layout", format!("expected nchw or nhwc, found `{other}`")));
            }
        };
        Ok(PixelFormat { pixels: pixel_type(&self.dtype, framework)?, layout })
    }

    fn arguments(&self, py: Python<'_>) -> PyResult<Arguments> {
        let augment =
            self.augment.clone().map(|settings| Bound::new(py, PyAugment { settings })).transpose()?;
        let (size, scaled_decode) = (self.side.get(), self.is_scaled);
        let Self { mean, std, dtype, layout, .. } = self;
        Ok(arguments!(py, size, mean, std, dtype, layout, augment, scaled_decode))
    }
}

/// Parses the pixel type.
///
/// # Errors
/// `ConfigError` for an unknown name, and for a type that `NumPy` does not have.
pub(crate) fn pixel_type(name: &str, framework: Framework) -> Result<PixelType, DflopError> {
    match name {
        "float32" => Ok(PixelType::Float32),
        "bfloat16" if framework == Framework::Numpy => {
            Err(DflopError::config("dtype", "NumPy has no bfloat16: use `array_type=\"torch\"`, or uint8"))
        }
        "bfloat16" => Ok(PixelType::BFloat16),
        "uint8" => Ok(PixelType::UInt8),
        _ => Err(DflopError::config("dtype", format!("expected float32, bfloat16 or uint8, found `{name}`"))),
    }
}

/// Augmentation settings; the seed comes from the loader.
#[derive(Debug, Clone)]
pub(crate) struct AugmentSettings {
    crop: Option<([f64; 2], [f64; 2])>,
    flip: f64,
    jitter: ColorJitter,
}

impl AugmentSettings {
    pub(crate) fn build(&self) -> Result<Augment, DflopError> {
        let mut builder = Augment::builder().flip(self.flip).color_jitter(self.jitter);
        if let Some(([least, most], [narrowest, widest])) = self.crop {
            builder = builder.random_crop(least..=most, narrowest..=widest);
        }
        Ok(builder.build()?)
    }

    fn arguments(&self, py: Python<'_>) -> PyResult<Arguments> {
        let ColorJitter { brightness, contrast, saturation, hue } = self.jitter;
        let jitter = (brightness, contrast, saturation, hue);
        let (crop_scale, flip) = (self.crop.map(|([least, most], _)| (least, most)), self.flip);
        let crop_ratio = self.crop.map_or(CROP_RATIO, |(_, [narrowest, widest])| (narrowest, widest));
        // A signature does not state defaults that are tuples.
        let crop_ratio = (crop_ratio != CROP_RATIO).then_some(crop_ratio);
        let color_jitter = (jitter != NO_JITTER).then_some(jitter);
        arguments!(py, crop_scale, crop_ratio, flip, color_jitter).without_none(py)
    }
}

/// Random image augmentation; the same for a sample and epoch wherever the sample is decoded.
///
/// Args:
///     crop_scale (tuple[float, float]): minimum and maximum share of the area that a random crop keeps.
///         Default: no crop.
///     crop_ratio (tuple[float, float]): minimum and maximum crop width divided by height. Default: 3/4 to
///         4/3.
///     flip (float): probability for mirroring from left to right. Default: 0.
///     color_jitter (tuple[float, float, float, float]): maximum changes in brightness, contrast, saturation
///         and hue. Default: none.
///
/// Raises:
///     ConfigError: a setting is out of range.
///
/// Examples:
///     >>> augment = dflop.Augment(crop_scale=(0.5, 1.0), flip=0.5, color_jitter=(0.2, 0.2, 0.2, 0.05))
///     >>> loader = dflop.Loader("shards/", image=dflop.Image(64, augment=augment), seed=1)
///     >>> next(iter(loader))["image"].shape
///     (28, 3, 64, 64)
///
///     Images that keep the stored size are augmented by ``Read(augment=…)``:
///
///     >>> read = dflop.Read(augment=dflop.Augment(flip=0.5))
#[pyclass(frozen, name = "Augment", module = "dflop._native")]
#[derive(Debug)]
pub(crate) struct PyAugment {
    pub(crate) settings: AugmentSettings,
}

#[pymethods]
impl PyAugment {
    #[new]
    #[pyo3(signature = (*, crop_scale=None, crop_ratio=CROP_RATIO, flip=0.0, color_jitter=NO_JITTER))]
    fn new(
        crop_scale: Option<(f64, f64)>,
        crop_ratio: (f64, f64),
        flip: f64,
        color_jitter: (f64, f64, f64, f64),
    ) -> PyResult<Self> {
        let (brightness, contrast, saturation, hue) = color_jitter;
        let settings = AugmentSettings {
            crop: crop_scale.map(|(least, most)| ([least, most], [crop_ratio.0, crop_ratio.1])),
            flip,
            jitter: ColorJitter { brightness, contrast, saturation, hue },
        };
        settings.build()?;
        Ok(Self { settings })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, ())> {
        Ok((slf.get().settings.arguments(slf.py())?.constructor(&slf.get_type())?, ()))
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        slf.get().settings.arguments(slf.py())?.repr(&slf.get_type())
    }
}
