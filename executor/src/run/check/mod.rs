//! Checks configuration, files, machine and network before a run, and trains nothing.
//!
//! Check findings.
//!
//! Every rank checks its own machine; among several ranks on a machine, the first rank does. Rank 0 also
//! checks what concerns the whole job.

mod checkpoints;
mod files;
mod launcher;
mod machine;
mod memory;

use super::config::RunConfig;
use super::options::RunOptions;
use super::start::optimizer_settings;
use crate::{Error, Result};
use dflop_loader::shard::expand_shards;
use launcher::Launch;
use serde::Serialize;

/// Checks everything that a run needs.
///
/// - `run`: configuration and options, or why the configuration cannot be read
pub(super) fn check(run: Result<(&RunConfig, &RunOptions)>) -> Findings {
    let mut report = Findings::new(launcher::rank());
    let launch = Launch::from_environment().unwrap_or_else(|error| {
        report.failed("launcher", error);
        Launch::alone()
    });
    launcher::check(&mut report, &launch);
    if launch.is_first_of_machine() {
        match run {
            Ok((config, options)) => check_run(config, options, &launch, &mut report),
            Err(error) => report.failed(CONFIGURATION, error),
        }
    }
    report
}

const CONFIGURATION: &str = "configuration";

fn check_run(config: &RunConfig, options: &RunOptions, launch: &Launch, report: &mut Findings) {
    let is_sound = check_settings(config, options, report);
    machine::check_limits(report, config.file.as_deref(), launch);
    if !is_sound {
        report.skipped("model", "the configuration is wrong");
        shards_alone(report, config);
        checkpoints::check_directory(report, config, None);
        return;
    }
    let Some(setup) = files::check_model(report, config, options) else { return };
    if launch.identity.rank == 0 {
        launcher::check_ranks(report, launch, &setup);
    }
    let planner = files::check_shards(report, &setup);
    let device_bytes = machine::check_gpus(report, launch, &setup);
    machine::check_nccl(report, config, launch.ranks_of_machine(setup.job.world_size()).len());
    let tokens = planner.as_ref().and_then(|planner| memory::largest_microbatch(report, planner));
    memory::check(report, &setup, launch, tokens, device_bytes);
    checkpoints::check_directory(report, config, Some(&setup));
    checkpoints::check_resume(report, &setup, planner.is_some());
}

/// Checks the settings themselves; returns whether all are valid.
fn check_settings(config: &RunConfig, options: &RunOptions, report: &mut Findings) -> bool {
    let mut errors: Vec<Error> = config.problems(options).into_iter().map(Error::Config).collect();
    errors.extend(config.schedule().err());
    errors.extend(config.frozen().err());
    errors.extend(optimizer_settings(config).check().err());
    let is_sound = errors.is_empty();
    if is_sound {
        let (steps, samples) = (options.until.unwrap_or(config.steps), config.data.global_batch_size);
        report.ok(CONFIGURATION, format!("{steps} steps of {samples} samples, seed {}", config.seed));
    }
    for error in errors {
        report.failed(CONFIGURATION, error);
    }
    is_sound
}

/// Checks the shards for a configuration that is wrong elsewhere.
fn shards_alone(report: &mut Findings, config: &RunConfig) {
    if config.data.shards.is_empty() {
        return;
    }
    match expand_shards(&config.data.shards) {
        Ok(shards) => drop(files::check_readable(report, &shards, "data.shards")),
        Err(error) => report.failed("shards", error),
    }
}

/// Check outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As the run needs it.
    Ok,
    /// The run would fail, or not do what the configuration requests.
    Wrong,
    /// Worth knowing, and no fault.
    Note,
    /// Does not apply, or could not be checked for a reason that another finding names.
    Skipped,
}

impl Status {
    /// Returns the name, as JSON has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Wrong => "wrong",
            Self::Note => "note",
            Self::Skipped => "skipped",
        }
    }
}

/// A check and its finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Outcome.
    pub status: Status,
    /// Checked subject, such as `shards`.
    pub subject: &'static str,
    /// What was found; several lines for a place in a file.
    pub finding: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// Findings on a rank, in check order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Findings {
    /// Rank of this process, 0 without a launcher.
    pub rank: usize,
    /// Number of wrong findings.
    pub wrong: usize,
    /// All findings.
    pub checks: Vec<Finding>,
}

impl Findings {
    fn new(rank: usize) -> Self {
        Self { rank, wrong: 0, checks: Vec::new() }
    }

    fn ok(&mut self, subject: &'static str, finding: impl Into<String>) {
        self.add(Status::Ok, subject, finding.into(), None);
    }

    fn note(&mut self, subject: &'static str, finding: impl Into<String>) {
        self.add(Status::Note, subject, finding.into(), None);
    }

    fn skipped(&mut self, subject: &'static str, finding: impl Into<String>) {
        self.add(Status::Skipped, subject, finding.into(), None);
    }

    /// Adds a fault and the remedy.
    fn wrong(&mut self, subject: &'static str, finding: impl Into<String>, advice: impl Into<String>) {
        self.add(Status::Wrong, subject, finding.into(), Some(advice.into()));
    }

    /// Adds a fault whose message names the remedy.
    fn failed(&mut self, subject: &'static str, error: impl Into<Error>) {
        self.add(Status::Wrong, subject, error.into().in_one_line(), None);
    }

    fn add(&mut self, status: Status, subject: &'static str, finding: String, advice: Option<String>) {
        self.wrong += usize::from(status == Status::Wrong);
        self.checks.push(Finding { status, subject, finding, advice });
    }
}
