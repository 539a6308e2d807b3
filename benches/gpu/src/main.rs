//! Proves and measures the executor on a CUDA device.
//!
//! ```sh
//! gpu-check PART [--tiny] [--small] [--fastest [--settle SECONDS]] [--seed N] [--write DIR] [--set NAME]
//!     [FILE...]
//! ```
//!
//! Every part prints a JSON object per line, each result as it arrives, and finally a summary; text for
//! people is printed to stderr. The exit status is 0 if the part passed, 1 if it failed, 3 if only a bound on
//! speed was missed and 4 if it was skipped. `run.sh` next to this package runs all parts.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "this is a program")]

mod arguments;
mod attention;
#[path = "../../../tests/cuda-stand-in/executor/tests/device/attention.rs"]
mod attention_cases;
mod bandwidth;
mod buckets;
#[path = "../../../tests/cuda-stand-in/executor/tests/device/cases.rs"]
mod cases;
mod compare;
mod device;
#[path = "../../../tests/cuda-stand-in/executor/tests/device/experts.rs"]
mod expert_cases;
mod gemm;
mod machines;
mod models;
mod nccl;
mod operations;
mod parity;
mod profile;
#[allow(dead_code, reason = "the suite chooses its seed by another way")]
#[path = "../../../tests/cuda-stand-in/executor/tests/device/random.rs"]
mod random;
mod report;
mod train;

use std::process::ExitCode;

use arguments::Arguments;
use report::Outcome;

/// Result of a part; any device or model error ends it.
type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

fn main() -> ExitCode {
    let arguments = match Arguments::parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(problem) => {
            eprintln!("gpu-check: {problem}");
            return ExitCode::from(2);
        }
    };
    if arguments.part == "nccl"
        && let Err(error) = nccl::set_variables()
    {
        eprintln!("gpu-check: could not start again: {error}");
        return ExitCode::FAILURE;
    }
    let outcome = match arguments.part.as_str() {
        "device" => device::run(&arguments),
        "operations" => operations::run(&arguments),
        "buckets" => Ok(buckets::run(&arguments)),
        "attention" => attention::run(&arguments),
        "gemm" => gemm::run(&arguments),
        "bandwidth" => bandwidth::run(&arguments),
        "parity" => parity::run(&arguments),
        "train" => train::run(&arguments),
        "profile" => profile::run(&arguments),
        "nccl" => nccl::run(&arguments),
        "machines" => machines::run(&arguments),
        "compare" => compare::run(&arguments),
        part => Err(format!("there is no part `{part}`").into()),
    };
    let outcome = outcome.unwrap_or_else(|error| report::failure(&arguments.part, &*error));
    ExitCode::from(match outcome {
        Outcome::Passed => 0,
        Outcome::Failed => 1,
        Outcome::Missed => 3,
        Outcome::Skipped => 4,
    })
}
