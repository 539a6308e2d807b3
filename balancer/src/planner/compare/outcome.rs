//! Simulates one batch of one method.

use crate::budget::Budget;
use crate::caps::Caps;
use crate::error::Result;
use crate::instance::Instance;
use crate::partition::{Strategy, balance};
use crate::planner::cluster::Placement;
use crate::planner::score;
use crate::planner::score::batch_balance::{GroupOrder, WORK, cells};
use crate::planner::score::slot_assignment::SlotAssignment;
use crate::planner::score::step_timeline::{StepTimeline, StepTimes};
use crate::planner::space::{Candidate, SearchSpace};
use crate::planner::workload::ItemSize;

/// Outcome of one batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outcome {
    pub(super) makespan_ns: u64,
    /// Computing time, summed over GPUs, nanoseconds.
    pub(super) busy_ns: f64,
    /// Memory of the fullest GPU.
    pub(super) bytes: f64,
}

/// Runs the microbatches of a strategy in an order that does not depend on their times.
pub(super) fn run_partitioned(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    (strategy, order): (Strategy, GroupOrder),
    timeline: &mut StepTimeline,
) -> Result<Outcome> {
    let instance =
        Instance::new(candidate.groups(), 2, score::item_sizes_ns(space, candidate, batch).concat())?;
    let groups = balance(&instance, strategy, &Caps::default(), &mut Budget::work(WORK))?.groups;
    let cell_of = cells(groups, batch, order);
    let assignment = SlotAssignment::new(space, candidate, batch, |item| cell_of[item], space.encoder_split);
    Ok(run(space, candidate, &assignment, timeline))
}

/// Runs a slot assignment.
pub(super) fn run(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    assignment: &SlotAssignment,
    timeline: &mut StepTimeline,
) -> Outcome {
    Outcome {
        makespan_ns: score::makespan_ns(space, candidate, assignment, timeline),
        busy_ns: busy_gpu_ns(space, candidate, assignment),
        bytes: assignment.requirement(space, candidate).most(),
    }
}

/// Returns computing nanoseconds times the GPUs that take part; encoder ranks work as long as the busiest.
fn busy_gpu_ns(space: &SearchSpace<'_>, candidate: &Candidate, assignment: &SlotAssignment) -> f64 {
    let family = &candidate.family;
    let [encoder, llm] = space.shapes(family);
    let step: StepTimes = assignment.times(space, candidate);
    let sum = |stages: &[usize], rows: &[[Vec<u64>; 2]]| -> f64 {
        stages.iter().map(|row| rows[*row].iter().flatten().sum::<u64>() as f64).sum()
    };
    let of_encoder = match family.placement {
        Placement::Disaggregated => sum(&step.encoder_stages, &step.encoder_ns),
        Placement::Colocated => assignment.phase_ns(space, candidate) as f64,
        Placement::Joint => 0.0,
    };
    // Each encoder rank is charged the busiest one's time.
    of_encoder * f64::from(family.encoder_dp * encoder.tp)
        + sum(&step.llm_stages, &step.llm_ns) * f64::from(llm.tp)
}
