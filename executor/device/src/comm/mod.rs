//! Communication of tensors between devices.
//!
//! Models and pipelines call [`DeviceComm`]. A device that can exchange memory itself implements it;
//! [`Staged`] implements it for every device over a [`dflop_comm::Comm`], through the host.

mod staged;

use crate::error::Result;
use crate::runtime::{Dtype, Runtime, Tensor, Transfer};
use dflop_comm::{Comm, StepContext};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

pub use staged::{Staged, reserve_lanes};

/// Type and shape of rows to receive; both ranks know them from the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowShape {
    /// Element type.
    pub dtype: Dtype,
    /// Number of rows.
    pub rows: usize,
    /// Number of elements in a row.
    pub cols: usize,
}

/// Messages that keep their order: all messages between the same sender and receiver in the same pipeline
/// direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MessageLane {
    /// Sending rank.
    pub from: usize,
    /// Receiving rank.
    pub to: usize,
    /// Flow direction: the lowest bit in the message tags.
    pub flow: u64,
}

impl MessageLane {
    /// Returns the lane for a message with this tag.
    #[must_use]
    pub const fn of(from: usize, to: usize, tag: u64) -> Self {
        Self { from, to, flow: tag & 1 }
    }
}

/// Rank endpoint in a tensor communicator.
///
/// Communication starts after the event `after`. A [`Transfer`] is the completion event, and owns the tensor
/// until then. Methods without a transfer keep compute lane order. Types, shapes, call order and results
/// follow the rules in [`Comm`]: sums have one order.
///
/// # Errors
/// [`crate::Error::Comm`] once the job has ended for any reason.
pub trait DeviceComm<D: Runtime>: Send + Sync {
    /// Returns a host communicator for the same ranks: ranks, digests, figures, job end.
    fn host(&self) -> &dyn Comm;

    /// Returns a shared host communicator for the same ranks.
    fn shared_host(&self) -> Arc<dyn Comm>;

    /// Creates a communicator per color, by the rules in [`Comm::split`].
    ///
    /// # Errors
    /// See the [trait documentation](DeviceComm).
    fn split(&self, at: StepContext, color: Option<u64>, key: u64) -> Result<Option<Arc<dyn DeviceComm<D>>>>;

    /// Returns whether messages are matched only by order in a [`MessageLane`], without tags and shapes:
    /// ranks then compare the orders before they send.
    fn is_matched_by_order(&self) -> bool {
        false
    }

    /// Returns the number of bytes that this rank has sent to other ranks, over all communicators in the job,
    /// without host communicators if tensors use a different transport. Collectives count as if they used a
    /// ring.
    fn bytes_sent(&self) -> u64 {
        self.host().bytes_sent()
    }

    /// Returns the time that this rank has taken so far to connect devices, over all communicators in the
    /// job. Default: zero, for tensors that go through the host.
    fn connect_time(&self) -> Duration {
        Duration::ZERO
    }

    /// Prepares lanes for messages; all ranks call it with the same lanes, before the first message in each
    /// lane. Lanes that are already open stay unchanged.
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

    /// Sends rows in the storage type.
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

    /// Sums over all ranks, element by element. Numbers stored as bf16 are summed in `f32` and rounded once.
    ///
    /// # Errors
    /// See the [trait documentation](DeviceComm).
    fn all_reduce(&self, at: StepContext, values: &mut Tensor<D>) -> Result<()>;

    /// Starts a sum over all ranks while operations continue. The result has the same bits as
    /// [`all_reduce`](Self::all_reduce).
    ///
    /// # Errors
    /// See the [trait documentation](DeviceComm).
    fn start_all_reduce(&self, at: StepContext, values: Tensor<D>, after: &D::Event) -> Result<Transfer<D>>;

    /// Sums like [`all_reduce`](Self::all_reduce), but leaves only part `r` of the sum on rank `r`.
    ///
    /// # Errors
    /// See the [trait documentation](DeviceComm).
    fn reduce_scatter(&self, at: StepContext, values: &mut Tensor<D>, parts: &[usize]) -> Result<()>;

    /// Starts a sum like [`reduce_scatter`](Self::reduce_scatter) while operations continue; the result has
    /// the same bits.
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

    /// Gathers the parts of all ranks on every rank; each rank contributes a part, in place.
    ///
    /// # Errors
    /// See the [trait documentation](DeviceComm).
    fn all_gather(&self, at: StepContext, values: &mut Tensor<D>, parts: &[usize]) -> Result<()>;

    /// Starts [`all_gather`](Self::all_gather) while operations continue.
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

    /// Starts the sends and receives in the closure together, so that none waits for another.
    ///
    /// # Errors
    /// Errors from the closure.
    fn group(&self, start: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        start()
    }
}
