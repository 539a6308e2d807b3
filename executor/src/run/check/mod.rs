//! Checks configuration, files, machine and network before a run, and trains nothing.
//!
//! Every rank checks its own machine; among several ranks on a machine, the first rank does. Rank 0 also
//! checks what concerns the whole job.

mod checkpoints;
mod findings;
mod gpus;
mod launcher;
mod machine;
mod memory;
mod model;
mod nccl;
mod rendezvous;
mod shards;

use dflop_loader::shard::expand_shards;

pub use self::findings::{Finding, Findings, Status};
use self::launcher::Launch;
use super::config::RunConfig;
use super::options::RunOptions;
use super::start::optimizer_settings;
use crate::{Error, Result};

/// Checks everything that a run needs.
///
/// - `run`: configuration and options, or why the configuration cannot be read
pub(super) fn check(run: Result<(&RunConfig, &RunOptions)>) -> Findings {
    let mut report = Findings::new(launcher::rank());
    let launch = Launch::from_environment().unwrap_or_else(|error| {
        report.failed("launcher", error);
        Launch::alone()
    });
    rendezvous::check(&mut report, &launch);
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
    machine::check(report, config.file.as_deref(), launch);
    if !is_sound {
        report.skipped("model", "the configuration is wrong");
        shards_alone(report, config);
        checkpoints::check_directory(report, config, None);
        return;
    }
    let Some(setup) = model::check(report, config, options) else { return };
    if launch.identity.rank == 0 {
        launcher::check_ranks(report, launch, &setup);
    }
    let planner = shards::check(report, &setup);
    let device_bytes = gpus::check(report, launch, &setup);
    nccl::check(report, config, launch.ranks_of_machine(setup.job.world_size()).len());
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
        Ok(shards) => drop(shards::check_readable(report, &shards)),
        Err(error) => report.failed("shards", error),
    }
}
