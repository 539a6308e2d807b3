//! Message headers, and the keys for queues that messages wait in.

use super::payload::{Buffer, PayloadShape};
use crate::error::StepContext;
use std::fmt;

/// Operation that a message belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Point,
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Barrier,
    Split,
    Digest,
    Gather,
}

impl Op {
    const ALL: [Self; 9] = [
        Self::Point,
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::Barrier,
        Self::Split,
        Self::Digest,
        Self::Gather,
    ];

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    fn name(self) -> &'static str {
        match self {
            Self::Point => "message",
            Self::AllReduce => "all-reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllGather => "all-gather",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::Split => "split",
            Self::Digest => "comparison of digests",
            Self::Gather => "gather",
        }
    }
}

/// Properties on which sender and receiver must agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// Communicator.
    pub(crate) comm: u64,
    /// Operation.
    pub(crate) op: Op,
    /// Caller tag; for collectives, the collective number.
    pub(crate) tag: u64,
    /// Action of the sender.
    pub(crate) at: StepContext,
    /// Type, rows and columns.
    pub(crate) shape: PayloadShape,
}

impl Header {
    /// Returns whether a receiver that expects `self` may accept a message with the header `found`.
    pub(crate) fn admits(&self, found: &Self) -> bool {
        let place = |header: &Self| (header.op, header.at.step, header.at.microbatch, header.shape);
        place(self) == place(found)
    }

    /// Returns the queue key for messages with this header. Collectives are separate from caller tags.
    pub(crate) fn key(&self, from: usize) -> Key {
        Key { comm: self.comm, from, is_collective: self.op != Op::Point, tag: self.tag }
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} of {} at {}", self.op.name(), self.tag, self.shape, self.at)
    }
}

/// Identifies a first-in, first-out message queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    comm: u64,
    from: usize,
    is_collective: bool,
    tag: u64,
}

/// Message that has arrived or is about to be sent.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Header,
    pub(crate) buffer: Buffer,
}
