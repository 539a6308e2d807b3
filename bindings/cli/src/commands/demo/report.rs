//! Fills the `dflop demo` report: simulated steps for a large model, measured steps for a small model.

use dflop_balancer::schedule::ScheduleKind;
use dflop_loader::StepPlanner;

use super::data::DemoData;
use super::{COMPARED, DEVICE, DP_SIZE, GLOBAL_BATCH, MICROBATCHES, MODEL, STAGES};
use crate::commands::simulate::{ABOUT_STATED_RATES, ABOUT_STRATEGIES, StrategyReport};
use crate::commands::train::{CpuTimes, Trained};
use crate::failure::Failure;
use crate::output::format_bytes;
use crate::report::collect::PlannedSteps;
use crate::report::{Basis, Origin, RunReport, Study, Verdict, compare_steps};

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
    let mut report = RunReport::new("demo", title, Origin::for_this_process());
    report.verdict = compare_steps(&simulated);
    report.verdict.push(measured(trained));
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
    report.notes.push(format!(
        "On the clock, passes took {:.1} times their CPU time: 1 is a machine without other work.",
        trained.by_cpu.busy_factor
    ));
    report.notes.push(
        "Sizes of images, audio clips and texts follow published datasets; their content is synthetic."
            .to_owned(),
    );
    report.notes.extend(note);
    report.studies.extend([simulated, study]);
    Ok(report)
}

/// Returns the measurement of the small model, by CPU time, which other work on the machine changes little.
fn measured(trained: &Trained) -> Verdict {
    let CpuTimes { data_blind_seconds, balanced_seconds, speedup, speedup_range: [low, high], .. } =
        trained.by_cpu;
    let range = format!("{low:.2} to {high:.2} in four of five pairs of steps");
    let (figure, text) = if trained.is_unclear() {
        (String::new(), format!("This machine is too busy to tell which is faster ({range})."))
    } else {
        let text = format!(
            "A small model on this machine: by CPU time, a balanced step takes {balanced_seconds:.2} s instead of \
             {data_blind_seconds:.2} s with data-blind ({range})."
        );
        (format!("{speedup:.2}×"), text)
    };
    Verdict { basis: Basis::Measured, figure, text }
}
