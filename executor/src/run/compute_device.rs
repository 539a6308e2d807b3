//! Device that computes: this machine's CPU or a CUDA device.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Device that stages compute on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "String", into = "&'static str")]
pub enum ComputeDevice {
    /// Threads of this machine.
    #[default]
    Cpu,
    /// CUDA device of this number; `None` for that of the rank among those of its machine.
    Cuda(Option<u32>),
}

/// Engines of attention on a CUDA device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttentionName {
    /// Kernels of the executor alone: the same bits in every run.
    #[default]
    Own,
    /// The faster one of these kernels and cuDNN, by measured time.
    Fastest,
}

/// Means by which tensors go from one rank to another.
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
    /// Returns the kind of the device, which is the same on all ranks of a job.
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
