//! `dflop train --check`: checks configuration, files, machine and network before a run, and trains nothing.
//!
//! Every rank checks its own machine; of several ranks of a machine the first one does. Rank 0 prints what
//! concerns the job. Ranks do not talk to each other, so none waits for one that is missing, and nothing is
//! left on disk: files that a run would generate are written to a temporary directory or not at all.

mod checkpoints;
mod gpus;
mod launcher;
mod machine;
mod memory;
mod model;
mod nccl;
mod rendezvous;
mod report;
mod shards;

use dflop_loader::shard::expand_shards;

use self::launcher::Launch;
use self::report::Report;
use super::TrainArgs;
use super::config::TrainConfig;
use super::setup::Setup;
use super::start::optimizer_settings;
use crate::failure::Failure;
use crate::output::Output;

/// Checks everything that a run with these arguments needs, and prints the findings.
pub(super) fn run(args: &TrainArgs, out: &mut Output) -> Result<(), Failure> {
    let mut report = Report::new(launcher::rank());
    match Launch::from_environment() {
        Ok(launch) => check(args, &launch, &mut report),
        Err(failure) => {
            report.failed("launcher", failure);
            check(args, &Launch::alone(), &mut report);
        }
    }
    report.print(out, args.json)
}

fn check(args: &TrainArgs, launch: &Launch, report: &mut Report) {
    rendezvous::check(report, launch);
    if !launch.is_first_of_machine() {
        return;
    }
    let Some((config, is_sound)) = configuration(args, report) else { return };
    machine::check(report, &args.config, launch);
    if !is_sound {
        report.skipped("model", "the configuration is wrong");
        shards_alone(report, &config);
        checkpoints::check_directory(report, &config, None);
        return;
    }
    let Some(setup) = model::check(report, &config) else { return };
    if launch.identity.rank == 0 {
        launcher::check_ranks(report, &config, launch, &setup, args.local_ranks);
    }
    let planner = shards::check(report, &config, &setup);
    let device_bytes = gpus::check(report, &config, launch, &setup);
    nccl::check(report, &config, launch.ranks_of_machine(setup.job.world_size()).len());
    let tokens = planner.as_ref().and_then(|planner| memory::largest_microbatch(report, planner));
    memory::check(report, &config, &setup, launch, tokens, device_bytes);
    checkpoints::check_directory(report, &config, Some(&setup));
    checkpoints::check_resume(report, &config, &setup, args.resume, planner.is_some());
}

/// Reads the configuration; returns it with whether it has no fault, or `None` if it cannot be read.
fn configuration(args: &TrainArgs, report: &mut Report) -> Option<(TrainConfig, bool)> {
    const SUBJECT: &str = "configuration";
    let config = args.config().map_err(|failure| report.failed(SUBJECT, failure)).ok()?;
    let mut failures: Vec<Failure> = config.problems().into_iter().map(Failure::Misuse).collect();
    failures.extend(config.schedule().err());
    failures.extend(config.frozen().err());
    failures.extend(optimizer_settings(&config).check().err().map(Failure::from));
    let is_sound = failures.is_empty();
    if is_sound {
        let (steps, samples) = (config.until.unwrap_or(config.steps), config.data.global_batch);
        report.ok(SUBJECT, format!("{steps} steps of {samples} samples, seed {}", config.seed));
    }
    for failure in failures {
        report.failed(SUBJECT, failure);
    }
    Some((config, is_sound))
}

/// Checks the shards of a configuration that is wrong elsewhere.
fn shards_alone(report: &mut Report, config: &TrainConfig) {
    if config.data.shards.is_empty() {
        return;
    }
    match expand_shards(&config.data.shards) {
        Ok(shards) => drop(shards::check_readable(report, &shards)),
        Err(error) => report.failed("shards", error),
    }
}
