//! Selects samples with a Python function, before a run.
//!
//! Settings for reading and decoding samples, `dflop.Read`, for both loaders.

use super::arrays::framework::Framework;
use super::convert::Delivery;
use super::cost::describe;
use super::dataset::{Caller, describe_by_shape};
use super::error::DflopError;
use super::image::{Image, PyAugment};
use super::runtime::Group;
use super::transform::{FirstException, UserCode};
use dflop_costmodel::{CostModel, SampleShape};
use dflop_loader::decode::Decode;
use dflop_loader::index::SampleRow;
use dflop_loader::settings::{DecodeName, ReadSettings as Settings};
use dflop_loader::{BalancedLoaderBuilder, CostInput, Dataset, LoaderBuilder, LoaderSettings, Mixture};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Keeps the mixture samples that a Python function selects.
pub(crate) fn filtered(
    mixture: Mixture,
    function: &Bound<'_, PyAny>,
    model: &CostModel,
) -> PyResult<Mixture> {
    let py = function.py();
    let free = model.predict(&SampleShape::default()).map_err(DflopError::from)?;
    let mut raised = None;
    let mixture = mixture.map_datasets(|number, dataset| {
        keep(dataset, function, &mut raised, |sample, row, shape| {
            let predicted = model.predict(shape).unwrap_or(free);
            let input = CostInput { key: row.key(), dataset: number, sample, shape, predicted };
            describe(py, model.modules(), &input)
        })
    });
    mixture.map_err(|error| PyErr::from(DflopError::from(error).with_cause(raised)))
}

/// Keeps the mixture samples that a Python function selects, without predicted costs.
pub(crate) fn filtered_by_shape(mixture: Mixture, function: &Bound<'_, PyAny>) -> PyResult<Mixture> {
    let (py, mut raised) = (function.py(), None);
    let mixture = mixture.map_datasets(|_, dataset| {
        keep(dataset, function, &mut raised, |_, row, shape| describe_by_shape(py, row, shape))
    });
    mixture.map_err(|error| PyErr::from(DflopError::from(error).with_cause(raised)))
}

/// Keeps the samples that a function selects by description; stores the function's exception in `raised`.
fn keep<'py>(
    dataset: Dataset,
    function: &Bound<'py, PyAny>,
    raised: &mut Option<PyErr>,
    describe: impl Fn(u64, &SampleRow<'_>, &SampleShape) -> PyResult<Bound<'py, PyDict>>,
) -> Result<Dataset, dflop_loader::Error> {
    let index = dataset.index().clone();
    let caller = Caller { setting: "filter", index: &index, function };
    dataset.filter(|samples| caller.ask(samples, raised, &describe, PyAnyMethods::is_truthy))
}

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
        let read: Settings = group.settings()?;
        let decoding = decoding(read.decode, image)?;
        let delivery = Delivery { framework, is_decoded: read.decode != DecodeName::Raw };
        let user_code = UserCode::new(python_threads(group)?, seed, delivery, is_prepared);
        let first_exception = user_code.first_exception.clone();
        let mut settings = read.apply(LoaderSettings::default()).map_err(DflopError::from)?;
        settings = settings.decode(decoding).seed(seed).transforms(user_code.transforms(transforms)?);
        let augment = group.get::<Option<Bound<'_, PyAugment>>>("augment")?;
        let augment = augment.map(|augment| augment.get().settings.clone());
        let augment = augment.or_else(|| image.and_then(|image| image.augment.clone()));
        if let Some(augment) = augment.unwrap_or_default().augment().map_err(DflopError::from)? {
            settings = settings.augment(augment);
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

/// Reads the number of threads that call functions of the user from a `dflop.Read`.
pub(crate) fn python_threads(group: &Group<'_>) -> PyResult<usize> {
    match group.get::<usize>("python_threads")? {
        0 => Err(DflopError::config("python_threads", "must be at least 1").into()),
        threads => Ok(threads),
    }
}

/// Returns how the loader decodes fields.
fn decoding(name: DecodeName, image: Option<&Image>) -> Result<Decode, DflopError> {
    match (name, image) {
        (DecodeName::Raw, None) => Ok(Decode::Raw),
        (DecodeName::Raw, Some(_)) => {
            Err(DflopError::config("decode", "`raw` delivers images as stored: drop `image`"))
        }
        (_, Some(image)) => Ok(Decode::Pixels { side: image.side }),
        (_, None) => Ok(Decode::Media),
    }
}
