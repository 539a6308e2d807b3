//! What a message says about itself, and where it is queued.

use super::payload::{Buffer, PayloadShape};
use super::step_context::StepContext;
use std::fmt;

/// Which operation a message belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    Point,
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Barrier,
    Split,
}

impl Op {
    const ALL: [Self; 7] = [
        Self::Point,
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::Barrier,
        Self::Split,
    ];

    pub(super) fn from_code(code: u8) -> Option<Self> {
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
        }
    }
}

/// What sender and receiver have to agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// Communicator.
    pub(super) comm: u64,
    /// Operation.
    pub(super) op: Op,
    /// The caller's tag; the number of the collective, for collectives.
    pub(super) tag: u64,
    /// Where the sender was.
    pub(super) at: StepContext,
    /// Type, rows and columns.
    pub(super) shape: PayloadShape,
}

impl Header {
    /// Whether a receiver that expects `self` may take a message with the header `found`.
    pub(super) fn admits(&self, found: &Self) -> bool {
        let place = |header: &Self| (header.op, header.at.step, header.at.microbatch, header.shape);
        place(self) == place(found)
    }

    /// Where messages with this header wait. Collectives are apart from the caller's tags.
    pub(super) fn key(&self, from: usize) -> Key {
        Key { comm: self.comm, from, is_collective: self.op != Op::Point, tag: self.tag }
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} of {} at {}", self.op.name(), self.tag, self.shape, self.at)
    }
}

/// A queue of messages, first in, first out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    comm: u64,
    from: usize,
    is_collective: bool,
    tag: u64,
}

/// A message that arrived, or is about to leave.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) header: Header,
    pub(super) buffer: Buffer,
}
