//! Communicator operations in dedicated lanes.

use std::sync::Arc;

use dflop_comm::StepContext;
use dflop_device::{Lane, Result, Runtime, Span, Tensor, Transfer};

use super::communicator::Communicator;
use super::session::{Operation, Session};
use crate::device::Cuda;
use crate::driver::{CudaEvent, Event, Gate, Stream};

/// An operation to queue.
pub(super) struct Queued<'a> {
    pub(super) lane: u64,
    pub(super) communicator: &'a Arc<Communicator>,
    pub(super) at: StepContext,
    /// What it does, for errors.
    pub(super) what: String,
    /// Rank in the job that it waits for.
    pub(super) peer: usize,
    /// Points behind which it starts.
    pub(super) after: &'a CudaEvent,
    pub(super) also_after: Option<Event>,
    pub(super) tensor: Tensor<Cuda>,
    /// Whether the waiting lane gets the tensor back.
    pub(super) is_returned: bool,
}

/// Queued operation, which owns the tensor.
struct Held {
    session: Arc<Session>,
    gate: Arc<Gate>,
    operation: Arc<Operation>,
    /// Shared with the lane's thread until it has issued the operation.
    tensor: Option<Arc<Tensor<Cuda>>>,
    is_returned: bool,
}

impl Queued<'_> {
    /// Queues the operation; returns the transfer, and the gate that opens once it is issued.
    pub(super) fn start(
        self,
        session: &Arc<Session>,
        issue: impl FnOnce(&Communicator, &Stream, &Tensor<Cuda>) -> crate::error::Result<()> + Send + 'static,
    ) -> Result<(Transfer<Cuda>, Arc<Gate>)> {
        let Queued { lane, at, what, peer, also_after, is_returned, .. } = self;
        session.device.check()?;
        session.take_stream(lane)?;
        let tensor = Arc::new(self.tensor);
        let (after, communicator, operand) =
            (self.after.clone(), Arc::clone(self.communicator), Arc::clone(&tensor));
        let span = Span::default();
        let times = Span::clone(&span);
        let gate = session.device.queue(lane, move |_, stream| {
            stream.wait(&after.get()?)?;
            also_after.iter().try_for_each(|event| stream.wait(event))?;
            let start = stream.record()?;
            issue(&communicator, stream, &operand)?;
            let end = stream.record()?;
            times.set(CudaEvent::recorded(start), CudaEvent::recorded(end.clone()));
            Ok(end)
        })?;
        session.device.shared().loads.note_in_lane(&gate);
        let operation = session.watch(at, what, peer, Arc::clone(&gate));
        let held = Held {
            session: Arc::clone(session),
            gate: Arc::clone(&gate),
            operation,
            tensor: Some(tensor),
            is_returned,
        };
        Ok((Transfer::timed(span, move |lane| held.wait(lane)), gate))
    }
}

impl Held {
    fn wait(mut self, lane: Lane) -> Result<Option<Tensor<Cuda>>> {
        // on the calling thread, because the lane's thread issues operations in their order
        let issued = self.gate.wait();
        let device = self.session.device.clone();
        device.check()?;
        let event = issued.map_err(|error| self.session.call_failed(self.operation.at, &error))?;
        let compute = &device.shared().compute;
        if lane == Lane::Compute {
            self.operation.await_from(compute.record()?);
        } else if !self.is_returned {
            // memory is freed in the order of the compute lane
            compute.wait(&event)?;
        }
        device.after(lane, &CudaEvent::recorded(event))?;
        // the lane's thread has let go of the tensor: the gate was opened after it
        let tensor = self.tensor.take().and_then(Arc::into_inner);
        Ok(tensor.filter(|_| self.is_returned))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // memory is freed in the order of the compute lane, so that one comes behind an operation that nobody
        // has waited for
        if self.tensor.is_some()
            && let Some(event) = self.gate.opened()
        {
            let _ = self.session.device.shared().compute.wait(&event);
        }
    }
}
