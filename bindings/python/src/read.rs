//! Settings for reading and decoding samples, `dflop.Read`, for both loaders.

use dflop_loader::decode::Decode;
use dflop_loader::flow::ErrorBudget;
use dflop_loader::media::Strictness;
use dflop_loader::shard::FieldSelection;
use dflop_loader::{BalancedLoaderBuilder, LoaderBuilder, LoaderSettings};
use pyo3::prelude::*;

use crate::arrays::framework::Framework;
use crate::convert::Delivery;
use crate::error::DflopError;
use crate::image::{Image, PyAugment};
use crate::names::Names;
use crate::settings::Group;
use crate::transform::{FirstException, UserCode};

/// Settings for reading and decoding samples.
#[derive(Clone)]
pub(crate) struct ReadSettings {
    settings: LoaderSettings,
    is_decoded: bool,
    steps_ahead: Option<usize>,
    microbatch_bytes: Option<u64>,
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
        let mut settings = LoaderSettings::default()
            .decode(decoding)
            .seed(seed)
            .error_budget(error_budget(group)?)
            .strictness(if group.get("strict")? { Strictness::Strict } else { Strictness::Standard })
            .stall_seconds_error(group.get::<Option<f64>>("stall_seconds")?.unwrap_or(f64::INFINITY))
            .transforms(user_code.transforms(transforms)?);
        if let Some(names) = group.get::<Option<Names>>("fields")? {
            settings = settings.fields(FieldSelection::new(names.0).map_err(DflopError::from)?);
        }
        let augment = group.get::<Option<Bound<'_, PyAugment>>>("augment")?;
        let augment = augment.map(|augment| augment.get().settings.clone());
        if let Some(augment) = augment.or_else(|| image.and_then(|image| image.augment.clone())) {
            settings = settings.augment(augment.build()?);
        }
        if let Some(workers) = group.get("workers")? {
            settings = settings.workers(workers);
        }
        if let Some(bytes) = group.get("buffered_bytes")? {
            settings = settings.buffered_bytes_max(bytes);
        }
        Ok(Self {
            settings,
            is_decoded: decoding == Decode::Media,
            steps_ahead: group.get("steps_ahead")?,
            microbatch_bytes: group.get("microbatch_bytes")?,
            first_exception,
            delivery,
        })
    }

    /// Returns whether fields are delivered decoded.
    pub(crate) fn is_decoded(&self) -> bool {
        self.is_decoded
    }

    /// Applies the settings to a balanced loader builder.
    pub(crate) fn apply(&self, builder: BalancedLoaderBuilder) -> BalancedLoaderBuilder {
        let mut builder = builder.settings(self.settings.clone());
        if let Some(steps) = self.steps_ahead {
            builder = builder.steps_ahead(steps);
        }
        if let Some(bytes) = self.microbatch_bytes {
            builder = builder.microbatch_bytes_max(bytes);
        }
        builder
    }

    /// Applies the settings to a stream builder.
    ///
    /// # Errors
    /// `ConfigError` for settings that a stream does not support.
    pub(crate) fn apply_to_stream(&self, builder: LoaderBuilder) -> Result<LoaderBuilder, DflopError> {
        let of_steps = [
            ("steps_ahead", self.steps_ahead.is_some()),
            ("microbatch_bytes", self.microbatch_bytes.is_some()),
        ];
        if let Some((setting, _)) = of_steps.into_iter().find(|(_, is_set)| *is_set) {
            return Err(DflopError::config(setting, "has a use in `BalancedLoader` only: drop it"));
        }
        Ok(builder.settings(self.settings.clone()))
    }
}

/// Reads the error budget: a fraction and a number of bad samples.
fn error_budget(group: &Group<'_>) -> PyResult<ErrorBudget> {
    let budget = ErrorBudget::new(group.get("error_budget")?).map_err(DflopError::from)?;
    let count: Option<u64> = group.get("error_count")?;
    Ok(count.map_or(budget, |samples| budget.at_most(samples)))
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
