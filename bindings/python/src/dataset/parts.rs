//! Divides a dataset into a mixture of classes, or of equally weighted samples.

use std::collections::BTreeMap;

use dflop_loader::{Dataset, Mixture, read_classes};
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::caller::values_by_shape;
use crate::convert::Arguments;
use crate::error::DflopError;
use crate::runtime;

/// Parts of the only dataset in a mixture.
#[derive(Debug)]
pub(super) struct Parts {
    values: Values,
    /// Number of parts.
    pub(super) len: usize,
    /// `Dataset` method that divided the dataset, with the arguments.
    pub(super) call: (&'static str, Arguments),
}

/// Values that divide a dataset, in dataset order.
#[derive(Debug)]
pub(super) enum Values {
    Classes { classes: Vec<String>, weights: Option<BTreeMap<String, f64>> },
    Weights(Vec<f64>),
}

impl Values {
    /// Reads the class of each sample.
    ///
    /// - `by`: column, or function
    /// - `weights`: mapping from classes to weights
    pub(super) fn by_class(
        dataset: &Dataset,
        by: &Bound<'_, PyAny>,
        weights: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let classes = if let Ok(column) = by.cast::<PyString>() {
            let (column, dataset) = (column.to_string(), dataset.clone());
            let read = async move { read_classes(&dataset, &column).await };
            runtime::wait(by.py(), read)?.map_err(DflopError::from)?
        } else {
            values_by_shape(dataset, by, "by_class", |class| Ok(class.str()?.to_string()))?
        };
        Ok(Self::Classes { classes, weights: weights.map(class_weights).transpose()? })
    }

    /// Calls a function for the weight of each sample.
    pub(super) fn by_weight(dataset: &Dataset, by: &Bound<'_, PyAny>) -> PyResult<Self> {
        values_by_shape(dataset, by, "by_weight", |weight| weight.extract::<f64>()).map(Self::Weights)
    }

    fn mixture(&self, dataset: Dataset) -> Result<Mixture, dflop_loader::Error> {
        match self {
            Self::Classes { classes, weights } => {
                let mut classes = classes.iter();
                let next = |numbers: &[u64]| Ok(classes.by_ref().take(numbers.len()).cloned().collect());
                Mixture::by_class(dataset, next, weights.as_ref())
            }
            Self::Weights(weights) => {
                let mut weights = weights.iter();
                let next = |numbers: &[u64]| Ok(weights.by_ref().take(numbers.len()).copied().collect());
                Mixture::by_weight(dataset, next)
            }
        }
    }
}

/// Reads weights by class; a class that is a number is named by its digits.
fn class_weights(weights: &Bound<'_, PyAny>) -> PyResult<BTreeMap<String, f64>> {
    let mut by_class = BTreeMap::new();
    for item in weights.call_method0("items")?.try_iter()? {
        let (class, weight) = item?.extract::<(Bound<'_, PyAny>, f64)>()?;
        by_class.insert(class.str()?.to_string(), weight);
    }
    Ok(by_class)
}

impl Parts {
    /// Checks that the values divide the dataset.
    pub(super) fn new(
        dataset: Dataset,
        values: Values,
        call: (&'static str, Arguments),
    ) -> Result<Self, DflopError> {
        let len = values.mixture(dataset)?.datasets().len();
        Ok(Self { values, len, call })
    }

    /// Divides the dataset, which may have been opened with other token counts.
    pub(super) fn mixture(&self, dataset: Dataset) -> Result<Mixture, DflopError> {
        Ok(self.values.mixture(dataset)?)
    }
}
