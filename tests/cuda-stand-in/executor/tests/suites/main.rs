//! Executor suites on CUDA devices, on the stand-ins: through the host and over NCCL.
//!
//! This program starts itself once for each part. Stand-in settings apply per process: through the host,
//! streams on a single device run as late as allowed; over NCCL, streams on several devices have threads.
//! Late streams also keep released memory until the process ends: all pipelines through the host together
//! fill 22 GB.

mod orders;

use std::process::{Command, ExitCode};

use dflop_cuda_tests::{OnCuda, OnNccl, OnQueues};
use dflop_testing::{Claim, conformance, parity, pipeline, run, tensor_parallel, training};

/// Variable with the part number that a process runs.
const PART: &str = "DFLOP_CUDA_PART";

/// Connection name and claims.
type Part = (&'static str, fn() -> Vec<Claim>);

const PARTS: [Part; 11] = [
    ("cuda", conformance::claims::<OnCuda>),
    ("cuda", parity::claims::<OnCuda>),
    ("cuda", tensor_parallel::claims::<OnCuda>),
    ("cuda", gradients_through_host),
    ("cuda", pipelines_through_host),
    ("cuda", pipeline::own_stage::claims::<OnCuda>),
    ("cuda", pipeline::shared_ranks::claims::<OnCuda>),
    ("cuda", training::claims::<OnCuda>),
    ("nccl", over_nccl),
    ("queues_8", pipelines_over_8_queues),
    ("queues_16", shared_ranks_over_16_queues),
];

fn main() -> ExitCode {
    let part = std::env::var(PART).ok().and_then(|part| PARTS.get(part.parse::<usize>().ok()?));
    if let Some((connection, claims)) = part {
        return run(vec![(*connection, claims())]);
    }
    let failed = (0..PARTS.len()).filter(|&part| !passes(part)).count();
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a part in a separate process, with this process's arguments, and returns whether the part succeeded.
fn passes(part: usize) -> bool {
    let program = std::env::current_exe().expect("a test has a path");
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).env(PART, part.to_string());
    if let Some(queues) = PARTS[part].0.strip_prefix("queues_") {
        command.env("CUDA_STAND_IN_QUEUES", queues);
    }
    let status = command.status();
    status.expect("the test starts").success()
}

fn gradients_through_host() -> Vec<Claim> {
    let files = [
        pipeline::collective_order::claims::<OnCuda>(),
        pipeline::divided_gradients::claims::<OnCuda>(),
        pipeline::sharded_states::claims::<OnCuda>(),
    ];
    files.into_iter().flatten().collect()
}

fn pipelines_through_host() -> Vec<Claim> {
    let files = [pipeline::language_models::claims::<OnCuda>(), pipeline::media::claims::<OnCuda>()];
    files.into_iter().flatten().collect()
}

fn over_nccl() -> Vec<Claim> {
    let suites = [
        conformance::claims::<OnNccl>(),
        pipeline::divided_gradients::claims::<OnNccl>(),
        pipeline::failures::claims::<OnNccl>(),
        pipeline::language_models::claims::<OnNccl>(),
        pipeline::media::claims::<OnNccl>(),
        pipeline::own_stage::claims::<OnNccl>(),
        pipeline::sharded_states::claims::<OnNccl>(),
        pipeline::shared_ranks::claims::<OnNccl>(),
        orders::claims(),
    ];
    suites.into_iter().flatten().collect()
}

/// Returns pipeline claims with shared message lanes, on devices where streams in excess of the queues wait
/// for each other.
fn pipelines_over_8_queues() -> Vec<Claim> {
    let names = [
        "any_number_of_stages_gives_the_same_bits",
        "schedules_and_recomputation_give_the_same_bits",
        "stages_of_replicas_give_the_bits_of_whole_ones",
    ];
    chosen(pipeline::language_models::claims::<OnQueues<8>>(), &names)
}

/// As above, with modules that share ranks and have up to six collective communicators.
fn shared_ranks_over_16_queues() -> Vec<Claim> {
    let names = [
        "encoders_may_run_on_the_ranks_of_the_llm_before_and_after_it",
        "joint_ranks_of_a_group_share_the_media_of_their_microbatch",
    ];
    chosen(pipeline::shared_ranks::claims::<OnQueues<16>>(), &names)
}

fn chosen(claims: Vec<Claim>, names: &[&str]) -> Vec<Claim> {
    let is_chosen = |claim: &Claim| names.iter().any(|name| claim.name.ends_with(name));
    let chosen: Vec<Claim> = claims.into_iter().filter(is_chosen).collect();
    assert_eq!(chosen.len(), names.len(), "all claims are there");
    chosen
}
