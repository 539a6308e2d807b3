//! Opens CUDA devices, in builds that have them.

#[cfg(feature = "cuda")]
use std::sync::Arc;

#[cfg(feature = "cuda")]
use dflop_cuda::{AttentionEngines, Cuda, NcclComm, SearchPath};
#[cfg(feature = "cuda")]
use dflop_executor::comm::{Comm, StepContext};
#[cfg(feature = "cuda")]
use dflop_executor::device::{DeviceComm, Dtype, Staged};

#[cfg(feature = "cuda")]
use crate::args::compute_device::AttentionName;
use crate::args::compute_device::TransportName;
use crate::failure::Failure;

/// Opens the device of this number, or, without one, that of a rank among those of its machine.
#[cfg(feature = "cuda")]
pub(crate) fn open(
    ordinal: Option<u32>,
    local_rank: usize,
    storage: Dtype,
    memory_bytes: Option<u64>,
    attention: AttentionName,
) -> Result<Cuda, Failure> {
    let failed = |error: dflop_cuda::Error| Failure::Failed(error.to_string());
    let ordinal = match ordinal {
        Some(ordinal) => ordinal,
        None => local_rank as u32 % Cuda::count(&SearchPath::from_environment()).map_err(failed)?,
    };
    let builder = Cuda::builder(ordinal).storage(storage);
    let builder = memory_bytes.into_iter().fold(builder, dflop_cuda::CudaBuilder::memory_limit);
    let engines = match attention {
        AttentionName::Own => AttentionEngines::Own,
        AttentionName::Fastest => AttentionEngines::Fastest,
    };
    builder.attention(engines).build().map_err(failed)
}

/// Makes the communicator of a device with those of the other ranks.
#[cfg(feature = "cuda")]
pub(crate) fn connect(
    device: &Cuda,
    comm: Arc<dyn Comm>,
    transport: TransportName,
) -> Result<Arc<dyn DeviceComm<Cuda>>, Failure> {
    let connected: dflop_executor::device::Result<Arc<dyn DeviceComm<Cuda>>> = match transport {
        TransportName::Tcp => Ok(Arc::new(Staged::new(device.clone(), comm))),
        TransportName::Nccl => {
            let joined = NcclComm::join(device, Arc::clone(&comm), &SearchPath::from_environment());
            joined.map(|comm| Arc::new(comm) as Arc<dyn DeviceComm<Cuda>>).inspect_err(|error| {
                // the caller gets the error itself; the message is for the other ranks, which wait for this
                // one
                drop(comm.abort(StepContext::step(0, "connect devices"), &error.to_string()));
            })
        }
    };
    Ok(connected?)
}

/// Returns the variables that a rank needs in its environment and lacks, with their values.
pub(crate) fn missing_variables(
    transport: TransportName,
) -> impl Iterator<Item = (&'static str, &'static str)> {
    #[cfg(feature = "cuda")]
    let needed: &[(&str, &str)] = &dflop_cuda::NCCL_VARIABLES;
    #[cfg(not(feature = "cuda"))]
    let needed: &[(&str, &str)] = &[];
    let is_over_nccl = transport == TransportName::Nccl;
    needed.iter().copied().filter(move |(name, _)| is_over_nccl && std::env::var_os(name).is_none())
}

/// Refuses a CUDA device.
#[cfg(not(feature = "cuda"))]
pub(crate) fn refuse() -> Failure {
    Failure::Misuse("this build has no CUDA devices; build with `--features cuda`".to_owned())
}
