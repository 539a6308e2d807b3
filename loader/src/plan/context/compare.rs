//! Compares steps whose samples are split as costs decide with one degree for all samples.

use std::ops::Range;

use dflop_balancer::rank_step;
use dflop_costmodel::memory::{LargestMicrobatch, RankMemory};

use super::refused;
use crate::error::{Error, PlanError, Result};
use crate::plan::compare_strategies::{StepSums, StrategySummary};
use crate::plan::config::ContextGroups;
use crate::plan::data_parallel::RankTraining;
use crate::plan::planner::StepPlanner;

/// Simulated steps with whole and split samples.
#[derive(Debug, Clone, PartialEq)]
pub struct ContextSummary {
    /// Smallest and largest number of ranks for a sample.
    pub group_ranks: [usize; 2],
    /// Step times with exposed messages between the ranks of a sample. The bound counts splits.
    pub steps: StrategySummary,
    /// Fraction of samples that are split.
    pub split_fraction: f64,
    /// Mean seconds per step in which ranks wait for parameters and gradients; `None` without links.
    pub exposed_seconds: Option<f64>,
    /// Memory on a rank with the largest microbatch of all steps.
    pub memory: RankMemory,
}

/// Plans the same steps with several choices of groups, and simulates them. One degree for all samples that
/// fits no microbatch is left out.
///
/// # Errors
/// As [`StepPlanner::plan_context`].
pub fn compare_context(
    planner: &StepPlanner,
    choices: &[ContextGroups],
    steps: Range<u64>,
    training: &RankTraining<'_>,
) -> Result<Vec<ContextSummary>> {
    let layout = training.layout(planner).ok_or_else(|| refused("needs ranks without a pipeline"))?;
    let traffic = training.traffic(layout);
    let summarize = |groups: &ContextGroups| {
        let (mut sums, mut largest) = (StepSums::default(), LargestMicrobatch::default());
        let (mut exposed_seconds, mut split, mut samples) = (0.0, 0, 0);
        for step in steps.clone() {
            let plan = planner.plan_context(step, groups)?;
            sums.add_shared([plan.makespan_ns, plan.bound.ns], &plan.times_ns);
            (split, samples) = (split + plan.split_samples(), samples + plan.places.len());
            for tokens in plan.tokens.iter().flatten() {
                largest.add(&training.memory, tokens.clone()).map_err(Error::Model)?;
            }
            if let Some(traffic) = &traffic {
                exposed_seconds += rank_step(&plan.times_ns, layout, traffic).exposed_seconds;
            }
        }
        let steps = sums.summary(planner.config.strategy);
        let count = steps.step_seconds.len().max(1) as f64;
        Ok(ContextSummary {
            group_ranks: groups.ranks,
            split_fraction: split as f64 / samples.max(1) as f64,
            exposed_seconds: traffic.is_some().then_some(exposed_seconds / count),
            memory: training.memory.rank(layout, largest.tokens()).map_err(Error::Model)?,
            steps,
        })
    };
    let mut summaries = Vec::with_capacity(choices.len());
    for groups in choices {
        match summarize(groups) {
            Err(Error::Plan(PlanError::Unsolved {
                source: dflop_balancer::Error::CapUnmet { .. } | dflop_balancer::Error::CapItem { .. },
                ..
            })) if groups.ranks[0] > 1 => {}
            summary => summaries.push(summary?),
        }
    }
    Ok(summaries)
}
