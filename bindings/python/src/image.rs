//! `dflop.Image` and `dflop.Augment`: image conversion to an array, and random augmentation.

use std::num::NonZeroU32;

use dflop_loader::media::{PixelFormat, PixelLayout, PixelStatistics, PixelType};
use dflop_loader::settings::AugmentSettings;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::convert::{Arguments, arguments};
use crate::arrays::framework::Framework;
use crate::error::DflopError;
use crate::runtime::refuse_keywords;

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

/// Returns the arguments of `dflop.Augment` for some settings.
fn augment_arguments(py: Python<'_>, settings: &AugmentSettings) -> PyResult<Arguments> {
    let crop = settings.crop.as_deref().map(|numbers| PyTuple::new(py, numbers)).transpose()?;
    let [brightness, contrast, saturation, hue] = settings.color_jitter;
    let jitter = (brightness, contrast, saturation, hue);
    // A signature does not state a default that is a tuple.
    let color_jitter = (jitter != NO_JITTER).then_some(jitter);
    let flip = settings.flip;
    arguments!(py, crop, flip, color_jitter).without_none(py)
}

/// Random image augmentation; the same for a sample and epoch wherever the sample is decoded.
///
/// Args:
///     crop (tuple[float, ...]): minimum and maximum share of the area that a random crop keeps; two more
///         numbers are its minimum and maximum width divided by height, 3/4 and 4/3 unless they are given.
///         Default: no crop.
///     flip (float): probability for mirroring from left to right. Default: 0.
///     color_jitter (tuple[float, float, float, float]): maximum changes in brightness, contrast, saturation
///         and hue. Default: none.
///
/// Raises:
///     ConfigError: a setting is out of range.
///
/// Examples:
///     >>> augment = dflop.Augment(crop=(0.5, 1.0), flip=0.5, color_jitter=(0.2, 0.2, 0.2, 0.05))
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
    #[pyo3(
        signature = (*, crop=None, flip=0.0, color_jitter=NO_JITTER, **unknown),
        // The same without the keywords that are refused.
        text_signature = "(*, crop=None, flip=0.0, color_jitter=...)"
    )]
    fn new(
        py: Python<'_>,
        crop: Option<Vec<f64>>,
        flip: f64,
        color_jitter: (f64, f64, f64, f64),
        unknown: Option<Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        refuse_keywords(py, "Augment", unknown.as_ref())?;
        let (brightness, contrast, saturation, hue) = color_jitter;
        let settings = AugmentSettings { crop, flip, color_jitter: [brightness, contrast, saturation, hue] };
        settings.augment().map_err(DflopError::from)?;
        Ok(Self { settings })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, ())> {
        Ok((augment_arguments(slf.py(), &slf.get().settings)?.constructor(&slf.get_type())?, ()))
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        augment_arguments(slf.py(), &slf.get().settings)?.repr(&slf.get_type())
    }
}
