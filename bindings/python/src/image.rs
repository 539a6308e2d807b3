//! `dflop.Image` and `dflop.Augment`: conversion of images to one array, and random augmentation.

use std::num::NonZeroU32;

use dflop_loader::media::augment::{Augment, ColorJitter};
use pyo3::prelude::*;

use crate::error::DflopError;

/// Converts images to one array: shorter side to ``size`` (bilinear, antialiased), center crop, normalized by
/// the ImageNet mean and standard deviation; float32 ``[images, 3, size, size]``.
///
/// Args: size: height and width in pixels. augment: random augmentation; its crop replaces the center crop.
/// scaled_decode: decodes a JPEG at a fraction of its size if that is still large enough: faster, slightly
/// different pixels; needs a build with libjpeg-turbo.
#[pyclass(frozen, from_py_object, module = "dflop._native")]
#[derive(Debug, Clone)]
pub(crate) struct Image {
    pub(crate) side: NonZeroU32,
    pub(crate) augment: Option<AugmentSettings>,
    pub(crate) is_scaled: bool,
}

#[pymethods]
impl Image {
    #[new]
    #[pyo3(signature = (size=224, *, augment=None, scaled_decode=false))]
    fn new(size: u32, augment: Option<PyRef<'_, PyAugment>>, scaled_decode: bool) -> PyResult<Self> {
        let side = NonZeroU32::new(size).ok_or_else(|| DflopError::config("size", "must be at least 1"))?;
        let augment = augment.map(|augment| augment.settings.clone());
        Ok(Self { side, augment, is_scaled: scaled_decode })
    }

    /// Height and width in pixels.
    #[getter]
    fn size(&self) -> u32 {
        self.side.get()
    }

    fn __repr__(&self) -> String {
        format!("Image(size={})", self.side)
    }
}

/// Settings of augmentation; the seed is the loader's.
#[derive(Debug, Clone)]
pub(crate) struct AugmentSettings {
    crop: Option<([f64; 2], [f64; 2])>,
    flip: f64,
    jitter: ColorJitter,
}

impl AugmentSettings {
    pub(crate) fn build(&self, seed: u64) -> Result<Augment, DflopError> {
        let mut builder = Augment::builder().seed(seed).flip(self.flip).color_jitter(self.jitter);
        if let Some(([least, most], [narrowest, widest])) = self.crop {
            builder = builder.random_crop(least..=most, narrowest..=widest);
        }
        Ok(builder.build()?)
    }
}

/// Random augmentation of images; the same for a sample and epoch wherever it is decoded.
///
/// Args:
///     crop_scale: minimum and maximum share of the area that a random crop keeps. Default: no crop.
///     crop_ratio: minimum and maximum width over height of the crop.
///     flip: probability of mirroring left to right.
///     color_jitter: maximum changes of brightness, contrast, saturation and hue.
#[pyclass(frozen, name = "Augment", module = "dflop._native")]
#[derive(Debug)]
pub(crate) struct PyAugment {
    pub(crate) settings: AugmentSettings,
}

#[pymethods]
impl PyAugment {
    #[new]
    #[pyo3(signature = (*, crop_scale=None, crop_ratio=(0.75, 4.0 / 3.0), flip=0.0, color_jitter=(0.0, 0.0, 0.0, 0.0)))]
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
        settings.build(0)?;
        Ok(Self { settings })
    }
}
