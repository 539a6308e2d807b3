//! Checks the library NCCL, where ranks exchange messages over it.

use super::TrainConfig;
use super::report::Report;
use crate::args::compute_device::TransportName;

const SUBJECT: &str = "NCCL";

pub(super) fn check(report: &mut Report, config: &TrainConfig) {
    match config.parallel.transport {
        TransportName::Tcp => report.skipped(SUBJECT, "ranks exchange messages over TCP"),
        TransportName::Nccl => check_library(report),
    }
}

#[cfg(not(feature = "cuda"))]
fn check_library(report: &mut Report) {
    report.failed(SUBJECT, crate::cuda::refuse());
}

#[cfg(feature = "cuda")]
fn check_library(report: &mut Report) {
    use crate::failure::Failure;
    use dflop_cuda::{Nccl, SearchPath};

    match Nccl::open(&SearchPath::from_environment()) {
        Ok(nccl) => report.ok(SUBJECT, format!("version {}, `{}`", nccl.version(), nccl.file().display())),
        Err(error) => report.failed(SUBJECT, Failure::Failed(error.to_string())),
    }
}
