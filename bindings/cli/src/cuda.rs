//! Opens CUDA devices, in builds that have them.

#[cfg(feature = "cuda")]
use dflop_cuda::{AttentionEngines, Cuda};
#[cfg(feature = "cuda")]
use dflop_executor::device::Dtype;

#[cfg(feature = "cuda")]
use crate::args::compute_device::AttentionName;
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
        None => {
            local_rank as u32 % Cuda::count(&dflop_cuda::SearchPath::from_environment()).map_err(failed)?
        }
    };
    let builder = Cuda::builder(ordinal).storage(storage);
    let builder = memory_bytes.into_iter().fold(builder, dflop_cuda::CudaBuilder::memory_limit);
    let engines = match attention {
        AttentionName::Own => AttentionEngines::Own,
        AttentionName::Fastest => AttentionEngines::Fastest,
    };
    builder.attention(engines).build().map_err(failed)
}

/// Refuses a CUDA device.
#[cfg(not(feature = "cuda"))]
pub(crate) fn refuse() -> Failure {
    Failure::Misuse("this build has no CUDA devices; build with `--features cuda`".to_owned())
}
