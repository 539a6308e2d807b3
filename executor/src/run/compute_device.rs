//! Device that computes: this machine's CPU or a CUDA device.
//!
//! Opens CUDA devices, in builds that have them.

use crate::Error;
#[cfg(feature = "cuda")]
use crate::Result;
#[cfg(feature = "cuda")]
use crate::comm::{Comm, StepContext};
#[cfg(feature = "cuda")]
use crate::device::{DeviceComm, Dtype, Staged};
#[cfg(feature = "cuda")]
use dflop_cuda::{AttentionEngines, Cuda, NcclComm, SearchPath};
use dflop_loader::settings::choice_for;
use serde::{Deserialize, Deserializer, Serialize};
use std::str::FromStr;
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// Device that stages compute on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "&'static str")]
pub enum ComputeDevice {
    /// Threads on this machine.
    #[default]
    Cpu,
    /// CUDA device with this number; `None` for the device at the rank's position on the machine.
    Cuda(Option<u32>),
}

/// Attention engines on a CUDA device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum AttentionName {
    /// Executor kernels only, with the same bits in every run.
    #[default]
    Own,
    /// The faster engine for each shape by measured time, executor kernels or cuDNN.
    Fastest,
}

impl<'de> Deserialize<'de> for AttentionName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        choice_for("attention", deserializer, &[("own", Self::Own), ("fastest", Self::Fastest)])
    }
}

/// Transport for tensors between ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum TransportName {
    /// Through host memory, between processes over TCP.
    #[default]
    Tcp,
    /// Between CUDA devices, over NCCL.
    Nccl,
}

impl<'de> Deserialize<'de> for TransportName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        choice_for("transport", deserializer, &[("tcp", Self::Tcp), ("nccl", Self::Nccl)])
    }
}

impl FromStr for ComputeDevice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name.split_once(':') {
            None if name == "cpu" => Ok(Self::Cpu),
            None if name == "cuda" => Ok(Self::Cuda(None)),
            Some(("cuda", ordinal)) if ordinal.parse::<u32>().is_ok() => Ok(Self::Cuda(ordinal.parse().ok())),
            _ => Err(format!("expected `cpu`, `cuda` or `cuda:N`, found `{name}`")),
        }
    }
}

impl From<ComputeDevice> for &'static str {
    /// Returns the device kind, which is the same on all ranks in a job.
    fn from(device: ComputeDevice) -> Self {
        match device {
            ComputeDevice::Cpu => "cpu",
            ComputeDevice::Cuda(_) => "cuda",
        }
    }
}

impl TryFrom<String> for ComputeDevice {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        name.parse()
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read() {
        let parse = |name: &str| name.parse::<ComputeDevice>();
        assert_eq!(parse("cpu"), Ok(ComputeDevice::Cpu));
        assert_eq!(parse("cuda"), Ok(ComputeDevice::Cuda(None)));
        assert_eq!(parse("cuda:3"), Ok(ComputeDevice::Cuda(Some(3))));
        for bad in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "CUDA"] {
            assert!(parse(bad).unwrap_err().contains("expected `cpu`, `cuda` or `cuda:N`"), "{bad}");
        }
    }
}
