//! Compares steps whose samples are split as costs decide with one degree for all samples.

use std::ops::Range;

use dflop_balancer::rank_step;
use dflop_costmodel::memory::{LargestMicrobatch, RankMemory};
use dflop_costmodel::{ModuleTraffic, RankLayout};

use super::ContextPlan;
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
    /// Mean seconds per step in which ranks wait for parameters and gradients; `None` without links, and for
    /// pipelines.
    pub exposed_seconds: Option<f64>,
    /// Memory on a rank with the largest microbatch of all steps; `None` for pipelines.
    pub memory: Option<RankMemory>,
}

/// Plans the same steps with several choices of groups, and simulates them. One degree for all samples that
/// fits no microbatch is left out.
///
/// - `training`: how ranks that run all modules train; has no effect on pipelines
///
/// # Errors
/// As [`StepPlanner::plan_context`].
pub fn compare_context(
    planner: &StepPlanner,
    choices: &[ContextGroups],
    steps: Range<u64>,
    training: &RankTraining<'_>,
) -> Result<Vec<ContextSummary>> {
    let layout = training.layout(planner);
    let traffic = layout.and_then(|layout| training.traffic(layout));
    choices.iter().try_for_each(|groups| planner.check_context(groups).map(drop))?;
    let mut compared: Vec<Option<Compared>> = choices.iter().map(|_| Some(Compared::default())).collect();
    for step in steps {
        let whole = planner.whole_step(step)?;
        for (groups, sums) in choices.iter().zip(&mut compared) {
            let Some(own) = sums else { continue };
            match planner.split_samples(whole.clone(), groups) {
                Err(Error::Plan(PlanError::Unsolved {
                    source: dflop_balancer::Error::CapUnmet { .. } | dflop_balancer::Error::CapItem { .. },
                    ..
                })) if groups.ranks[0] > 1 => *sums = None,
                plan => own.add(planner, &plan?, training, layout.zip(traffic.as_deref()))?,
            }
        }
    }
    let summaries = choices.iter().zip(compared).filter_map(|(groups, sums)| Some((groups, sums?)));
    let summary = |(groups, sums): (&ContextGroups, Compared)| {
        let steps = sums.steps.summary(planner.config.strategy);
        let count = steps.step_seconds.len().max(1) as f64;
        let memory = layout.map(|layout| training.memory.rank(layout, sums.largest.tokens()));
        Ok(ContextSummary {
            group_ranks: groups.ranks,
            split_fraction: sums.split as f64 / sums.samples.max(1) as f64,
            exposed_seconds: traffic.is_some().then_some(sums.exposed_seconds / count),
            memory: memory.transpose().map_err(Error::Model)?,
            steps,
        })
    };
    summaries.map(summary).collect()
}

/// Sums over steps.
#[derive(Default)]
struct Compared {
    steps: StepSums,
    largest: LargestMicrobatch,
    exposed_seconds: f64,
    split: usize,
    samples: usize,
}

impl Compared {
    fn add(
        &mut self,
        planner: &StepPlanner,
        plan: &ContextPlan,
        training: &RankTraining<'_>,
        traffic: Option<(RankLayout, &[ModuleTraffic])>,
    ) -> Result<()> {
        self.steps.add_shared([plan.makespan_ns, plan.bound.ns], &plan.times_ns, planner.devices());
        self.split += plan.split_samples();
        self.samples += plan.places.len();
        for tokens in plan.tokens.iter().flatten() {
            self.largest.add(&training.memory, tokens.clone()).map_err(Error::Model)?;
        }
        if let Some((layout, traffic)) = traffic {
            self.exposed_seconds += rank_step(&plan.times_ns, layout, traffic).exposed_seconds;
        }
        Ok(())
    }
}
