//! Checks this machine: limits, the clock, GPUs and the CUDA libraries, and the library NCCL.

use std::path::Path;
use std::time::{Duration, SystemTime};

use rustix::process::{Resource, getrlimit};

use super::Findings;
use super::launcher::Launch;
use crate::run::compute_device::{ComputeDevice, TransportName};
use crate::run::config::RunConfig;
use crate::run::setup::Setup;

const GPUS: &str = "GPUs";
const NCCL: &str = "NCCL";
/// Maximum number of descriptors that a rank opens, without connections.
const DESCRIPTORS: u64 = 256;
/// Number of descriptors for the connections with another rank.
const DESCRIPTORS_PER_RANK: u64 = 5;
/// Maximum clock difference without a note.
const CLOCK_MAX: Duration = Duration::from_mins(1);

/// Checks limits and the clock.
///
/// - `config`: configuration file, if there is one
pub(super) fn check_limits(report: &mut Findings, config: Option<&Path>, launch: &Launch) {
    let needed = DESCRIPTORS + DESCRIPTORS_PER_RANK * launch.identity.size as u64;
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit < needed => report.wrong(
            "open files",
            format!("the limit is {limit}, a rank may need {needed}"),
            format!("raise it with `ulimit -n {needed}`"),
        ),
        limit => {
            let limit = limit.map_or_else(|| "no limit".to_owned(), |limit| format!("at most {limit}"));
            report.ok("open files", format!("{limit}, a rank may need {needed}"));
        }
    }
    let written = config.and_then(|path| std::fs::metadata(path).and_then(|file| file.modified()).ok());
    let ahead = written.and_then(|written| written.duration_since(SystemTime::now()).ok());
    if let Some(ahead) = ahead.filter(|ahead| *ahead > CLOCK_MAX) {
        let seconds = ahead.as_secs();
        report.note(
            "clock",
            format!("the configuration was written {seconds} s in the future of this machine"),
        );
    }
}

/// Checks the devices that the ranks on this machine compute on; returns the memory per device, in bytes.
pub(super) fn check_gpus(report: &mut Findings, launch: &Launch, setup: &Setup) -> Option<u64> {
    let ComputeDevice::Cuda(ordinal) = setup.config.parallel.compute_device else {
        report.skipped(GPUS, "ranks compute on CPUs");
        return None;
    };
    let ranks = launch.ranks_of_machine(setup.job.world_size()).len();
    check_devices(report, ordinal, ranks)
}

#[cfg(not(feature = "cuda"))]
fn check_devices(report: &mut Findings, _ordinal: Option<u32>, _ranks: usize) -> Option<u64> {
    report.failed(GPUS, crate::run::compute_device::unsupported());
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
    let devices = Cuda::count(&search).map_err(|error| report.failed(GPUS, failed(error))).ok()?;
    let device = Cuda::builder(ordinal.unwrap_or(0)).kernel_cache(None).build();
    let properties = device.map_err(|error| report.failed(GPUS, failed(error))).ok()?.properties();
    let (name, (major, minor)) = (properties.name, properties.driver_version);
    let finding = format!("{devices} for {ranks} ranks, `{name}`, driver of CUDA {major}.{minor}");
    let devices_used = if ordinal.is_some() { 1 } else { devices as usize };
    if ranks > devices_used {
        report.note(GPUS, format!("{finding}; ranks share devices"));
    } else {
        report.ok(GPUS, finding);
    }
    Some(properties.total_bytes)
}

/// Checks NCCL, and that each rank on this machine has a separate device.
///
/// - `ranks`: number of ranks on this machine
pub(super) fn check_nccl(report: &mut Findings, config: &RunConfig, ranks: usize) {
    match (config.parallel.transport, config.parallel.compute_device) {
        (TransportName::Tcp, _) => report.skipped(NCCL, "ranks exchange messages over TCP"),
        (_, ComputeDevice::Cpu) => report.skipped(NCCL, "ranks compute on CPUs"),
        (_, ComputeDevice::Cuda(ordinal)) => check_library(report, ordinal, ranks),
    }
}

#[cfg(not(feature = "cuda"))]
fn check_library(report: &mut Findings, _ordinal: Option<u32>, _ranks: usize) {
    report.skipped(NCCL, "this build has no CUDA devices");
}

#[cfg(feature = "cuda")]
fn check_library(report: &mut Findings, ordinal: Option<u32>, ranks: usize) {
    use crate::Error;
    use dflop_cuda::{Cuda, Nccl, NcclVersion, SearchPath};

    let failed = |error: dflop_cuda::Error| Error::Start(error.to_string());
    let search = SearchPath::from_environment();
    // NCCL needs the driver, which this opens
    let Ok(devices) = Cuda::count(&search) else { return report.skipped(NCCL, "there is no device") };
    let nccl = match Nccl::open(&search) {
        Ok(nccl) => nccl,
        Err(error) => return report.failed(NCCL, failed(error)),
    };
    let finding = format!("version {}, `{}`", nccl.version(), nccl.file().display());
    let devices = if ordinal.is_some() { 1 } else { devices as usize };
    if ranks > devices && nccl.version() < NcclVersion::SHARED_DEVICE {
        let problem = format!("{finding}, does not let {ranks} ranks share {devices} devices");
        let remedy = "start one rank for each device, or use NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1";
        return report.wrong(NCCL, problem, remedy);
    }
    report.ok(NCCL, finding);
}
