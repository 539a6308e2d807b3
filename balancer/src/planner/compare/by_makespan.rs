//! Assigns a batch as the planner balances it.

use crate::error::Result;
use crate::planner::score::batch_balance::balance_batch;
use crate::planner::score::slot_assignment::SlotAssignment;
use crate::planner::score::step_timeline::StepTimeline;
use crate::planner::space::{Candidate, SearchSpace};
use crate::planner::workload::ItemSize;

/// Returns the best balanced batch, identical to the plan's score; it fits into memory if any balancing does.
pub(super) fn best(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    timeline: &mut StepTimeline,
) -> Result<SlotAssignment> {
    Ok(balance_batch(space, candidate, batch, timeline)?.assignment)
}
