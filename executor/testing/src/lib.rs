//! Executor test suites, generic over the device that they run on.
//!
//! A [`Claim`] is a test as a value. A suite lists claims for a [`TestBackend`], that is, a device with a
//! tensor transport: [`all`] lists the claims that hold on every device, [`on_cpu`] the claims that only the
//! CPU device checks. A test binary without the compiler harness passes them to [`run`].

#![allow(clippy::missing_panics_doc, reason = "a claim that does not hold panics")]
#![allow(clippy::must_use_candidate, reason = "tests use what they ask for")]
#![allow(clippy::float_cmp, reason = "bits are compared on purpose")]

mod claim;
pub mod conformance;
mod device;
mod hooked;
pub mod parity;
pub mod pipeline;
#[path = "../../comm/tests/support/mod.rs"]
pub mod support;
pub mod tensor_parallel;
pub mod training;

use std::process::ExitCode;

pub use claim::Claim;
pub use device::{TestBackend, TestDevice};

/// Lists the claims in all suites that hold on every device.
pub fn all<B: TestBackend>() -> Vec<Claim> {
    let suites = [
        conformance::claims::<B>(),
        parity::claims::<B>(),
        tensor_parallel::claims::<B>(),
        pipeline::claims::<B>(),
        training::claims::<B>(),
    ];
    suites.into_iter().flatten().collect()
}

/// Lists the claims that only the CPU device checks: rejections, rank failures, files.
pub fn on_cpu() -> Vec<Claim> {
    let suites = [tensor_parallel::on_cpu(), pipeline::on_cpu(), training::on_cpu()];
    suites.into_iter().flatten().collect()
}

/// Runs the claims that the process arguments select, and returns whether they hold.
///
/// Devices have names, with which their claims start: `cpu::parity::…`. Arguments are the same as in the
/// compiler harness: filters, `--exact`, `--list`, `--skip`, `--test-threads`, `--nocapture`.
pub fn run(devices: Vec<(&str, Vec<Claim>)>) -> ExitCode {
    training::killed::save_if_asked();
    claim::run(devices)
}
