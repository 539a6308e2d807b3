//! Device that computes: this machine's CPU or a CUDA device.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttentionName {
    /// Executor kernels only: the same bits in every run.
    #[default]
    Own,
    /// The faster engine by measured time: the executor's kernels or cuDNN.
    Fastest,
}

/// Transport for tensors between ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransportName {
    /// Through the host: between threads in memory, between processes over TCP.
    #[default]
    Tcp,
    /// Between CUDA devices, over NCCL.
    Nccl,
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
