//! Fills the `dflop train` report: steps, measured and simulated passes, and predictions.

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use dflop_balancer::Strategy;
use dflop_executor::comm::launch::{has_launcher, identity_from_environment};
use dflop_executor::run::{Run, Setup, rank_trace, strategy_name};
use dflop_executor::train::{StartReport, StepReport};
use dflop_loader::files::open_own;

use crate::args::{PREVIEWS, ReportArgs};
use crate::failure::Failure;
use crate::output::write_json;
use crate::report::collect::{ABOUT_RUN, Measured, SampleTable, read_traces, timelines_of_plans};
use crate::report::{
    Accuracy, Basis, Origin, RunReport, StrategyResult, Study, StudyStep, Timeline, TrainedStep, Training,
    compare_steps, seconds, verdict, write_report,
};

/// A measured run with a strategy.
pub(super) struct MeasuredRun {
    pub(super) strategy: Strategy,
    /// Timeline file for the run's ranks, if it exists.
    pub(super) trace: PathBuf,
    /// Mean step in seconds and number of steps; `None` uses the mean over the traced passes.
    pub(super) mean: Option<(f64, u64)>,
}

/// Study of runs, and the last run's passes.
pub(super) struct RunStudy {
    pub(super) study: Study,
    pub(super) measured: Measured,
    pub(super) notes: Vec<String>,
}

/// Source files for the run report, next to the report: steps and timelines.
pub(super) struct ReportFiles {
    /// Report file; `None` if no report is requested.
    path: Option<PathBuf>,
    previews: usize,
    /// Timeline file that the user requested.
    trace: Option<PathBuf>,
    /// Whether this process writes the report.
    is_written: bool,
    /// Whether a launcher started the ranks, so that nobody joins the rank timelines.
    is_rank: bool,
    /// Step file, from the first step on.
    log: Option<BufWriter<File>>,
}

impl ReportFiles {
    /// Chooses the files and removes the leftovers from a killed run.
    ///
    /// - `trace`: timeline file that the user requested
    pub(super) fn new(args: &ReportArgs, trace: Option<&Path>) -> Result<Self, Failure> {
        let identity = identity_from_environment().map_err(dflop_executor::Error::from)?;
        let is_first = identity.rank == 0;
        let files = Self {
            path: args.path().map(Path::to_owned),
            previews: PREVIEWS,
            trace: trace.map(Path::to_owned),
            // Ranks that this command line started leave it to the process that started them.
            is_written: is_first && !has_launcher(),
            is_rank: identity.rendezvous.is_some(),
            log: None,
        };
        if let Some(steps) = files.steps().filter(|steps| is_first && steps.exists()) {
            std::fs::remove_file(&steps).map_err(|error| Failure::from(error).in_file(&steps))?;
        }
        Ok(files)
    }

    /// Returns the file for the timeline of the run, which the report needs as well.
    pub(super) fn trace(&self) -> Option<PathBuf> {
        // Another program's ranks join nothing: rank 0 reports on itself.
        let is_needed = self.is_written || has_launcher();
        let hidden = || self.path.as_ref().filter(|_| is_needed).map(|path| beside(path, "trace"));
        self.trace.clone().or_else(hidden)
    }

    fn steps(&self) -> Option<PathBuf> {
        self.path.as_ref().map(|path| beside(path, "steps"))
    }

    /// Keeps a step for the report; flushed, so that the report of a killed run has it.
    pub(super) fn keep(&mut self, step: &StepReport) -> Result<(), Failure> {
        let Some(path) = self.steps() else { return Ok(()) };
        let failed = |error| Failure::from(error).in_file(&path);
        if self.log.is_none() {
            let file = open_own(&path).and_then(|file| file.set_len(0).map(|()| file));
            self.log = Some(BufWriter::new(file.map_err(failed)?));
        }
        self.log.iter_mut().try_for_each(|log| {
            write_json(log, step)?;
            log.flush().map_err(failed)
        })
    }

    /// Writes the report, if it is requested and the run took a step, and removes the source files.
    pub(super) fn write(&self, run: &Run) -> Result<(), Failure> {
        let (Some(path), Some(steps), true) = (&self.path, self.steps(), self.is_written) else {
            return Ok(());
        };
        let trace = self.trace().map(|trace| if self.is_rank { rank_trace(&trace, 0) } else { trace });
        let reported = match report(&steps, run, trace.clone().unwrap_or_default(), self.previews) {
            Ok(Some(report)) => write_report(path, &report),
            other => other.map(drop),
        };
        for file in [Some(steps), trace.filter(|_| self.trace.is_none())].into_iter().flatten() {
            match std::fs::remove_file(&file) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return reported.and(Err(Failure::from(error).in_file(&file)));
                }
                _ => {}
            }
        }
        reported
    }
}

/// Returns a hidden file next to the report.
fn beside(report: &Path, kind: &str) -> PathBuf {
    let name = report.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    report.with_file_name(format!(".{name}.{kind}"))
}

