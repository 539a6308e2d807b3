//! Checks the library NCCL, where ranks exchange tensors over it.

use super::Findings;
use crate::run::compute_device::{ComputeDevice, TransportName};
use crate::run::config::RunConfig;

const SUBJECT: &str = "NCCL";

/// Checks NCCL, and that each rank on this machine has a separate device.
///
/// - `ranks`: number of ranks on this machine
pub(super) fn check(report: &mut Findings, config: &RunConfig, ranks: usize) {
    match (config.parallel.transport, config.parallel.compute_device) {
        (TransportName::Tcp, _) => report.skipped(SUBJECT, "ranks exchange messages over TCP"),
        (_, ComputeDevice::Cpu) => report.skipped(SUBJECT, "ranks compute on CPUs"),
        (_, ComputeDevice::Cuda(ordinal)) => check_library(report, ordinal, ranks),
    }
}

#[cfg(not(feature = "cuda"))]
fn check_library(report: &mut Findings, _ordinal: Option<u32>, _ranks: usize) {
    report.skipped(SUBJECT, "this build has no CUDA devices");
}

#[cfg(feature = "cuda")]
fn check_library(report: &mut Findings, ordinal: Option<u32>, ranks: usize) {
    use crate::Error;
    use dflop_cuda::{Cuda, Nccl, NcclVersion, SearchPath};

    let failed = |error: dflop_cuda::Error| Error::Start(error.to_string());
    let search = SearchPath::from_environment();
    // NCCL needs the driver, which this opens
    let Ok(devices) = Cuda::count(&search) else { return report.skipped(SUBJECT, "there is no device") };
    let nccl = match Nccl::open(&search) {
        Ok(nccl) => nccl,
        Err(error) => return report.failed(SUBJECT, failed(error)),
    };
    let finding = format!("version {}, `{}`", nccl.version(), nccl.file().display());
    let devices = if ordinal.is_some() { 1 } else { devices as usize };
    if ranks > devices && nccl.version() < NcclVersion::SHARED_DEVICE {
        let problem = format!("{finding}, does not let {ranks} ranks share {devices} devices");
        let remedy = "start one rank for each device, or use NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1";
        return report.wrong(SUBJECT, problem, remedy);
    }
    report.ok(SUBJECT, finding);
}
