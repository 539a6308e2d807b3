//! Collectives built from sends and receives, each with a fixed summation order.

mod barrier;
mod broadcast;
mod ring;
mod tree;

pub(super) use barrier::barrier;
pub(super) use broadcast::broadcast;
pub(super) use ring::{all_gather, all_reduce, reduce_scatter};
pub(crate) use tree::NUMBERS_MAX;
pub(super) use tree::gather;

use super::group::Group;
use crate::dtype::Dtype;
use crate::endpoint::PendingSend;
use crate::error::{Result, StepContext};
use crate::message::{Buffer, Header, Op, PayloadShape};

/// One collective: all ranks use the same number, and receivers check the rest.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    pub(super) op: Op,
    pub(super) number: u64,
    pub(super) at: StepContext,
    /// Whether the collective runs while the caller computes.
    pub(super) is_overlapped: bool,
}

impl Call {
    fn header(&self, group: &Group, dtype: Dtype, elements: usize) -> Header {
        let shape = PayloadShape::flat(dtype, elements);
        Header { comm: group.id, op: self.op, tag: self.number, at: self.at, shape }
    }

    fn start_send(&self, group: &Group, to: usize, buffer: Buffer) -> Result<PendingSend> {
        let header = self.header(group, buffer.dtype(), buffer.elements());
        group.endpoint.start_send(group.members[to], header, buffer, self.is_overlapped)
    }

    /// Sends a few numbers to a neighbor in the job tree.
    fn send_control(&self, group: &Group, to: usize, buffer: Buffer) -> Result<()> {
        let header = self.header(group, buffer.dtype(), buffer.elements());
        group.endpoint.send_control(group.members[to], header, buffer)
    }

    fn recv(&self, group: &Group, from: usize, dtype: Dtype, elements: usize) -> Result<Buffer> {
        group.endpoint.recv(group.members[from], self.header(group, dtype, elements), self.is_overlapped)
    }
}
