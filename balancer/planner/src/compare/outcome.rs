//! Assigns a batch by a partition or as the planner balances it, and simulates a batch for any method.

use crate::cluster::Placement;
use crate::score;
use crate::score::batch_balance::{GroupOrder, WORK, balance_batch, cells};
use crate::score::slot_assignment::SlotAssignment;
use crate::score::step_timeline::{ChainTimes, StepTimes};
use crate::space::memory::MemoryRequirement;
use crate::space::shape::StageShape;
use crate::space::{Candidate, SearchSpace};
use crate::workload::ItemSize;
use dflop_balancer::{Budget, Caps, Result, Strategy, balance};

/// Simulated outcome for one batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outcome {
    pub(super) makespan_ns: u64,
    /// Computing time, summed over GPUs, nanoseconds.
    pub(super) busy_ns: f64,
    /// Memory on each module's fullest GPU.
    pub(super) requirement: MemoryRequirement,
}

/// Assigns a strategy's microbatches to slots in an order that does not depend on microbatch times.
pub(super) fn partitioned(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    (strategy, order): (Strategy, GroupOrder),
) -> Result<SlotAssignment> {
    let instance = score::item_times(space, candidate, batch).instance(candidate.groups())?;
    let groups = balance(&instance, strategy, &Caps::default(), &mut Budget::work(WORK))?.groups;
    let cell_of = cells(groups, batch, order);
    Ok(SlotAssignment::new(space, candidate, batch, |item| cell_of[item], space.encoder_split))
}

/// Simulates a slot assignment.
pub(super) fn run(space: &SearchSpace<'_>, candidate: &Candidate, assignment: &SlotAssignment) -> Outcome {
    Outcome {
        makespan_ns: score::makespan_ns(space, candidate, assignment),
        busy_ns: busy_gpu_ns(space, candidate, assignment),
        requirement: assignment.requirement(space, candidate),
    }
}

/// Returns computing nanoseconds times participating GPUs; every encoder rank is charged the busiest rank's
/// time.
fn busy_gpu_ns(space: &SearchSpace<'_>, candidate: &Candidate, assignment: &SlotAssignment) -> f64 {
    let family = &candidate.family;
    let step: StepTimes = assignment.times(space, candidate);
    let of_encoder = |(encoder, shape): (usize, &StageShape)| {
        let dp = f64::from(family.encoders[encoder].dp);
        let ranks_ns = match family.placement {
            // All ranks of a shared encoder have the same time.
            Placement::Disaggregated => {
                let chain: &ChainTimes = &step.encoders[encoder];
                chain.busy_ns() * dp / chain.lanes as f64
            }
            Placement::Colocated => assignment.phase_ns(space, candidate, encoder) as f64 * dp,
            Placement::Joint => 0.0,
        };
        ranks_ns * f64::from(shape.tp)
    };
    // Each encoder rank is charged the busiest rank's time.
    let encoders_ns: f64 = space.encoder_shapes(family).enumerate().map(of_encoder).sum();
    encoders_ns + step.llm.busy_ns() * f64::from(space.llm_shape(family).tp)
}

/// Returns the best balanced batch, identical to the plan's score; it fits into memory if any balancing does.
pub(super) fn best(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
) -> Result<SlotAssignment> {
    Ok(balance_batch(space, candidate, batch)?.assignment)
}
