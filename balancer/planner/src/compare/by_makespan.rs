//! Assigns a batch as the planner balances it.

use crate::score::batch_balance::balance_batch;
use crate::score::slot_assignment::SlotAssignment;
use crate::score::step_timeline::StepTimeline;
use crate::space::{Candidate, SearchSpace};
use crate::workload::ItemSize;
use dflop_balancer::Result;

/// Returns the best balanced batch, identical to the plan's score; it fits into memory if any balancing does.
pub(super) fn best(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    timeline: &mut StepTimeline,
) -> Result<SlotAssignment> {
    Ok(balance_batch(space, candidate, batch, timeline)?.assignment)
}