/// Returns the run report; `None` if the run took no step.
///
/// - `steps`: step file
/// - `trace`: timeline file; a missing file is left out
fn report(steps: &Path, run: &Run, trace: PathBuf, previews: usize) -> Result<Option<RunReport>, Failure> {
    let text = match std::fs::read_to_string(steps) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        text => text.map_err(|error| Failure::from(error).in_file(steps))?,
    };
    let (config, setup) = (run.config(), run.setup()?);
    let steps: Vec<TrainedStep> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let name = strategy_name(config.parallel.strategy);
    let Some(training) = Training::new(name, &steps) else { return Ok(None) };
    let mut report = RunReport::new(
        "train",
        format!("Training of {}", setup.model_spec().name),
        Origin::for_this_process(),
    );
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
    let start = start_report(&text).map(|start| format!("The start with the first step takes {start}."));
    report.verdict.extend(start.map(|text| verdict(Basis::Measured, text)));
    report.verdict.extend(training.idle().map(|text| verdict(Basis::Measured, text)));
    let measured = MeasuredRun { strategy: config.parallel.strategy, trace, mean: None };
    let RunStudy { study, measured, notes } = study_of_runs(run, "Passes of the run", &[measured], previews)?;
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
    report.fact("Ranks", setup.job().world_size().to_string());
    report.fact(
        "Schedule",
        format!("{}, {} microbatches", setup.job().schedule(), config.parallel.microbatches),
    );
    report.fact("Strategy", name);
    report.fact("Global batch", format!("{} samples", config.data.global_batch_size));
    report.fact("Predictions", device);
    report.fact("Seed", config.seed.to_string());
    report.accuracy = Accuracy::from_passes(&measured, is_absolute);
    report.training = Some(training);
    report.notes = notes;
    report.studies.push(study);
    Ok(Some(report))
}

/// Returns the times of the start, which the first line has.
fn start_report(steps: &str) -> Option<StartReport> {
    #[derive(serde::Deserialize)]
    struct First {
        start: StartReport,
    }
    let first: First = serde_json::from_str(steps.lines().next()?).ok()?;
    Some(first.start)
}

/// Returns the study of runs on the same steps: simulated plans by every strategy, then measurements.
///
/// - `run`: run whose setup all runs share
pub(super) fn study_of_runs(
    run: &Run,
    name: &str,
    runs: &[MeasuredRun],
    previews: usize,
) -> Result<RunStudy, Failure> {
    let (config, setup) = (run.config(), run.setup()?);
    let stages: Vec<String> =
        setup.job().stages().iter().map(|stage| module_name(setup, stage.module())).collect();
    let planner = setup.planner(None)?;
    let (mut table, mut notes) = (SampleTable::default(), Vec::new());
    let mut all = Vec::new();
    for run in runs {
        let trace = Some(run.trace.clone()).filter(|trace| trace.is_file());
        let mut measured = read_traces(trace.as_slice(), &stages)?;
        measured.name_samples(&planner, &mut table)?;
        all.push((run, measured));
    }
    let shown = all.first().map_or(0..0, |(_, measured)| measured_steps(measured));
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
    for module in 0..setup.job().modules().len() {
        modules.push(module_name(setup, module));
    }
    let (name, about) = (name.to_owned(), ABOUT_RUN.to_owned());
    Ok(RunStudy { study: Study { name, about, modules, strategies, samples, steps }, measured, notes })
}

/// Adds a run's measured timelines, and the predicted timelines only if nothing else is simulated.
fn add_run(
    run: &MeasuredRun,
    measured: &Measured,
    strategies: &mut Vec<StrategyResult>,
    steps: &mut Vec<StudyStep>,
) {
    let has_simulated = strategies.iter().any(|strategy| strategy.basis == Basis::Simulated);
    let mut own = measured.result(0, strategy_name(run.strategy), Basis::Measured);
    if let Some((step_seconds, steps)) = run.mean {
        (own.step_seconds, own.steps) = (step_seconds, steps);
    }
    let mut places = vec![(0, strategies.len())];
    strategies.push(own);
    if !has_simulated {
        places.push((1, strategies.len()));
        strategies.push(measured.result(1, strategy_name(run.strategy), Basis::Simulated));
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
        name: strategy_name(kind).to_owned(),
        basis: Basis::Simulated,
        step_seconds: ends.iter().sum::<u64>() as f64 / 1e9 / ends.len().max(1) as f64,
        step_seconds_p95: None,
        bubble_fraction: None,
        bound_seconds: None,
        steps: ends.len() as u64,
        plan: String::new(),
    }
}

fn measured_steps(measured: &Measured) -> Range<u64> {
    let first = measured.steps.first().map_or(0, |step| step.step);
    first..measured.steps.last().map_or(first, |step| step.step + 1)
}

fn module_name(setup: &Setup, module: usize) -> String {
    setup
        .job()
        .modules()
        .get(module)
        .map_or_else(String::new, |own| format!("{:?}", own.module).to_lowercase())
}
