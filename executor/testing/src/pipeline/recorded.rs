//! Communicator that records collectives in progress, in start order.

use std::sync::{Arc, Mutex};

use dflop_comm::{Buffer, Comm, Error, Failure, Handle, Payload, PayloadShape, Result, Slice, StepContext};

/// Kind of a collective that runs while the caller computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Started {
    AllReduce,
    ReduceScatter,
    AllGather,
}

/// Collective in a rank group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Communicator, by world ranks.
    pub(crate) group: Vec<usize>,
    pub(crate) kind: Started,
    pub(crate) step: u64,
    pub(crate) elements: usize,
}

/// Collectives that a rank has started, over all communicators.
pub(crate) type Log = Arc<Mutex<Vec<Entry>>>;

/// Communicator that records collectives, also in splits.
#[derive(Debug)]
pub(crate) struct Recorded {
    inner: Box<dyn Comm>,
    log: Log,
}

impl Recorded {
    pub(crate) fn new(inner: Box<dyn Comm>, log: Log) -> Self {
        Self { inner, log }
    }

    fn record(&self, kind: Started, at: StepContext, elements: usize) {
        let group = (0..self.inner.size()).map(|rank| self.inner.world_rank(rank)).collect();
        self.log.lock().unwrap().push(Entry { group, kind, step: at.step, elements });
    }
}

impl Comm for Recorded {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn world_rank(&self, rank: usize) -> usize {
        self.inner.world_rank(rank)
    }
    fn start_send(&self, to: usize, tag: u64, at: StepContext, payload: Payload) -> Result<Handle<()>> {
        self.inner.start_send(to, tag, at, payload)
    }
    fn start_recv(
        &self,
        from: usize,
        tag: u64,
        at: StepContext,
        shape: PayloadShape,
    ) -> Result<Handle<Payload>> {
        self.inner.start_recv(from, tag, at, shape)
    }
    fn start_all_reduce(&self, at: StepContext, buffer: Buffer) -> Result<Handle<Buffer>> {
        self.record(Started::AllReduce, at, buffer.elements());
        self.inner.start_all_reduce(at, buffer)
    }
    fn start_reduce_scatter(
        &self,
        at: StepContext,
        buffer: Buffer,
        parts: &[usize],
    ) -> Result<Handle<Buffer>> {
        self.record(Started::ReduceScatter, at, buffer.elements());
        self.inner.start_reduce_scatter(at, buffer, parts)
    }
    fn start_all_gather(&self, at: StepContext, buffer: Buffer, parts: &[usize]) -> Result<Handle<Buffer>> {
        self.record(Started::AllGather, at, buffer.elements());
        self.inner.start_all_gather(at, buffer, parts)
    }
    fn all_reduce(&self, at: StepContext, values: Slice<'_>) -> Result<()> {
        self.inner.all_reduce(at, values)
    }
    fn reduce_scatter(&self, at: StepContext, values: Slice<'_>, parts: &[usize]) -> Result<()> {
        self.inner.reduce_scatter(at, values, parts)
    }
    fn all_gather(&self, at: StepContext, values: Slice<'_>, parts: &[usize]) -> Result<()> {
        self.inner.all_gather(at, values, parts)
    }
    fn broadcast(&self, at: StepContext, root: usize, values: Slice<'_>) -> Result<()> {
        self.inner.broadcast(at, root, values)
    }
    fn barrier(&self, at: StepContext) -> Result<()> {
        self.inner.barrier(at)
    }
    fn split(&self, at: StepContext, color: Option<u64>, key: u64) -> Result<Option<Box<dyn Comm>>> {
        let part = self.inner.split(at, color, key)?;
        Ok(part.map(|part| Box::new(Self::new(part, Arc::clone(&self.log))) as Box<dyn Comm>))
    }
    fn bytes_sent(&self) -> u64 {
        self.inner.bytes_sent()
    }
    fn note(&self, at: StepContext) {
        self.inner.note(at);
    }
    fn abort(&self, at: StepContext, reason: &str) -> Error {
        self.inner.abort(at, reason)
    }
    fn fail(&self, failure: Failure) -> Error {
        self.inner.fail(failure)
    }
}
