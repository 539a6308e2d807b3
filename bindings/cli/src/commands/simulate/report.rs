//! Fills the `dflop simulate` report.

use dflop_balancer::schedule::ScheduleKind;
use dflop_loader::StepPlanner;

use super::shapes::MethodsReport;
use super::{COMPARED, SimulateArgs, SimulateReport};
use crate::args::PREVIEWS;
use crate::failure::Failure;
use crate::report::collect::PlannedSteps;
use crate::report::{Basis, Origin, RunReport, StrategyResult, Study, compare_steps};

/// Explanation for people: data-blind plans.
pub(crate) const ABOUT_STRATEGIES: &str = "Data-blind deals the global order round robin over ranks and microbatches; \
    LPT deals the dearest sample first; dflop is the balanced cut. All hold the same samples, and every microbatch \
    carries its number of target tokens, so the gradient is the same.";

/// Explanation for people: times from a stated rate.
pub(crate) const ABOUT_STATED_RATES: &str = "Simulated times are FLOPs over a stated rate of the device, summed by the \
    schedule. They weigh samples against each other; absolute times need a measured profile.";

/// Returns the report on a simulated dataset.
pub(super) fn dataset_report(
    args: &SimulateArgs,
    schedule: ScheduleKind,
    planner: &StepPlanner,
    simulated: &SimulateReport,
) -> Result<RunReport, Failure> {
    let SimulateReport { steps, schedule: _, model, device, is_measured, launch_limits, strategies } =
        simulated;
    let results = strategies.iter().map(|strategy| strategy.to_result(*steps));
    let first = planner.first_step();
    let planned = PlannedSteps {
        planner,
        strategies: COMPARED.iter().map(|(strategy, _)| *strategy).zip(results).collect(),
        schedule,
        steps: first..first + steps,
        previews: PREVIEWS,
    };
    let name = format!("{model} on {device}");
    let (study, note) = planned.study(&name, ABOUT_STRATEGIES)?;
    let mut report =
        RunReport::new("simulate", format!("Simulated steps of {name}"), Origin::for_this_process());
    report.verdict = compare_steps(&study);
    report.fact("Model", model);
    let source = if *is_measured { "a measured profile" } else { "a stated rate" };
    report.fact("Device", format!("{device}, {source}"));
    let stages: usize = planner.pipeline().stages.iter().sum();
    report.fact("Cluster", format!("{} DP ranks × {stages} stages", planner.dp_size()));
    report.fact("Schedule", format!("{schedule}, {} microbatches per rank", planner.microbatches()));
    report.fact("Global batch", format!("{} samples", args.planned.plan.global_batch_size));
    report.fact("Steps", steps.to_string());
    if !is_measured {
        report.notes.push(ABOUT_STATED_RATES.to_owned());
    }
    report.notes.extend(launch_limits.iter().map(|limit| format!("{limit}.")));
    report.notes.extend(note);
    report.studies.push(study);
    Ok(report)
}

/// Returns the report on methods compared with a shape table.
pub(super) fn shapes_report(methods: &MethodsReport) -> RunReport {
    let MethodsReport { steps, model, device, is_measured, gpus, global_batch, .. } = methods;
    let result = |method: &super::shapes::MethodReport| StrategyResult {
        name: method.name.to_owned(),
        basis: Basis::Simulated,
        step_seconds: method.step_seconds,
        step_seconds_p95: Some(method.step_seconds_p95),
        bubble_fraction: Some(method.bubble_fraction),
        steps: *steps as u64,
        plan: method.plan.to_string(),
    };
    let study = Study {
        name: format!("{model} on {gpus} GPUs"),
        about: format!(
            "Whole methods: parallelism and balance. No plan of those searched and no balance has a step below {:.4} s.",
            methods.ideal_seconds
        ),
        modules: Vec::new(),
        strategies: methods.strategies.iter().map(result).collect(),
        samples: Vec::new(),
        steps: Vec::new(),
    };
    let title = format!("Simulated methods for {model}");
    let mut report = RunReport::new("simulate", title, Origin::for_this_process());
    report.verdict = compare_steps(&study);
    report.fact("Model", model);
    let source = if *is_measured { "a measured profile" } else { "a stated rate" };
    report.fact("Device", format!("{device}, {source}"));
    report.fact("Cluster", format!("{gpus} GPUs"));
    report.fact("Global batch", format!("{global_batch} samples"));
    report.fact("Steps", steps.to_string());
    report.notes.push(format!("Plans searched: {}.", methods.searched));
    report.studies.push(study);
    report
}
