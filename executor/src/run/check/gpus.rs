//! Checks the GPUs on this machine and the CUDA libraries, in builds that use them.

use super::Findings;
use super::launcher::Launch;
use crate::run::compute_device::ComputeDevice;
use crate::run::setup::Setup;

const SUBJECT: &str = "GPUs";

/// Checks the devices that the ranks on this machine compute on; returns the memory per device, in bytes.
pub(super) fn check(report: &mut Findings, launch: &Launch, setup: &Setup) -> Option<u64> {
    let ComputeDevice::Cuda(ordinal) = setup.config.parallel.compute_device else {
        report.skipped(SUBJECT, "ranks compute on CPUs");
        return None;
    };
    let ranks = launch.ranks_of_machine(setup.job.world_size()).len();
    check_devices(report, ordinal, ranks)
}

#[cfg(not(feature = "cuda"))]
fn check_devices(report: &mut Findings, _ordinal: Option<u32>, _ranks: usize) -> Option<u64> {
    report.failed(SUBJECT, crate::run::compute_device::unsupported());
    None
}

/// Opens the libraries and a device.
///
/// - `ordinal`: device number for all ranks; `None` if each rank has a separate device
/// - `ranks`: number of ranks on this machine
#[cfg(feature = "cuda")]
fn check_devices(report: &mut Findings, ordinal: Option<u32>, ranks: usize) -> Option<u64> {
    use crate::Error;
    use dflop_cuda::{Cuda, Libraries, SearchPath};

    let failed = |error: dflop_cuda::Error| Error::Start(error.to_string());
    let search = SearchPath::from_environment();
    let found =
        Libraries::open(&search).map_err(|error| report.failed("CUDA libraries", failed(error))).ok()?;
    let [driver, compiler, blas] =
        [found.driver, found.compiler, found.blas].map(|path| path.display().to_string());
    report.ok("CUDA libraries", format!("driver `{driver}`, NVRTC `{compiler}`, cuBLASLt `{blas}`"));
    let devices = Cuda::count(&search).map_err(|error| report.failed(SUBJECT, failed(error))).ok()?;
    let device = Cuda::builder(ordinal.unwrap_or(0)).kernel_cache(None).build();
    let properties = device.map_err(|error| report.failed(SUBJECT, failed(error))).ok()?.properties();
    let (name, (major, minor)) = (properties.name, properties.driver_version);
    let finding = format!("{devices} for {ranks} ranks, `{name}`, driver of CUDA {major}.{minor}");
    let devices_used = if ordinal.is_some() { 1 } else { devices as usize };
    if ranks > devices_used {
        report.note(SUBJECT, format!("{finding}; ranks share devices"));
    } else {
        report.ok(SUBJECT, finding);
    }
    Some(properties.total_bytes)
}
