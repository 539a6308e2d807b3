//! Fills the `dflop order` report.

use std::ops::Range;

use dflop_balancer::Strategy;
use dflop_loader::settings::{PlanSettings, Settings};
use dflop_loader::{StepPlanner, StrategySummary, compare_strategies};

use super::OrderArgs;
use crate::args::PREVIEWS;
use crate::failure::Failure;
use crate::report::collect::PlannedSteps;
use crate::report::{Basis, Origin, RunReport, StrategyResult, compare_steps, verdict};

/// Maximum number of steps in the simulated mean.
const STEPS_MAX: u64 = 50;

/// Returns the report on planned steps: the chosen strategy compared with data-blind.
pub(super) fn report(
    args: &OrderArgs,
    settings: &Settings,
    planner: &StepPlanner,
    steps: Range<u64>,
) -> Result<RunReport, Failure> {
    let plan = &args.planned.plan;
    let PlanSettings { strategy, schedule, .. } = settings.plan;
    let shown = steps.start..steps.end.min(steps.start.saturating_add(STEPS_MAX));
    let mut strategies = vec![Strategy::ROUND_ROBIN];
    if strategy != Strategy::ROUND_ROBIN {
        strategies.push(strategy);
    }
    let summaries = compare_strategies(planner, &strategies, shown.clone(), schedule)?;
    let result = |summary: &StrategySummary| StrategyResult {
        name: if summary.strategy == Strategy::ROUND_ROBIN {
            "data-blind".to_owned()
        } else {
            summary.strategy.to_string()
        },
        basis: Basis::Simulated,
        step_seconds: summary.mean_seconds(),
        step_seconds_p95: Some(summary.p95_seconds()),
        bubble_fraction: Some(summary.bubble_fraction),
        steps: shown.end - shown.start,
        plan: String::new(),
    };
    let planned = PlannedSteps {
        planner,
        strategies: strategies.iter().copied().zip(summaries.iter().map(result)).collect(),
        schedule,
        steps: shown.clone(),
        previews: PREVIEWS,
    };
    let (study, note) = planned.study(
        "Planned steps",
        "Samples of every rank and microbatch, in the order of execution. Data-blind deals the same samples round robin.",
    )?;
    let title = format!("Order of steps {} to {}", steps.start, steps.end.saturating_sub(1).max(steps.start));
    let mut report = RunReport::new("order", title, Origin::for_this_process());
    if shown.is_empty() {
        report.verdict.push(verdict(Basis::Counted, "There is no step to show."));
    } else {
        report.verdict = compare_steps(&study);
    }
    report.fact("Steps", (steps.end - steps.start).to_string());
    report.fact("Global batch", format!("{} samples", plan.global_batch_size));
    report.fact("Cluster", format!("{} DP ranks, {} microbatches each", plan.dp_size, plan.microbatches));
    report.fact("Strategy", strategy.to_string());
    report.fact("Costs", format!("{} on {}", plan.model.name(), plan.model.times_from(settings)));
    report.fact("Seed", plan.seed.to_string());
    report.notes.extend(note);
    report.studies.push(study);
    Ok(report)
}
