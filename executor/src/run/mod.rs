//! Runs a whole training job from its configuration: a model, shards, a layout over ranks.
//!
//! [`RunConfig`] is the configuration, [`RunOptions`] are the options for one start. [`Run::check`] checks
//! what the run needs, and [`Run::start`] runs it: ranks as threads in this process or as processes, or this
//! process as a rank under a launcher. Rank 0 reports every step and keeps the run's records; all ranks save
//! checkpoints and timelines.
//!
//! # Examples
//! Trains a model from a directory on shards, on this machine:
//! ```no_run
//! use std::ops::ControlFlow;
//!
//! use dflop_executor::run::{ModelTable, Run, RunConfig, RunOptions};
//!
//! let mut config = RunConfig::new(ModelTable {
//!     directory: Some("Qwen2.5-VL-3B-Instruct".into()),
//!     pretrained: true,
//!     ..ModelTable::default()
//! });
//! config.data.shards = vec!["shards/".to_owned()];
//! config.steps = 1000;
//! let end = Run::new(config, RunOptions::default()).start(&mut |step| {
//!     println!("step {}: loss {:.4}", step.step, step.loss);
//!     ControlFlow::Continue(())
//! })?;
//! println!("{} steps", end.steps);
//! # Ok::<(), dflop_executor::Error>(())
//! ```

mod cache_directory;
mod check;
mod compute_device;
mod config;
mod options;
mod parameter_groups;
mod rank;
mod run_files;
mod setup;
mod start;
mod threads;

use std::fs::File;
use std::io::BufReader;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use dflop_loader::files::replace_file;

pub use check::{Finding, Findings, Status};
#[cfg(feature = "cuda")]
pub use compute_device::open as open_cuda;
#[cfg(not(feature = "cuda"))]
pub use compute_device::unsupported;
pub use compute_device::{AttentionName, ComputeDevice, TransportName, missing_variables};
pub use config::{
    CheckpointTable, CorrectionTable, DataTable, EvaluationTable, GenerateTable, GroupTable, ModelTable,
    ModuleTable, OptimizerTable, ParallelTable, PlacementName, PrecisionName, RunConfig, job_layout,
    strategy_name,
};
pub use options::{
    CorrectionSource, PlanFile, PlannedModule, RankProgram, RunEnd, RunOptions, StopRequest, StopRequests,
};
pub use rank::rank_trace;
pub use setup::Setup;

use crate::comm::Settings;
use crate::comm::launch::{end_with_launcher, identity_from_environment};
use crate::train::{START_VARIABLE, StartPart, StartTimes, StepReport, join_traces};
use crate::{Error, Result};

/// A training run.
#[derive(Debug)]
pub struct Run {
    config: RunConfig,
    options: RunOptions,
    setup: OnceLock<Setup>,
}

impl Run {
    /// Creates a run. No file is read before [`Run::check`], [`Run::setup`] or [`Run::start`].
    #[must_use]
    pub fn new(config: RunConfig, options: RunOptions) -> Self {
        Self { config, options, setup: OnceLock::new() }
    }

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// Checks what the run needs and trains nothing: configuration, files, ranks, GPUs, memory, shards,
    /// index, rendezvous, checkpoints. Under a launcher every rank checks its own machine.
    ///
    /// Ranks do not communicate, so no rank waits for a missing rank. Nothing is left on disk.
    #[must_use]
    pub fn check(&self) -> Findings {
        check::check(Ok((&self.config, &self.options)))
    }

    /// Reads the model, and generates the dataset if the configuration requests it; once for all calls.
    ///
    /// # Errors
    /// [`Error::Config`] for an invalid configuration; errors from the model files.
    pub fn setup(&self) -> Result<&Setup> {
        if let Some(setup) = self.setup.get() {
            return Ok(setup);
        }
        let setup = Setup::new(&self.config, &self.options)?;
        Ok(self.setup.get_or_init(|| setup))
    }

    /// Runs all steps and returns how the run ended.
    ///
    /// Blocks until the last rank has ended. `on_step` receives each step report on this thread if rank 0
    /// runs in this process; `Break` ends the run after the next step, with the state saved and
    /// [`StopReason::OutputClosed`](crate::train::StopReason::OutputClosed). If [`RunOptions::processes`]
    /// names a program, ranks run in separate processes, which report there.
    ///
    /// Rank timelines are joined into [`RunOptions::trace`], also after an error. Under a foreign launcher
    /// every rank keeps a separate timeline, `.NAME.RANK` next to that file.
    ///
    /// # Errors
    /// [`Error::Config`] for an invalid configuration; the error of the rank that ended the run.
    pub fn start(&self, on_step: &mut dyn FnMut(&StepReport) -> ControlFlow<()>) -> Result<RunEnd> {
        let mut times = StartTimes::begin();
        let identity = identity_from_environment()?;
        if identity.rendezvous.is_some() {
            end_with_launcher()?;
            if let Ok(launch) = std::env::var(START_VARIABLE) {
                times.add_launch(&launch);
            }
            let stop = self.options.stop.listen()?;
            let setup = self.setup()?;
            times.end(StartPart::Files);
            return threads::run_rank(setup, stop, times, &identity, on_step);
        }
        let setup = self.setup()?;
        times.end(StartPart::Files);
        let ranks = setup.job.world_size();
        if let Some(expected) = self.options.local_ranks.filter(|expected| *expected != ranks) {
            return Err(Error::Config(format!(
                "`--local-ranks {expected}`: expected {ranks}, the ranks of the job"
            )));
        }
        // Checked here once, before every rank would report the same.
        setup.recorded_corrections()?;
        // Builds the index once, before several ranks would do so at the same time.
        drop((setup.planner(None)?, setup.evaluation_planner()?));
        times.end(StartPart::Index);
        let ended = match &self.options.processes {
            Some(program) if ranks > 1 => threads::launch(setup, program, &times),
            _ => {
                let stop = self.options.stop.listen()?;
                threads::run_threads(setup, &stop, &times, on_step)
            }
        };
        // The timeline of a failed run shows where it failed.
        let joined = self.options.trace.as_deref().map_or(Ok(()), |trace| join_parts(trace, ranks));
        let ended = ended?;
        joined.map(|()| ended)
    }
}

impl Findings {
    /// Checks the machine for a run whose configuration cannot be read.
    #[must_use]
    pub fn for_unreadable(error: Error) -> Self {
        check::check(Err(error))
    }
}

/// Joins all rank timelines into a single file, if there are any, and removes the rank files.
fn join_parts(trace: &Path, ranks: usize) -> Result<()> {
    let parts = (0..ranks).map(|rank| rank_trace(trace, rank));
    let parts: Vec<PathBuf> = parts.filter(|part| part.is_file()).collect();
    if parts.is_empty() {
        return Ok(());
    }
    let files =
        parts.iter().map(|part| File::open(part).map(BufReader::new)).collect::<Result<Vec<_>, _>>()?;
    replace_file(trace, |output| join_traces(files, output).map(drop))
        .map_err(|error: Error| error.in_file(trace))?;
    parts.iter().try_for_each(std::fs::remove_file)?;
    Ok(())
}

impl Setup {
    /// Returns the communicator settings.
    fn comm_settings(&self) -> Settings {
        let [timeout, slow] = [self.config.parallel.timeout_seconds, self.config.parallel.slow_seconds];
        Settings::default().wait(Duration::from_secs_f64(timeout)).slow(Duration::from_secs_f64(slow))
    }
}
