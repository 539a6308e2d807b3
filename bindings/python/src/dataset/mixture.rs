//! `dflop.Mixture`: weighted datasets.
//!
//! `dflop.mix`: creates dataset mixtures.

use super::parts::Parts;
use super::{PyDataset, Source};
use crate::convert::{Arguments, arguments};
use crate::error::DflopError;
use dflop_loader::index::TokenCounts;
use dflop_loader::{Mixture, Stop};
use pyo3::prelude::*;

/// Datasets that samples are drawn from by weight; created by `mix`, `Dataset.by_class` or
/// `Dataset.by_weight`. The length is the number of datasets.
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
    /// Parts of the only dataset, which are the datasets of the mixture then.
    pub(super) parts: Option<Parts>,
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

    /// Creates a mixture of the parts of a dataset.
    pub(super) fn divided(dataset: &Bound<'_, PyDataset>, parts: Parts) -> Self {
        Self {
            datasets: vec![(dataset.clone().unbind(), 1.0)],
            weights_from: Vec::new(),
            pattern: None,
            stop: Stop::default(),
            names: None,
            parts: Some(parts),
        }
    }

    pub(super) fn open(&self, py: Python<'_>, counts: &TokenCounts) -> PyResult<Mixture> {
        if let Some(parts) = &self.parts {
            let dataset = self.datasets[0].0.get().open_counted(py, counts.clone())?;
            return Ok(parts.mixture(dataset)?);
        }
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
        self.parts.as_ref().map_or(self.datasets.len(), |parts| parts.len)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, ())> {
        let this = slf.get();
        if let Some(Parts { call: (name, given), .. }) = &this.parts {
            let method = this.datasets[0].0.bind(slf.py()).getattr(*name)?;
            return Ok((given.constructor(&method)?, ()));
        }
        let mix = slf.py().import("dflop._native")?.getattr("mix")?;
        Ok((slf.get().arguments(slf.py())?.constructor(&mix)?, ()))
    }

    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        let this = slf.get();
        if let Some(Parts { call: (name, given), .. }) = &this.parts {
            let dataset = this.datasets[0].0.bind(slf.py());
            let shown = given.shown(&dataset.getattr(*name)?)?.join(", ");
            return Ok(format!("{}.{name}({shown})", dataset.repr()?));
        }
        let mix = slf.py().import("dflop._native")?.getattr("mix")?;
        let shown = slf.get().arguments(slf.py())?.shown(&mix)?;
        Ok(format!("Mixture({})", shown.join(", ")))
    }
}

/// Mixes datasets: every draw of a loader selects the next sample from a dataset.
///
/// Args:
///     datasets (Sequence): pairs of dataset, a `Dataset` or shards as in `Dataset`, and weight; weights need
///         not add up to 1 and are rounded to four decimals.
///     weights_from (Sequence): weights from a step on: pairs of step and weights, a weight per dataset.
///         Default: the weights do not change.
///     choose (Sequence[int]): dataset numbers, a pattern that repeats, in place of weights.
///     stop (str): end of a mixture with ``repeat``: ``first_exhausted``, the default, or ``all_exhausted``.
///     names (Sequence[str]): dataset names, in ``Microbatch.sources``, ``Batch.sources`` and metrics.
///         Default: the shard directories.
///
/// Returns:
///     Mixture: the ``dataset`` argument of a loader.
///
/// Raises:
///     ConfigError: weights or pattern do not fit the datasets, raised by the loader; or the names are not
///         distinct, or their number differs from the number of datasets.
///
/// Examples:
///     >>> photos, clips = "shards/{000..002}.tar", "shards/003.tar"
///     >>> mixture = dflop.mix([(photos, 0.75), (clips, 0.25)], names=["photos", "clips"])
///     >>> loader = dflop.BalancedLoader(mixture, model="model/", global_batch_size=16, steps=4)
///     >>> sources = [name for step in loader for one in step.microbatches for name in one.sources]
///     >>> sources.count("photos"), sources.count("clips")
///     (48, 16)
#[pyfunction]
#[pyo3(signature = (datasets, *, weights_from=Vec::new(), choose=None, stop="first_exhausted", names=None))]
pub(crate) fn mix<'py>(
    py: Python<'py>,
    datasets: Vec<(Source<'py>, f64)>,
    weights_from: Vec<(u64, Vec<f64>)>,
    choose: Option<Vec<u32>>,
    stop: &str,
    names: Option<Vec<String>>,
) -> PyResult<PyMixture> {
    let stop = match stop {
        "first_exhausted" => Stop::FirstExhausted,
        "all_exhausted" => Stop::AllExhausted,
        _ => {
            let reason = format!("expected first_exhausted or all_exhausted, found `{stop}`");
            return Err(DflopError::config("stop", reason).into());
        }
    };
    if let Some(names) = &names {
        check_names(names, datasets.len())?;
    }
    let open = |(source, weight): (Source<'py>, f64)| Ok((source.dataset(py)?.unbind(), weight));
    let datasets = datasets.into_iter().map(open).collect::<PyResult<_>>()?;
    Ok(PyMixture { datasets, weights_from, pattern: choose, stop, names, parts: None })
}

/// Checks that each dataset has a distinct name.
fn check_names(names: &[String], datasets: usize) -> Result<(), DflopError> {
    let refused = |reason| Err(DflopError::config("names", reason));
    if names.len() != datasets {
        return refused(format!("expected a name for each of {datasets} datasets, found {}", names.len()));
    }
    let is_repeated = |(at, name): &(usize, &String)| name.is_empty() || names[..*at].contains(name);
    match names.iter().enumerate().find(is_repeated) {
        Some((_, name)) => refused(format!("expected names that are not empty and differ, found `{name}`")),
        None => Ok(()),
    }
}
