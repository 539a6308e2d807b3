//! The suites of the executor on CUDA devices, on the stand-ins: through the host and over NCCL.
//!
//! Settings of the stand-in hold for a process, so this program starts itself once for each: through the host
//! streams of one device run as late as they may, over NCCL those of several devices have threads.

mod orders;

use std::process::{Command, ExitCode};

use dflop_cuda_tests::{OnCuda, OnNccl};
use dflop_testing::{Claim, conformance, parity, pipeline, run, tensor_parallel, training};

/// Variable with the name of the connection whose suites a process runs.
const CONNECTION: &str = "DFLOP_CUDA_CONNECTION";
const THROUGH_HOST: &str = "cuda";
const OVER_NCCL: &str = "nccl";

fn main() -> ExitCode {
    match std::env::var(CONNECTION).as_deref() {
        Ok(THROUGH_HOST) => run(vec![(THROUGH_HOST, through_host())]),
        Ok(OVER_NCCL) => run(vec![(OVER_NCCL, over_nccl())]),
        _ => {
            let passed = [THROUGH_HOST, OVER_NCCL].map(run_in_own_process);
            if passed == [true, true] { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
    }
}

/// Runs this program with its arguments for one connection, and returns whether it succeeded.
fn run_in_own_process(connection: &str) -> bool {
    let program = std::env::current_exe().expect("a test has a path");
    let mut command = Command::new(program);
    let status = command.args(std::env::args_os().skip(1)).env(CONNECTION, connection).status();
    status.expect("the test starts").success()
}

fn through_host() -> Vec<Claim> {
    let suites = [
        conformance::claims::<OnCuda>(),
        parity::claims::<OnCuda>(),
        tensor_parallel::claims::<OnCuda>(),
        pipeline::collective_order::claims::<OnCuda>(),
        pipeline::divided_gradients::claims::<OnCuda>(),
        pipeline::language_models::claims::<OnCuda>(),
        pipeline::media::claims::<OnCuda>(),
        pipeline::own_stage::claims::<OnCuda>(),
        pipeline::sharded_states::claims::<OnCuda>(),
        pipeline::shared_ranks::claims::<OnCuda>(),
        training::claims::<OnCuda>(),
    ];
    suites.into_iter().flatten().collect()
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
