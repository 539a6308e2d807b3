//! Runs a batch as the planner balances it.

use super::outcome::{self, Outcome};
use crate::error::Result;
use crate::planner::score::batch_balance::balance_batch;
use crate::planner::score::step_timeline::StepTimeline;
use crate::planner::space::{Candidate, SearchSpace};
use crate::planner::workload::ItemSize;

/// Runs the best balancing of a batch, the same as the score of a plan has; one that fits, if any does.
pub(super) fn run_best(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    timeline: &mut StepTimeline,
) -> Result<Outcome> {
    let found = balance_batch(space, candidate, batch, timeline)?;
    Ok(outcome::run(space, candidate, &found.assignment, timeline))
}
