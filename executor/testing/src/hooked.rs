//! Communicator that shows its calls to a test before it makes them.

use std::fmt;
use std::sync::Arc;

use dflop_comm::{Buffer, Comm, Error, Failure, Handle, Payload, PayloadShape, Result, Slice, StepContext};

/// A call of a communicator.
pub(crate) struct Call<'a> {
    /// Communicator that is called.
    pub(crate) comm: &'a dyn Comm,
    /// Whether it is a part of the one that was hooked.
    pub(crate) is_split: bool,
    pub(crate) at: StepContext,
    pub(crate) kind: CallKind,
}

/// What is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallKind {
    Send {
        to: usize,
        tag: u64,
        shape: PayloadShape,
    },
    Recv {
        from: usize,
        tag: u64,
        shape: PayloadShape,
    },
    /// Collective that runs while the caller computes, of a number of elements.
    Started(Collective, usize),
    /// Collective that the caller waits for.
    Waited(Collective),
}

/// Kind of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Collective {
    AllReduce,
    ReduceScatter,
    AllGather,
}

/// Communicator with a function that is called before each send, receive and collective of it and of its
/// splits.
#[derive(Clone)]
pub(crate) struct Hooked {
    inner: Arc<dyn Comm>,
    before: Arc<dyn Fn(&Call<'_>) + Send + Sync>,
    is_split: bool,
}

impl Hooked {
    pub(crate) fn new(
        inner: impl Comm + 'static,
        before: impl Fn(&Call<'_>) + Send + Sync + 'static,
    ) -> Self {
        Self { inner: Arc::new(inner), before: Arc::new(before), is_split: false }
    }

    fn show(&self, at: StepContext, kind: CallKind) -> &dyn Comm {
        (self.before)(&Call { comm: &*self.inner, is_split: self.is_split, at, kind });
        &*self.inner
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Hooked({:?})", self.inner)
    }
}

impl Comm for Hooked {
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
        let shape = payload.shape();
        self.show(at, CallKind::Send { to, tag, shape }).start_send(to, tag, at, payload)
    }
    fn start_recv(
        &self,
        from: usize,
        tag: u64,
        at: StepContext,
        shape: PayloadShape,
    ) -> Result<Handle<Payload>> {
        self.show(at, CallKind::Recv { from, tag, shape }).start_recv(from, tag, at, shape)
    }
    fn start_all_reduce(&self, at: StepContext, buffer: Buffer) -> Result<Handle<Buffer>> {
        let kind = CallKind::Started(Collective::AllReduce, buffer.elements());
        self.show(at, kind).start_all_reduce(at, buffer)
    }
    fn start_reduce_scatter(
        &self,
        at: StepContext,
        buffer: Buffer,
        parts: &[usize],
    ) -> Result<Handle<Buffer>> {
        let kind = CallKind::Started(Collective::ReduceScatter, buffer.elements());
        self.show(at, kind).start_reduce_scatter(at, buffer, parts)
    }
    fn start_all_gather(&self, at: StepContext, buffer: Buffer, parts: &[usize]) -> Result<Handle<Buffer>> {
        let kind = CallKind::Started(Collective::AllGather, buffer.elements());
        self.show(at, kind).start_all_gather(at, buffer, parts)
    }
    fn all_reduce(&self, at: StepContext, values: Slice<'_>) -> Result<()> {
        self.show(at, CallKind::Waited(Collective::AllReduce)).all_reduce(at, values)
    }
    fn reduce_scatter(&self, at: StepContext, values: Slice<'_>, parts: &[usize]) -> Result<()> {
        self.show(at, CallKind::Waited(Collective::ReduceScatter)).reduce_scatter(at, values, parts)
    }
    fn all_gather(&self, at: StepContext, values: Slice<'_>, parts: &[usize]) -> Result<()> {
        self.show(at, CallKind::Waited(Collective::AllGather)).all_gather(at, values, parts)
    }
    fn broadcast(&self, at: StepContext, root: usize, values: Slice<'_>) -> Result<()> {
        self.inner.broadcast(at, root, values)
    }
    fn barrier(&self, at: StepContext) -> Result<()> {
        self.inner.barrier(at)
    }
    fn split(&self, at: StepContext, color: Option<u64>, key: u64) -> Result<Option<Box<dyn Comm>>> {
        let part = self.inner.split(at, color, key)?;
        Ok(part.map(|part| {
            let before = Arc::clone(&self.before);
            Box::new(Self { inner: part.into(), before, is_split: true }) as Box<dyn Comm>
        }))
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
