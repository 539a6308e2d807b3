//! `dflop.Mixture`: weighted datasets.

use dflop_loader::index::TokenCounts;
use dflop_loader::{Mixture, Stop};
use pyo3::prelude::*;

use super::PyDataset;
use crate::convert::{Arguments, arguments};

/// Datasets that samples are drawn from by weight; created by `mix`. The length is the number of datasets.
///
/// Examples:
///     >>> mixture = dflop.mix([("shards/000.tar", 2), ("shards/001.tar", 1)], stop="all_exhausted")
///     >>> len(mixture)
///     2
///     >>> mixture
///     Mixture([(Dataset("shards/000.tar"), 2.0), (Dataset("shards/001.tar"), 1.0)], stop='all_exhausted')
#[pyclass(frozen, name = "Mixture", module = "dflop._native")]
#[derive(Debug)]
pub(crate) struct PyMixture {
    pub(super) datasets: Vec<(Py<PyDataset>, f64)>,
    pub(super) weights_from: Vec<(u64, Vec<f64>)>,
    pub(super) pattern: Option<Vec<u32>>,
    pub(super) stop: Stop,
    pub(super) names: Option<Vec<String>>,
}

impl PyMixture {
    /// Returns the arguments of `mix`.
    fn arguments(&self, py: Python<'_>) -> PyResult<Arguments> {
        let datasets: Vec<_> = self.datasets.iter().map(|(dataset, weight)| (dataset, weight)).collect();
        let weights_from = (!self.weights_from.is_empty()).then_some(&self.weights_from);
        let (choose, names) = (&self.pattern, &self.names);
        let stop = match self.stop {
            Stop::FirstExhausted => "first_exhausted",
            Stop::AllExhausted => "all_exhausted",
        };
        // A signature does not state the default of a list.
        arguments!(py, datasets, weights_from, choose, stop, names).without_none(py)
    }

    pub(super) fn open(&self, py: Python<'_>, counts: &TokenCounts) -> PyResult<Mixture> {
        let mut mixture = Mixture::new().stop(self.stop);
        for (number, (dataset, weight)) in self.datasets.iter().enumerate() {
            let mut dataset = dataset.get().open_counted(py, counts.clone())?;
            if let Some(names) = &self.names {
                dataset = dataset.named(names[number].as_str());
            }
            mixture = mixture.dataset(dataset, *weight);
        }
        for (step, weights) in &self.weights_from {
            mixture = mixture.weights_from(*step, weights);
        }
        Ok(match &self.pattern {
            Some(pattern) => mixture.choose(pattern.clone()),
            None => mixture,
        })
    }
}

#[pymethods]
impl PyMixture {
    fn __len__(&self) -> usize {
        self.datasets.len()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, ())> {
        let mix = slf.py().import("dflop._native")?.getattr("mix")?;
        Ok((slf.get().arguments(slf.py())?.constructor(&mix)?, ()))
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let mix = slf.py().import("dflop._native")?.getattr("mix")?;
        let shown = slf.get().arguments(slf.py())?.shown(&mix)?;
        Ok(format!("Mixture({})", shown.join(", ")))
    }
}
