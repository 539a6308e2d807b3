//! `dflop.balance`: solves a partition or pipeline instance.

use dflop_balancer::{
    Budget, Caps, Instance, LowerBound, PipelineConfig, Strategy, balance, balance_pipeline,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::convert::json_text;
use crate::error::DflopError;

/// Partitions items into groups so that the largest module sum in any group is small; or, with ``dp`` and
/// ``stages``, into ordered microbatches of pipeline ranks so that the slowest 1F1B makespan is small.
///
/// Args:
///     instance (Mapping): ``n`` items, ``m`` groups, ``c`` modules, ``d`` nanoseconds by item and module,
///         optionally ``tok`` and ``bytes`` by item: the fields in an instance file. With a pipeline, ``d``
///         is the time per stage for each module.
///     strategy (str): ``search``, the default, ``exact`` (small instances, with proof), ``multi_lpt``,
///         ``kk``, ``lpt``, ``random``, ``data-blind``.
///     search_effort (int): search work units; the same units give the same answer on every machine. Default:
///         20,000, with ``exact`` 4,000,000.
///     dp (int): number of data-parallel pipeline ranks, each with ``m / dp`` microbatches.
///     stages (Sequence[int]): number of pipeline stages for every module.
///     tokens_max (int): maximum number of tokens per group. Default: no limit.
///     bytes_max (int): maximum number of bytes per group. Default: no limit.
///
/// Returns:
///     dict: ``groups``, or ``ranks`` with microbatches in order; ``makespan_ns``, ``lower_bound_ns``,
///     ``bound`` (the reason why it holds), ``gap`` (makespan over bound, minus 1), ``is_optimal``,
///     ``work_spent``.
///
/// Raises:
///     ConfigError: the instance is invalid.
///     PlanError: no partition satisfies the caps.
///
/// Examples:
///     >>> instance = {"n": 6, "m": 2, "c": 1, "d": [[7], [5], [4], [4], [3], [1]]}
///     >>> answer = dflop.balance(instance)
///     >>> answer["groups"], answer["makespan_ns"], answer["is_optimal"]
///     ([[0, 3, 5], [1, 2, 4]], 12, True)
///
///     Two pipeline ranks with two encoder stages and four LLM stages:
///
///     >>> times = [[4, 6], [9, 5], [0, 8], [2, 7], [5, 5], [0, 9], [3, 6], [1, 4]]
///     >>> answer = dflop.balance({"n": 8, "m": 4, "c": 2, "d": times}, dp=2, stages=[2, 4])
///     >>> answer["ranks"], answer["makespan_ns"]
///     ([[[1, 4], [0, 6]], [[2, 3], [5, 7]]], 73)
#[pyfunction]
#[pyo3(
    name = "balance",
    signature = (instance, *, strategy="search", search_effort=None, dp=None, stages=None, tokens_max=None, bytes_max=None)
)]
#[expect(clippy::too_many_arguments, reason = "one keyword each")]
pub(crate) fn py_balance<'py>(
    py: Python<'py>,
    instance: &Bound<'py, PyAny>,
    strategy: &str,
    search_effort: Option<u64>,
    dp: Option<usize>,
    stages: Option<Vec<usize>>,
    tokens_max: Option<u64>,
    bytes_max: Option<u64>,
) -> PyResult<Bound<'py, PyDict>> {
    let instance = Instance::from_json(&json_text(instance)?).map_err(DflopError::from)?;
    let strategy = parse_strategy(strategy)?;
    let mut budget = Budget::work(search_effort.unwrap_or_else(|| strategy.work_default()));
    let caps = Caps { tokens_max, bytes_max };
    let report = PyDict::new(py);
    match (dp, stages) {
        (Some(dp), Some(stages)) => {
            let config = PipelineConfig::new(dp, stages);
            let found = py.detach(|| balance_pipeline(&instance, &config, strategy, &caps, &mut budget));
            let found = found.map_err(DflopError::from)?;
            bounded(&report, found.makespan_ns, found.bound, found.gap(), found.work_spent)?;
            report.set_item("ranks", found.ranks)?;
        }
        (None, None) => {
            let found = py.detach(|| balance(&instance, strategy, &caps, &mut budget));
            let found = found.map_err(DflopError::from)?;
            bounded(&report, found.makespan_ns, found.bound, found.gap(), found.work_spent)?;
            report.set_item("groups", found.groups)?;
        }
        _ => return Err(DflopError::config("stages", "a pipeline needs both `dp` and `stages`").into()),
    }
    Ok(report)
}

fn bounded(
    report: &Bound<'_, PyDict>,
    makespan_ns: u64,
    bound: LowerBound,
    gap: f64,
    work_spent: u64,
) -> PyResult<()> {
    report.set_item("makespan_ns", makespan_ns)?;
    report.set_item("lower_bound_ns", bound.ns)?;
    report.set_item("bound", bound.kind.to_string())?;
    report.set_item("gap", gap)?;
    report.set_item("is_optimal", makespan_ns == bound.ns)?;
    report.set_item("work_spent", work_spent)
}

/// Parses a strategy by name or alias.
fn parse_strategy(name: &str) -> Result<Strategy, DflopError> {
    name.parse().map_err(|_| {
        let known = Strategy::describe(Strategy::ALL.iter().copied());
        DflopError::config("strategy", format!("expected {known}, found `{name}`"))
    })
}
