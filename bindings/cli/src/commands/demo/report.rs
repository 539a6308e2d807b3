//! Fills the report of `dflop demo`: simulated steps of a large model, measured steps of a small one.

use dflop_balancer::schedule::ScheduleKind;
use dflop_loader::StepPlanner;

use super::{COMPARED, DEVICE, DP_SIZE, GLOBAL_BATCH, MICROBATCHES, MODEL, STAGES};
use crate::commands::simulate::{ABOUT_STATED_RATES, ABOUT_STRATEGIES, StrategyReport};
use crate::commands::train::{CpuTimes, Trained};
use crate::demo_data::DemoData;
use crate::failure::Failure;
use crate::output::format_bytes;
use crate::report::collect::PlannedSteps;
use crate::report::{Origin, RunReport, Study, compare_steps};

/// Returns the report.
///
/// - `study`: the measured steps
pub(super) fn report(
    planner: &StepPlanner,
    data: &DemoData,
    strategies: &[StrategyReport],
    trained: &Trained,
    study: Study,
    previews: usize,
) -> Result<RunReport, Failure> {
    let steps = planner.steps().per_epoch();
    let results = strategies.iter().map(|strategy| strategy.to_result(steps));
    let planned = PlannedSteps {
        planner,
        strategies: COMPARED.iter().map(|(strategy, _)| *strategy).zip(results).collect(),
        schedule: ScheduleKind::OneForwardOneBackward,
        steps: 0..steps,
        previews,
    };
    let (simulated, note) = planned.study(&format!("{MODEL} on {DEVICE}"), ABOUT_STRATEGIES)?;
    let title = "dflop demo: balanced microbatches for a multimodal model";
    let mut report = RunReport::new("demo", title, Origin::of_this_process());
    report.verdict = compare_steps(&simulated);
    // Of the small model, what was measured; its simulated times are there for the timelines.
    let measured =
        compare_steps(&study).into_iter().filter(|verdict| verdict.basis == crate::report::Basis::Measured);
    report.verdict.extend(measured);
    report.fact("Model", MODEL);
    report.fact("Device", format!("{DEVICE}, a stated rate"));
    report.fact("Cluster", format!("{DP_SIZE} DP ranks × {} stages", STAGES.iter().sum::<usize>()));
    report.fact("Schedule", format!("1F1B, {MICROBATCHES} microbatches per rank"));
    report.fact("Global batch", format!("{GLOBAL_BATCH} samples"));
    report.fact("Data", format!("{} samples, {}", data.samples, format_bytes(data.bytes)));
    report.notes.push(ABOUT_STATED_RATES.to_owned());
    report.notes.push(format!(
        "The small model was trained on this machine, on {} ranks of one thread, {} timed steps each way; losses agree to \
         {:.0e}.",
        trained.ranks, trained.steps, trained.loss_difference
    ));
    let CpuTimes { speedup, speedup_range: [low, high], busy_factor, .. } = trained.by_cpu;
    let clear = if trained.is_unclear() { ": this machine is too busy to tell which is faster" } else { "" };
    report.notes.push(format!(
        "By the CPU time of its passes, balanced steps are {speedup:.2} times as fast ({low:.2} to {high:.2} in four of \
         five pairs of steps){clear}. On the clock, passes took {busy_factor:.1} times their CPU time."
    ));
    report.notes.push(
        "Sizes of images, audio clips and texts follow published datasets; their content is synthetic."
            .to_owned(),
    );
    report.notes.extend(note);
    report.studies.extend([simulated, study]);
    Ok(report)
}
