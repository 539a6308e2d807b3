//! Settings of reading and decoding samples, `dflop.Read`, which both loaders take.

use dflop_loader::decode::{Decode, Transforms};
use dflop_loader::flow::ErrorBudget;
use dflop_loader::loader::{BalancedLoaderBuilder, LoaderBuilder};
use dflop_loader::media::augment::Augment;
use dflop_loader::shard::FieldSelection;
use pyo3::prelude::*;

use crate::arrays::framework::Framework;
use crate::convert::Delivery;
use crate::error::DflopError;
use crate::image::{Image, PyAugment};
use crate::names::Names;
use crate::settings::Group;
use crate::transform::{FirstException, UserCode};

/// Settings of reading and decoding samples.
#[derive(Clone)]
pub(crate) struct ReadSettings {
    decode: Decode,
    fields: Option<Vec<String>>,
    augment: Option<Augment>,
    workers: Option<usize>,
    buffered_bytes: Option<u64>,
    error_budget: ErrorBudget,
    stall_seconds: f64,
    steps_ahead: Option<usize>,
    microbatch_bytes: Option<u64>,
    transforms: Transforms,
    pub(crate) first_exception: FirstException,
    pub(crate) delivery: Delivery,
}

/// Arguments of a loader that take effect while samples are read.
pub(crate) struct ReadArguments<'a, 'py> {
    pub(crate) seed: u64,
    pub(crate) framework: Framework,
    pub(crate) transforms: Option<&'a Bound<'py, PyAny>>,
    /// Conversion of all images to one array.
    pub(crate) image: Option<&'a Image>,
    /// Whether the results of transforms become model inputs.
    pub(crate) is_prepared: bool,
}

impl ReadSettings {
    /// Reads the fields of a `dflop.Read`.
    pub(crate) fn new(group: &Group<'_>, arguments: &ReadArguments<'_, '_>) -> PyResult<Self> {
        let ReadArguments { seed, framework, transforms, image, is_prepared } = *arguments;
        let decode: String = group.get("decode")?;
        let delivery = Delivery::new(framework, &decode);
        let augment = group.get::<Option<Bound<'_, PyAugment>>>("augment")?;
        let augment = augment.map(|augment| augment.get().settings.clone());
        let augment = augment.or_else(|| image.and_then(|image| image.augment.clone()));
        let user_code = UserCode::new(group.get("transform_threads")?, seed, delivery, is_prepared);
        let first_exception = user_code.first_exception.clone();
        Ok(Self {
            decode: parse_decode(&decode, image)?,
            fields: group.get::<Option<Names>>("fields")?.map(|names| names.0),
            augment: augment.map(|augment| augment.build(seed)).transpose()?,
            workers: group.get("workers")?,
            buffered_bytes: group.get("buffered_bytes")?,
            error_budget: error_budget(group)?,
            stall_seconds: group.get::<Option<f64>>("stall_seconds")?.unwrap_or(f64::INFINITY),
            steps_ahead: group.get("steps_ahead")?,
            microbatch_bytes: group.get("microbatch_bytes")?,
            transforms: user_code.transforms(transforms)?,
            first_exception,
            delivery,
        })
    }

    /// Returns whether fields are delivered decoded.
    pub(crate) fn is_decoded(&self) -> bool {
        self.decode == Decode::Media
    }

    /// Applies the settings to the builder of a balanced loader.
    pub(crate) fn apply(&self, mut builder: BalancedLoaderBuilder) -> BalancedLoaderBuilder {
        builder = builder
            .decode(self.decode)
            .error_budget(self.error_budget)
            .stall_seconds_error(self.stall_seconds)
            .transforms(self.transforms.clone());
        if let Some(fields) = &self.fields {
            builder = builder.fields(fields.clone());
        }
        if let Some(augment) = &self.augment {
            builder = builder.augment(*augment);
        }
        if let Some(workers) = self.workers {
            builder = builder.workers(workers);
        }
        if let Some(bytes) = self.buffered_bytes {
            builder = builder.buffered_bytes_max(bytes);
        }
        if let Some(steps) = self.steps_ahead {
            builder = builder.steps_ahead(steps);
        }
        if let Some(bytes) = self.microbatch_bytes {
            builder = builder.microbatch_bytes_max(bytes);
        }
        builder
    }

    /// Applies the settings to the builder of a stream.
    ///
    /// # Errors
    /// `ConfigError` for settings that a stream does not have.
    pub(crate) fn apply_to_stream(&self, mut builder: LoaderBuilder) -> Result<LoaderBuilder, DflopError> {
        let of_steps = [
            ("steps_ahead", self.steps_ahead.is_some()),
            ("microbatch_bytes", self.microbatch_bytes.is_some()),
        ];
        if let Some((setting, _)) = of_steps.into_iter().find(|(_, is_set)| *is_set) {
            return Err(DflopError::config(setting, "has a use in `BalancedLoader` only: drop it"));
        }
        builder = builder
            .decode(self.decode)
            .error_budget(self.error_budget)
            .stall_seconds_error(self.stall_seconds)
            .transforms(self.transforms.clone());
        if let Some(fields) = &self.fields {
            builder = builder.fields(FieldSelection::new(fields)?);
        }
        if let Some(augment) = &self.augment {
            builder = builder.augment(*augment);
        }
        if let Some(workers) = self.workers {
            builder = builder.workers(workers);
        }
        if let Some(bytes) = self.buffered_bytes {
            builder = builder.buffered_bytes_max(bytes);
        }
        Ok(builder)
    }
}

/// Reads the error budget: a fraction and a number of bad samples.
fn error_budget(group: &Group<'_>) -> PyResult<ErrorBudget> {
    let budget = ErrorBudget::new(group.get("error_budget")?).map_err(DflopError::from)?;
    let count: Option<u64> = group.get("error_count")?;
    Ok(count.map_or(budget, |samples| budget.at_most(samples)))
}

/// Parses the decoding of samples.
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
