//! Trait of communicators of tensors.

use std::collections::BTreeSet;
use std::sync::Arc;

use dflop_comm::{Comm, StepContext};

use crate::dtype::Dtype;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor, Transfer};

/// Type and shape of rows that are received; both sides know them from the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowShape {
    /// Type of the elements.
    pub dtype: Dtype,
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
}

/// Messages that keep their order: those from one rank to another in one direction of the pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MessageLane {
    /// Sending rank.
    pub from: usize,
    /// Receiving rank.
    pub to: usize,
    /// Direction of flow: the lowest bit of the tags of the messages.
    pub flow: u64,
}

impl MessageLane {
    /// Returns the lane of a message with this tag.
    #[must_use]
    pub const fn of(from: usize, to: usize, tag: u64) -> Self {
        Self { from, to, flow: tag & 1 }
    }
}

/// One rank's end of a communicator of tensors.
///
/// `after` is an event behind which the communication starts. A [`Transfer`] is the event behind which it
/// is done, and owns the tensor until then. Methods without a transfer keep the order of the compute lane.
/// Types, shapes and the order of calls follow the rules of [`Comm`]; so do results: sums have one order.
///
/// # Errors
/// [`crate::Error::Comm`] once the job has ended for any reason.
pub trait DeviceComm<D: Runtime>: Send + Sync {
    /// Communicator of the same ranks for the host: ranks, digests, figures, the end of a job.
    fn host(&self) -> &dyn Comm;

    /// Communicator of the same ranks for the host, to share.
    fn shared_host(&self) -> Arc<dyn Comm>;

    /// Makes one communicator per color, by the rules of [`Comm::split`].
    ///
    /// # Errors
    /// See the [trait documentation](DeviceComm).
    fn split(&self, at: StepContext, color: Option<u64>, key: u64) -> Result<Option<Arc<dyn DeviceComm<D>>>>;

    /// Returns whether messages are matched by their order in a [`MessageLane`] alone, without tags and
    /// shapes: ranks then compare the orders before they send.
    fn is_matched_by_order(&self) -> bool {
        false
    }

    /// Number of bytes that this rank has sent to other ranks, over all communicators of the job, those of
    /// the host not included if tensors take other means. Collectives count as if they went round a ring.
    fn bytes_sent(&self) -> u64 {
        self.host().bytes_sent()
    }

    /// Prepares lanes for messages; all ranks call it with the same lanes, before the first message of each.
    /// Lanes that are open already stay as they are.
    ///
    /// # Errors
    /// See the [trait documentation](DeviceComm).
    fn open_lanes(&self, at: StepContext, lanes: &BTreeSet<MessageLane>) -> Result<()> {
        let _ = (at, lanes);
        Ok(())
    }

    /// Returns the number of the lane that messages of an open [`MessageLane`] share with others, if they do.
    ///
    /// Sends and receives of a shared lane run one after the other, in the order of calls. Ranks call them in
    /// one order of all messages, or they wait for each other for ever.
    fn shared_lane(&self, lane: MessageLane) -> Option<u64> {
        let _ = lane;
        None
    }

    /// Sends rows in the type that they are stored in.
    ///
    /// # Errors
    /// See the [trait documentation](DeviceComm).
    fn send(
        &self,
        to: usize,
        tag: u64,
        at: StepContext,
        rows: Tensor<D>,
        cols: usize,
        after: &D::Event,
    ) -> Result<Transfer<D>>;

    /// Receives rows.
    ///
    /// # Errors
    /// See the [trait documentation](DeviceComm).
    fn recv(
        &self,
        from: usize,
        tag: u64,
        at: StepContext,
        shape: RowShape,
        after: &D::Event,
    ) -> Result<Transfer<D>>;

    /// Sums over all ranks, element by element. Numbers that are stored as bf16 are summed in `f32` and
    /// rounded once.
    ///
    /// # Errors
    /// See the [trait documentation](DeviceComm).
    fn all_reduce(&self, at: StepContext, values: &mut Tensor<D>) -> Result<()>;

    /// Starts to sum over all ranks while operations go on. The result has the bits of
    /// [`all_reduce`](Self::all_reduce).
    ///
    /// # Errors
    /// See the [trait documentation](DeviceComm).
    fn start_all_reduce(&self, at: StepContext, values: Tensor<D>, after: &D::Event) -> Result<Transfer<D>>;

    /// Sums like [`all_reduce`](Self::all_reduce), but leaves rank `r` with the sum of part `r` alone.
    ///
    /// # Errors
    /// See the [trait documentation](DeviceComm).
    fn reduce_scatter(&self, at: StepContext, values: &mut Tensor<D>, parts: &[usize]) -> Result<()>;

    /// Starts to sum like [`reduce_scatter`](Self::reduce_scatter) while operations go on; the result has its
    /// bits.
    ///
    /// # Errors
    /// See the [trait documentation](DeviceComm).
    fn start_reduce_scatter(
        &self,
        at: StepContext,
        values: Tensor<D>,
        parts: &[usize],
        after: &D::Event,
    ) -> Result<Transfer<D>>;

    /// Gives every rank the parts of all others; each rank contributes its own part, in place.
    ///
    /// # Errors
    /// See the [trait documentation](DeviceComm).
    fn all_gather(&self, at: StepContext, values: &mut Tensor<D>, parts: &[usize]) -> Result<()>;

    /// Starts [`all_gather`](Self::all_gather) while operations go on.
    ///
    /// # Errors
    /// See the [trait documentation](DeviceComm).
    fn start_all_gather(
        &self,
        at: StepContext,
        values: Tensor<D>,
        parts: &[usize],
        after: &D::Event,
    ) -> Result<Transfer<D>>;

    /// Starts the sends and receives of a closure as one, so that none of them waits for another.
    ///
    /// # Errors
    /// Those of the closure.
    fn group(&self, start: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        start()
    }
}
