//! Collectives, and the calls that run them.

use dflop_device::{Result, Tensor};

use super::communicator::Communicator;
use crate::device::Cuda;
use crate::driver::Stream;

/// Collective kind, with the rank parts.
pub(super) enum Collective {
    AllReduce,
    ReduceScatter(Vec<usize>),
    AllGather(Vec<usize>),
}

impl Collective {
    /// Checks the rank parts.
    pub(super) fn check(&self, size: usize, values: &Tensor<Cuda>) -> Result<()> {
        let parts = match self {
            Self::AllReduce => return Ok(()),
            Self::ReduceScatter(parts) | Self::AllGather(parts) => parts,
        };
        let (sum, elements) = (parts.iter().sum::<usize>(), values.len());
        if parts.len() == size && sum == elements {
            return Ok(());
        }
        Err(dflop_comm::Error::Parts { parts: parts.len(), sum, size, elements }.into())
    }

    pub(super) fn issue(
        &self,
        group: &Communicator,
        stream: &Stream,
        values: &Tensor<Cuda>,
    ) -> crate::Result<()> {
        match self {
            Self::AllReduce => group.all_reduce(stream, values),
            Self::ReduceScatter(parts) => group.reduce_scatter(stream, values, parts),
            Self::AllGather(parts) => group.all_gather(stream, values, parts),
        }
    }

    /// Returns how many times an element is passed around a ring.
    pub(super) const fn rounds(&self) -> u64 {
        match self {
            Self::AllReduce => 2,
            Self::ReduceScatter(_) | Self::AllGather(_) => 1,
        }
    }

    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::ReduceScatter(_) => "reduce-scatter",
            Self::AllGather(_) => "all-gather",
        }
    }
}
