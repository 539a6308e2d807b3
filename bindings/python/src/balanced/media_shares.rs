//! Divides the media in a microbatch between the ranks of a tensor-parallel group.

use dflop_loader::{SampleMedium, StepPlan};
use pyo3::prelude::*;

use super::loader_config::RunningLoader;
use crate::convert::class;
use crate::error::DflopError;

/// Returns `dflop.batches.Medium` by rank in the group.
pub(super) fn media_shares<'py>(
    py: Python<'py>,
    running: &RunningLoader,
    plan: &StepPlan,
    place: [usize; 2],
    ranks: usize,
) -> PyResult<Vec<Vec<Bound<'py, PyAny>>>> {
    let [rank, microbatch] = place;
    let planned = plan.ranks.get(rank).map_or(0, Vec::len);
    if microbatch >= planned {
        let reason = format!("step {} has {planned} microbatches, so there is no {microbatch}", plan.step);
        return Err(DflopError::config("microbatch", reason).into());
    }
    if ranks == 0 {
        return Err(DflopError::config("ranks", "must be at least 1".to_owned()).into());
    }
    let shares = py.detach(|| running.planner.media_shares(plan, place, ranks));
    let medium = class(py, "Medium")?;
    let convert = |of: SampleMedium| {
        let key = running.planner.row(plan.samples[of.place as usize]).key().to_owned();
        medium.call1((key, of.modality.name(), of.index, of.cost_ns as f64 / 1e9))
    };
    shares.into_iter().map(|share| share.into_iter().map(convert).collect()).collect()
}
