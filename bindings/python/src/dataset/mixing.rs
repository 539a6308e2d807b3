//! `dflop.mix`: creates dataset mixtures.

use dflop_loader::Stop;
use pyo3::prelude::*;

use super::Source;
use super::mixture::PyMixture;
use crate::error::DflopError;

/// Mixes datasets: every `BalancedLoader` draw selects the next sample from a dataset.
///
/// Args:
///     datasets (Sequence): pairs of dataset, a `Dataset` or shards as in `Dataset`, and weight; weights need
///         not add up to 1 and are rounded to four decimals.
///     weights_from (Sequence): weights from a step on: pairs of step and weights, a weight per dataset.
///         Default: the weights do not change.
///     choose (Sequence[int]): dataset numbers, a pattern that repeats, in place of weights.
///     stop (str): end of a mixture with ``repeat``: ``first_exhausted``, the default, or ``all_exhausted``.
///     names (Sequence[str]): dataset names, in ``Microbatch.sources`` and metrics. Default: the shard
///         directories.
///
/// Returns:
///     Mixture: the ``dataset`` argument of a `BalancedLoader`.
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
    Ok(PyMixture { datasets, weights_from, pattern: choose, stop, names })
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
