//! Data argument of the loaders: a dataset, a mixture, or shard names.

use dflop_loader::Mixture;
use dflop_loader::index::TokenCounts;
use pyo3::prelude::*;

use super::PyDataset;
use super::mixture::PyMixture;
use crate::error::DflopError;
use crate::names::Names;

/// Data argument of a loader: a dataset, a mixture, or shard names.
#[derive(FromPyObject)]
pub(crate) enum Source<'py> {
    Dataset(Bound<'py, PyDataset>),
    Mixture(Bound<'py, PyMixture>),
    Shards(Names),
}

impl<'py> Source<'py> {
    /// Creates a dataset from shard names.
    pub(crate) fn resolved(self, py: Python<'py>) -> PyResult<Self> {
        match self {
            Self::Shards(_) => self.dataset(py).map(Self::Dataset),
            other => Ok(other),
        }
    }

    /// Returns the dataset or mixture; `None` for shard names.
    pub(crate) fn object(&self) -> Option<Bound<'py, PyAny>> {
        match self {
            Self::Dataset(dataset) => Some(dataset.clone().into_any()),
            Self::Mixture(mixture) => Some(mixture.clone().into_any()),
            Self::Shards(_) => None,
        }
    }

    /// Returns the source dataset.
    ///
    /// # Errors
    /// `ConfigError` for a mixture, which only the balanced loader supports.
    pub(crate) fn dataset(self, py: Python<'py>) -> PyResult<Bound<'py, PyDataset>> {
        match self {
            Self::Dataset(dataset) => Ok(dataset),
            Self::Shards(names) => {
                let class = py.get_type::<PyDataset>();
                Ok(class.call1((names.0,))?.cast_into::<PyDataset>()?)
            }
            Self::Mixture(_) => {
                let reason =
                    "expected a dataset, found a mixture: use `BalancedLoader`, which reads through indexes";
                Err(DflopError::config("dataset", reason).into())
            }
        }
    }

    /// Opens the source as a mixture.
    pub(crate) fn mixture(self, py: Python<'py>, counts: &TokenCounts) -> PyResult<Mixture> {
        match self {
            Self::Mixture(mixture) => mixture.get().open(py, counts),
            source => Ok(source.dataset(py)?.get().open_counted(py, counts.clone())?.into()),
        }
    }
}
