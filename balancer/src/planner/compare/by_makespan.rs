//! Runs a batch balanced for the makespan of the pipeline.

use super::outcome::{self, Outcome, WORK, group_of};
use crate::budget::Budget;
use crate::caps::Caps;
use crate::error::Result;
use crate::instance::Instance;
use crate::partition::Strategy;
use crate::pipeline::{PipelineConfig, balance_pipeline};
use crate::planner::cluster::Placement;
use crate::planner::score;
use crate::planner::score::slot_assignment::SlotAssignment;
use crate::planner::score::step_timeline::StepTimeline;
use crate::planner::space::{Candidate, SearchSpace};
use crate::planner::workload::ItemSize;

/// Runs the best of the planner's own balancing and a search for the makespan; one that fits, if any does.
pub(super) fn run_best(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
    timeline: &mut StepTimeline,
) -> Result<Outcome> {
    let mut assignments = vec![score::balance_greedily(space, candidate, batch)];
    assignments.extend(score::balance_by_search(space, candidate, batch)?);
    if candidate.family.placement == Placement::Disaggregated {
        assignments.push(balance_for_makespan(space, candidate, batch)?);
    }
    let outcomes = assignments.iter().map(|assignment| outcome::run(space, candidate, assignment, timeline));
    let rank = |outcome: &Outcome| (outcome.bytes > space.budget_bytes, outcome.makespan_ns);
    let best = outcomes.min_by_key(rank);
    Ok(best.unwrap_or(Outcome { makespan_ns: 0, busy_ns: 0.0, bytes: 0.0 }))
}

/// Assigns slots by [`balance_pipeline`], which supports encoders with another DP size.
fn balance_for_makespan(
    space: &SearchSpace<'_>,
    candidate: &Candidate,
    batch: &[ItemSize],
) -> Result<SlotAssignment> {
    let family = &candidate.family;
    let (ranks, encoder_ranks) = (family.llm_dp as usize, family.encoder_dp as usize);
    let stages = [space.encoder.shapes[family.encoder].pp, space.llm.shapes[family.llm].pp];
    // A partition takes the encoder's time on its ranks; here it is the time on a single one.
    let alone = |[encoder_ns, llm_ns]: [u64; 2]| {
        [encoder_ns.saturating_mul(encoder_ranks as u64) / ranks as u64, llm_ns]
    };
    let sizes_ns: Vec<[u64; 2]> =
        score::item_sizes_ns(space, candidate, batch).into_iter().map(alone).collect();
    let instance = Instance::new(candidate.groups(), 2, sizes_ns.concat())?;
    let config = PipelineConfig::new(ranks, stages.map(|stages| stages as usize).to_vec());
    let config = config.module_dp_sizes(vec![encoder_ranks, ranks]);
    let found =
        balance_pipeline(&instance, &config, Strategy::Search, &Caps::default(), &mut Budget::work(WORK))?;
    let by_cell: Vec<Vec<u32>> = (0..candidate.microbatches as usize)
        .flat_map(|slot| found.ranks.iter().map(move |rank| rank[slot].clone()))
        .collect();
    let cell_of = group_of(&by_cell, batch.len());
    Ok(SlotAssignment::new(space, candidate, batch, |item| cell_of[item], space.encoder_split))
}
