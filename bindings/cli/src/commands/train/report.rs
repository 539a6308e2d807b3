//! Fills the report of `dflop train`: its steps, its passes beside simulated ones, and their predictions.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use dflop_balancer::Strategy;
use dflop_executor::train::StepReport;
use dflop_loader::files::open_own;

use super::config::TrainConfig;
use super::print::Printer;
use super::setup::Setup;
use crate::failure::Failure;
use crate::output::write_json;
use crate::report::collect::{ABOUT_RUN, Measured, SampleTable, read_traces, timelines_of_plans};
use crate::report::{
    Accuracy, Basis, Origin, RunReport, StrategyResult, Study, StudyStep, Timeline, TrainedStep, Training,
    compare_steps, seconds, verdict,
};

/// A measured run of a strategy.
pub(super) struct MeasuredRun {
    pub(super) strategy: Strategy,
    /// Timelines of its ranks.
    pub(super) traces: Vec<PathBuf>,
    /// Mean step in seconds and number of steps; `None` takes the mean of the traced passes.
    pub(super) mean: Option<(f64, u64)>,
}

/// Study of runs, and the passes of the last one.
pub(super) struct RunStudy {
    pub(super) study: Study,
    pub(super) measured: Measured,
    pub(super) notes: Vec<String>,
}

/// Keeps the steps of a run for its report, in a file beside it.
pub(super) struct StepLog(BufWriter<File>);

impl StepLog {
    /// Creates the file of steps of a report.
    pub(super) fn create(report: &Path) -> Result<Self, Failure> {
        let path = steps_file(report);
        let file = open_own(&path).and_then(|file| file.set_len(0).map(|()| file));
        let file = file.map_err(|error| Failure::from(error).in_file(&path))?;
        Ok(Self(BufWriter::new(file)))
    }

    /// Keeps a step; flushed, so that the report of a killed run has it.
    pub(super) fn step(&mut self, step: &StepReport) -> Result<(), Failure> {
        write_json(&mut self.0, step)?;
        Ok(self.0.flush()?)
    }
}

/// Prints a step, and keeps it for the report if there is one.
pub(super) fn show_step(
    step: &StepReport,
    printer: &mut Printer<'_>,
    log: Option<&mut StepLog>,
) -> Result<(), Failure> {
    let kept = log.map_or(Ok(()), |log| log.step(step));
    printer.step(step).and(kept)
}

fn steps_file(report: &Path) -> PathBuf {
    let name = report.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    report.with_file_name(format!(".{name}.steps"))
}

/// Returns the report of a run and removes the file of its steps; `None` if it took no step.
///
/// - `traces`: timelines of ranks; those that are missing are left out
pub(super) fn report(
    path: &Path,
    config: &TrainConfig,
    setup: &Setup,
    traces: &[PathBuf],
    previews: usize,
) -> Result<Option<RunReport>, Failure> {
    let steps = steps_file(path);
    let text = std::fs::read_to_string(&steps).map_err(|error| Failure::from(error).in_file(&steps))?;
    std::fs::remove_file(&steps)?;
    let steps: Vec<TrainedStep> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let name = name_of(config.parallel.strategy);
    let Some(training) = Training::new(name, &steps) else { return Ok(None) };
    let mut report =
        RunReport::new("train", format!("Training of {}", setup.spec.name), Origin::of_this_process());
    report.verdict.push(verdict(
        Basis::Measured,
        format!(
            "{} steps of {} on average{}; {:.1} % of the time waiting for data.",
            steps.len(),
            seconds(training.mean_seconds()),
            training.loss_change(),
            100.0 * steps.iter().map(|step| step.data_wait_seconds).sum::<f64>()
                / steps.iter().map(|step| step.seconds).sum::<f64>().max(f64::MIN_POSITIVE)
        ),
    ));
    report.verdict.extend(training.idle().map(|text| verdict(Basis::Measured, text)));
    let traces: Vec<PathBuf> = traces.iter().filter(|trace| trace.is_file()).cloned().collect();
    let run = MeasuredRun { strategy: config.parallel.strategy, traces, mean: None };
    let RunStudy { study, measured, notes } =
        study_of_runs(config, setup, "Passes of the run", &[run], previews)?;
    let is_absolute = config.parallel.profile.is_some();
    let simulated = compare_steps(&study).into_iter().filter(|verdict| verdict.basis == Basis::Simulated);
    report.verdict.extend(simulated.filter(|verdict| !verdict.figure.is_empty()).map(|mut simulated| {
        if !is_absolute {
            // Seconds of a stated rate say nothing about this machine.
            simulated.text = format!(
                "Simulated on the same batches, a step of data-blind plans takes {} the time of a step of {name} ones.",
                simulated.figure
            );
        }
        simulated
    }));
    let device = if is_absolute { "a measured profile" } else { "a stated rate" };
    report.fact("Ranks", setup.job.world_size().to_string());
    report
        .fact("Schedule", format!("{}, {} microbatches", setup.job.schedule(), config.parallel.microbatches));
    report.fact("Strategy", name);
    report.fact("Global batch", format!("{} samples", config.data.global_batch));
    report.fact("Predictions", device);
    report.fact("Seed", config.seed.to_string());
    report.accuracy = Accuracy::of_passes(&measured, is_absolute);
    report.training = Some(training);
    report.notes = notes;
    report.studies.push(study);
    Ok(Some(report))
}

