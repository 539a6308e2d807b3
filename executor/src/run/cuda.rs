//! Opens CUDA devices, in builds that have them.

#[cfg(feature = "cuda")]
use std::sync::Arc;

#[cfg(feature = "cuda")]
use dflop_cuda::{AttentionEngines, Cuda, NcclComm, SearchPath};

#[cfg(feature = "cuda")]
use super::compute_device::AttentionName;
use super::compute_device::TransportName;
use crate::Error;
#[cfg(feature = "cuda")]
use crate::Result;
#[cfg(feature = "cuda")]
use crate::comm::{Comm, StepContext};
#[cfg(feature = "cuda")]
use crate::device::{DeviceComm, Dtype, Staged};

/// Opens a CUDA device.
///
/// - `ordinal`: device number; `None` for the device at the rank's position on the machine
/// - `local_rank`: rank number on the machine
/// - `memory_bytes`: maximum allocation
///
/// # Errors
/// [`Error::Start`] if the libraries of CUDA are missing or the device cannot be used.
#[cfg(feature = "cuda")]
pub fn open(
    ordinal: Option<u32>,
    local_rank: usize,
    storage: Dtype,
    memory_bytes: Option<u64>,
    attention: AttentionName,
) -> Result<Cuda> {
    let failed = |error: dflop_cuda::Error| Error::Start(error.to_string());
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

/// Creates the device communicator, together with the other ranks.
#[cfg(feature = "cuda")]
pub(super) fn connect(
    device: &Cuda,
    comm: Arc<dyn Comm>,
    transport: TransportName,
) -> Result<Arc<dyn DeviceComm<Cuda>>> {
    let connected: crate::device::Result<Arc<dyn DeviceComm<Cuda>>> = match transport {
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

/// Returns the missing environment variables that a rank needs, with values.
pub fn missing_variables(transport: TransportName) -> impl Iterator<Item = (&'static str, &'static str)> {
    #[cfg(feature = "cuda")]
    let needed: &[(&str, &str)] = &dflop_cuda::NCCL_VARIABLES;
    #[cfg(not(feature = "cuda"))]
    let needed: &[(&str, &str)] = &[];
    let is_over_nccl = transport == TransportName::Nccl;
    needed.iter().copied().filter(move |(name, _)| is_over_nccl && std::env::var_os(name).is_none())
}

/// Returns the error for a build without CUDA devices.
#[cfg(not(feature = "cuda"))]
#[must_use]
pub fn unsupported() -> Error {
    Error::Config("this build has no CUDA devices; build with `--features cuda`".to_owned())
}
