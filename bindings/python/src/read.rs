//! Settings for reading and decoding samples, `dflop.Read`, for both loaders.

use dflop_loader::decode::Decode;
use dflop_loader::settings::ReadSettings as Settings;
use dflop_loader::{BalancedLoaderBuilder, LoaderBuilder, LoaderSettings};
use pyo3::prelude::*;

use crate::arrays::framework::Framework;
use crate::convert::Delivery;
use crate::error::DflopError;
use crate::image::{Image, PyAugment};
use crate::settings::Group;
use crate::transform::{FirstException, UserCode};

/// Settings for reading and decoding samples.
#[derive(Clone)]
pub(crate) struct ReadSettings {
    settings: LoaderSettings,
    is_decoded: bool,
    read: Settings,
    pub(crate) first_exception: FirstException,
    pub(crate) delivery: Delivery,
}

/// Loader arguments that take effect while samples are read.
pub(crate) struct ReadArguments<'a, 'py> {
    pub(crate) seed: u64,
    pub(crate) framework: Framework,
    pub(crate) transforms: Option<&'a Bound<'py, PyAny>>,
    /// Conversion for all images to an array.
    pub(crate) image: Option<&'a Image>,
    /// Whether transform results become model inputs.
    pub(crate) is_prepared: bool,
}

impl ReadSettings {
    /// Reads the fields in a `dflop.Read`.
    pub(crate) fn new(group: &Group<'_>, arguments: &ReadArguments<'_, '_>) -> PyResult<Self> {
        let ReadArguments { seed, framework, transforms, image, is_prepared } = *arguments;
        let decode: String = group.get("decode")?;
        let delivery = Delivery::new(framework, &decode);
        let user_code = UserCode::new(group.get("transform_threads")?, seed, delivery, is_prepared);
        let first_exception = user_code.first_exception.clone();
        let decoding = parse_decode(&decode, image)?;
        let read: Settings = group.settings()?;
        let mut settings = read.apply(LoaderSettings::default()).map_err(DflopError::from)?;
        settings = settings.decode(decoding).seed(seed).transforms(user_code.transforms(transforms)?);
        let augment = group.get::<Option<Bound<'_, PyAugment>>>("augment")?;
        let augment = augment.map(|augment| augment.get().settings.clone());
        if let Some(augment) = augment.or_else(|| image.and_then(|image| image.augment.clone())) {
            settings = settings.augment(augment.build()?);
        }
        Ok(Self { settings, is_decoded: decoding == Decode::Media, read, first_exception, delivery })
    }

    /// Returns whether fields are delivered decoded.
    pub(crate) fn is_decoded(&self) -> bool {
        self.is_decoded
    }

    /// Applies the settings to a balanced loader builder.
    pub(crate) fn apply(&self, builder: BalancedLoaderBuilder) -> BalancedLoaderBuilder {
        self.read.apply_to_steps(builder.settings(self.settings.clone()))
    }

    /// Applies the settings to a stream builder.
    ///
    /// # Errors
    /// `ConfigError` for settings that a stream does not support.
    pub(crate) fn apply_to_stream(&self, builder: LoaderBuilder) -> Result<LoaderBuilder, DflopError> {
        self.read.check_without_steps()?;
        Ok(builder.settings(self.settings.clone()))
    }
}

/// Parses the decode setting.
fn parse_decode(name: &str, image: Option<&Image>) -> Result<Decode, DflopError> {
    match (name, image) {
        ("media", Some(image)) => Ok(Decode::Pixels { side: image.side }),
        ("media", None) => Ok(Decode::Media),
        ("raw", None) => Ok(Decode::Raw),
        ("raw", Some(_)) => {
            Err(DflopError::config("decode", "`raw` delivers images as stored: drop `image`"))
        }
        _ => Err(DflopError::config("decode", format!("expected media or raw, found `{name}`"))),
    }
}