/// Returns the study of runs on the same steps: simulated plans by every strategy, then what was measured.
pub(super) fn study_of_runs(
    config: &TrainConfig,
    setup: &Setup,
    name: &str,
    runs: &[MeasuredRun],
    previews: usize,
) -> Result<RunStudy, Failure> {
    let stages: Vec<String> =
        setup.job.stages().iter().map(|stage| module_name(setup, stage.module())).collect();
    let planner = setup.planner(config, None)?;
    let (mut table, mut notes) = (SampleTable::default(), Vec::new());
    let mut all = Vec::new();
    for run in runs {
        let mut measured = read_traces(&run.traces, &stages)?;
        measured.name_samples(&planner, &mut table)?;
        all.push((run, measured));
    }
    let shown = all.first().map_or(0..0, |(_, measured)| steps_of(measured));
    let mut kinds = vec![Strategy::ROUND_ROBIN, Strategy::LPT];
    let last = runs.last().map_or(config.parallel.strategy, |run| run.strategy);
    if !kinds.contains(&last) {
        kinds.push(last);
    }
    let (mut steps, mut strategies) = (Vec::new(), Vec::new());
    let schedule = planner.pipeline().schedule;
    match timelines_of_plans(&planner, &kinds, schedule, shown, 0, &mut table) {
        Ok(simulated) => {
            strategies = kinds
                .iter()
                .enumerate()
                .map(|(index, kind)| simulated_result(*kind, index, &simulated))
                .collect();
            steps = simulated;
        }
        Err(failure) => {
            let reason = failure.into_refusal().message;
            notes.push(format!("No other strategy is simulated beside the run: {reason}"));
        }
    }
    for (run, measured) in &mut all {
        add_run(run, measured, &mut strategies, &mut steps);
    }
    let (samples, note) = table.finish(planner.datasets(), previews);
    notes.extend(note);
    let measured = all.pop().map(|(_, measured)| measured).unwrap_or_default();
    let mut modules: Vec<String> = Vec::new();
    for module in 0..setup.job.modules().len() {
        modules.push(module_name(setup, module));
    }
    let (name, about) = (name.to_owned(), ABOUT_RUN.to_owned());
    Ok(RunStudy { study: Study { name, about, modules, strategies, samples, steps }, measured, notes })
}

/// Adds the measured timelines of a run; its predicted ones only if nothing else is simulated.
fn add_run(
    run: &MeasuredRun,
    measured: &Measured,
    strategies: &mut Vec<StrategyResult>,
    steps: &mut Vec<StudyStep>,
) {
    let has_simulated = strategies.iter().any(|strategy| strategy.basis == Basis::Simulated);
    let mut own = measured.result(0, name_of(run.strategy), Basis::Measured);
    if let Some((step_seconds, steps)) = run.mean {
        (own.step_seconds, own.steps) = (step_seconds, steps);
    }
    let mut places = vec![(0, strategies.len())];
    strategies.push(own);
    if !has_simulated {
        places.push((1, strategies.len()));
        strategies.push(measured.result(1, name_of(run.strategy), Basis::Simulated));
    }
    for step in &measured.steps {
        let shown = match steps.iter().position(|other| other.step == step.step) {
            Some(place) => &mut steps[place],
            None if has_simulated => continue,
            None => {
                steps.push(StudyStep { step: step.step, timelines: Vec::new() });
                let last = steps.len() - 1;
                &mut steps[last]
            }
        };
        for timeline in &step.timelines {
            if let Some((_, strategy)) = places.iter().find(|(own, _)| *own == timeline.strategy) {
                shown.timelines.push(Timeline { strategy: *strategy, ..timeline.clone() });
            }
        }
    }
}

fn simulated_result(kind: Strategy, index: usize, steps: &[StudyStep]) -> StrategyResult {
    let own = steps.iter().flat_map(|step| &step.timelines).filter(|timeline| timeline.strategy == index);
    let ends: Vec<u64> = own.map(|timeline| timeline.makespan_ns).collect();
    StrategyResult {
        name: name_of(kind).to_owned(),
        basis: Basis::Simulated,
        step_seconds: ends.iter().sum::<u64>() as f64 / 1e9 / ends.len().max(1) as f64,
        step_seconds_p95: None,
        bubble_fraction: None,
        steps: ends.len() as u64,
        plan: String::new(),
    }
}

fn steps_of(measured: &Measured) -> Range<u64> {
    let first = measured.steps.first().map_or(0, |step| step.step);
    first..measured.steps.last().map_or(first, |step| step.step + 1)
}

fn module_name(setup: &Setup, module: usize) -> String {
    setup.job.modules().get(module).map_or_else(String::new, |own| format!("{:?}", own.module).to_lowercase())
}

/// Returns the name of a strategy, as the configuration of a run spells it.
pub(super) fn name_of(strategy: Strategy) -> &'static str {
    if strategy == Strategy::ROUND_ROBIN {
        "data-blind"
    } else if strategy == Strategy::SEARCH {
        "balanced"
    } else {
        strategy.name()
    }
}
