//! Communicator for transports that move host memory, threads and TCP, with its collectives.
//!
//! Runs collectives on a communicator thread, while the caller computes.

mod collective;

use super::api::{Comm, Completion, Handle, WaitRecord, compare_digests};
use super::endpoint::Endpoint;
use super::error::{Cause, Error, Failure, Result, StepContext};
use super::message::{Buffer, Header, Op, Payload, PayloadShape, Slice, even_parts, ranges};
use super::sync::{AtomicU64, Mutex, Ordering, Receiver, RecvError, Sender, TryRecvError, channel, thread};
use collective::Group;
use dflop_costmodel::random::mix64;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

pub(crate) use collective::NUMBERS_MAX;

/// Communicator id for all ranks in a job.
const WORLD: u64 = 0;

/// Job ranks that exchange messages: the complete job, or a [split](Comm::split).
#[derive(Debug)]
pub struct Communicator {
    group: Arc<Group>,
    collectives: AtomicU64,
    collective_thread: CollectiveThread,
}

impl Communicator {
    /// Creates the communicator with all ranks in a job.
    pub(super) fn world(endpoint: Arc<Endpoint>) -> Self {
        let (rank, members) = (endpoint.rank, (0..endpoint.size).collect());
        Self::new(Group { endpoint, id: WORLD, rank, members })
    }

    fn new(group: Group) -> Self {
        Self {
            group: Arc::new(group),
            collectives: AtomicU64::new(0),
            collective_thread: CollectiveThread::default(),
        }
    }

    /// Numbers a collective. Ranks start the same collectives in the same order, so numbers agree.
    fn begin(&self, op: Op, at: StepContext) -> collective::Call {
        let number = self.collectives.fetch_add(1, Ordering::Relaxed);
        collective::Call { op, number, at, is_overlapped: false }
    }

    /// Numbers a collective and runs it on the communicator thread.
    fn start_collective(
        &self,
        op: Op,
        at: StepContext,
        mut buffer: Buffer,
        run: impl FnOnce(&Group, collective::Call, &mut Slice<'_>) -> Result<()> + Send + 'static,
    ) -> Result<Handle<Buffer>> {
        let call = collective::Call { is_overlapped: true, ..self.begin(op, at) };
        let group = self.group.clone();
        let collective = move || run(&group, call, &mut Slice::from(&mut buffer)).map(|()| buffer);
        self.collective_thread.start(&self.group, at, collective)
    }

    /// Returns whether the communicator has all ranks in the job, in order.
    fn is_world(&self) -> bool {
        self.group.id == WORLD
    }

    /// Returns a few numbers from every rank, in rank order.
    fn gather_chunk(&self, call: collective::Call, own: &[u64]) -> Result<Vec<u64>> {
        if self.is_world() {
            return collective::gather(&self.group, call, own);
        }
        let mut all = vec![0_u64; own.len() * self.size()];
        all[own.len() * self.rank()..][..own.len()].copy_from_slice(own);
        let parts = ranges(&even_parts(all.len(), self.size()), self.size(), all.len())?;
        collective::all_gather(&self.group, call, &mut all.as_mut_slice().into(), &parts)?;
        Ok(all)
    }

    fn header(&self, tag: u64, at: StepContext, shape: PayloadShape) -> Header {
        Header { comm: self.group.id, op: Op::Point, tag, at, shape }
    }
}

impl Comm for Communicator {
    fn rank(&self) -> usize {
        self.group.rank
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn world_rank(&self, rank: usize) -> usize {
        self.group.members[rank]
    }

    fn start_send(&self, to: usize, tag: u64, at: StepContext, payload: Payload) -> Result<Handle<()>> {
        let header = self.header(tag, at, payload.shape());
        let (to, buffer) = (self.group.member(to)?, payload.into_buffer());
        let sending = self.group.endpoint.start_send(to, header, buffer, false)?;
        Ok(sending.into())
    }

    fn start_recv(
        &self,
        from: usize,
        tag: u64,
        at: StepContext,
        shape: PayloadShape,
    ) -> Result<Handle<Payload>> {
        let header = self.header(tag, at, shape);
        Ok(Handle::new(self.group.endpoint.start_recv(self.group.member(from)?, header, false)))
    }

    fn start_all_reduce(&self, at: StepContext, buffer: Buffer) -> Result<Handle<Buffer>> {
        self.start_collective(Op::AllReduce, at, buffer, |group, call, values| {
            collective::all_reduce(group, call, values)
        })
    }

    fn start_reduce_scatter(
        &self,
        at: StepContext,
        buffer: Buffer,
        parts: &[usize],
    ) -> Result<Handle<Buffer>> {
        let ranges = ranges(parts, self.size(), buffer.elements())?;
        self.start_collective(Op::ReduceScatter, at, buffer, move |group, call, values| {
            collective::reduce_scatter(group, call, values, &ranges)
        })
    }

    fn start_all_gather(&self, at: StepContext, buffer: Buffer, parts: &[usize]) -> Result<Handle<Buffer>> {
        let ranges = ranges(parts, self.size(), buffer.elements())?;
        self.start_collective(Op::AllGather, at, buffer, move |group, call, values| {
            collective::all_gather(group, call, values, &ranges)
        })
    }

    fn all_reduce(&self, at: StepContext, mut values: Slice<'_>) -> Result<()> {
        collective::all_reduce(&self.group, self.begin(Op::AllReduce, at), &mut values)
    }

    fn reduce_scatter(&self, at: StepContext, mut values: Slice<'_>, parts: &[usize]) -> Result<()> {
        let ranges = ranges(parts, self.size(), values.elements())?;
        collective::reduce_scatter(&self.group, self.begin(Op::ReduceScatter, at), &mut values, &ranges)
    }

    fn all_gather(&self, at: StepContext, mut values: Slice<'_>, parts: &[usize]) -> Result<()> {
        let ranges = ranges(parts, self.size(), values.elements())?;
        collective::all_gather(&self.group, self.begin(Op::AllGather, at), &mut values, &ranges)
    }

    fn broadcast(&self, at: StepContext, root: usize, mut values: Slice<'_>) -> Result<()> {
        self.group.member(root)?;
        collective::broadcast(&self.group, self.begin(Op::Broadcast, at), root, &mut values)
    }

    fn barrier(&self, at: StepContext) -> Result<()> {
        let call = self.begin(Op::Barrier, at);
        if self.is_world() {
            collective::gather(&self.group, call, &[]).map(drop)
        } else {
            collective::barrier(&self.group, call)
        }
    }

    fn split(&self, at: StepContext, color: Option<u64>, key: u64) -> Result<Option<Box<dyn Comm>>> {
        let call = self.begin(Op::Split, at);
        // three numbers per rank: whether it has a color, the color, the key
        let rows = self.gather_chunk(call, &[u64::from(color.is_some()), color.unwrap_or(0), key])?;
        let Some(color) = color else { return Ok(None) };
        let of_color = |rank: &usize| rows[3 * rank..][..2] == [1, color];
        let mut ranks: Vec<usize> = (0..self.size()).filter(of_color).collect();
        ranks.sort_by_key(|&rank| (rows[3 * rank + 2], rank));
        let rank = ranks.iter().position(|&rank| rank == self.rank()).unwrap_or_default();
        let members = ranks.into_iter().map(|rank| self.group.members[rank]).collect();
        let id = split_id(self.group.id, call.number, color);
        let endpoint = self.group.endpoint.clone();
        Ok(Some(Box::new(Self::new(Group { endpoint, id, rank, members }))))
    }

    fn bytes_sent(&self) -> u64 {
        self.group.endpoint.bytes_sent.load(Ordering::Relaxed)
    }

    fn check_digest(&self, step: u64, digest: u64) -> Result<()> {
        let call = self.begin(Op::Digest, StepContext::step(step, "check digest"));
        compare_digests(self, call.at, &self.gather_chunk(call, &[digest])?)
    }

    fn gather(&self, at: StepContext, own: &[u64]) -> Result<Vec<u64>> {
        let (size, width) = (self.size(), own.len());
        let mut all = vec![0; width * size];
        // messages on control connections have a bounded length
        for (chunk, numbers) in own.chunks(collective::NUMBERS_MAX).enumerate() {
            let gathered = self.gather_chunk(self.begin(Op::Gather, at), numbers)?;
            for (rank, numbers) in gathered.chunks(numbers.len()).enumerate() {
                all[width * rank + chunk * collective::NUMBERS_MAX..][..numbers.len()]
                    .copy_from_slice(numbers);
            }
        }
        Ok(all)
    }

    fn failure(&self) -> Option<Failure> {
        self.group.endpoint.mailbox.failure()
    }

    fn record_wait(&self, peer: usize, at: StepContext) -> WaitRecord {
        WaitRecord::new(self.group.endpoint.open_wait(self.group.members[peer], at))
    }

    fn wait_max(&self) -> Duration {
        self.group.endpoint.settings.wait
    }

    fn check_wait(&self, peer: usize, at: StepContext, what: &str, waited: Duration) -> Result<()> {
        self.group.endpoint.check_wait(self.group.members[peer], at, what, waited)
    }

    fn note(&self, at: StepContext) {
        self.group.endpoint.mailbox.note(at);
    }

    fn abort(&self, at: StepContext, reason: &str) -> Error {
        let endpoint = &self.group.endpoint;
        let message = format!("rank {} ended the job: {reason}", endpoint.rank);
        endpoint.fail(endpoint.failure(Cause::Caller, Some(endpoint.rank), at, message))
    }

    fn fail(&self, failure: Failure) -> Error {
        self.group.endpoint.fail(failure)
    }
}

/// Derives the id for a new communicator, the same on all member ranks; never 0, which is the complete job.
fn split_id(parent: u64, number: u64, color: u64) -> u64 {
    let mixed = |hash: u64, word: u64| mix64(hash ^ word);
    // Odd ids never collide with 0, the id for the complete job.
    [parent, number, color].into_iter().fold(0x9e37_79b9_7f4a_7c15, mixed) | 1
}

type Task = Box<dyn FnOnce() + Send>;

/// Communicator thread, started with the first collective; runs collectives in queue order.
#[derive(Debug, Default)]
struct CollectiveThread(Mutex<Option<Sender<Task>>>);

impl CollectiveThread {
    /// Queues a collective.
    fn start(
        &self,
        group: &Arc<Group>,
        at: StepContext,
        collective: impl FnOnce() -> Result<Buffer> + Send + 'static,
    ) -> Result<Handle<Buffer>> {
        let (done, result) = channel();
        let task: Task = Box::new(move || {
            let result = collective().map(|buffer| (buffer, Instant::now()));
            // the caller may have dropped its handle
            let _ = done.send(result);
        });
        // held until the task is queued: queue order must match the collective numbers
        let mut thread = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let tasks = match &*thread {
            Some(tasks) => tasks,
            None => thread.insert(spawn(group, at)?),
        };
        if tasks.send(task).is_err() {
            return Err(gone(group, at));
        }
        Ok(Handle::new(PendingCollective { group: group.clone(), at, result, early: Mutex::new(None) }))
    }
}

fn spawn(group: &Arc<Group>, at: StepContext) -> Result<Sender<Task>> {
    let (tasks, queue) = channel::<Task>();
    let name = format!("comm-overlap-{}", group.rank);
    let thread = thread::Builder::new().name(name).spawn(move || {
        for task in queue {
            task();
        }
    });
    thread.map(|_| tasks).map_err(|source| {
        let endpoint = &group.endpoint;
        let message = format!("rank {} could not start a thread: {source}", endpoint.rank);
        endpoint.fail(endpoint.failure(Cause::Caller, Some(endpoint.rank), at, message))
    })
}

fn gone(group: &Group, at: StepContext) -> Error {
    let endpoint = &group.endpoint;
    let message = format!("the communication thread of rank {} panicked", endpoint.rank);
    endpoint.fail(endpoint.failure(Cause::Caller, Some(endpoint.rank), at, message))
}

/// Collective result and end time.
type Timed = Result<(Buffer, Instant)>;

/// Collective that is queued or running. Waits inside the collective have the time limit.
struct PendingCollective {
    group: Arc<Group>,
    at: StepContext,
    result: Receiver<Timed>,
    early: Mutex<Option<Timed>>,
}

impl PendingCollective {
    /// Waits for the collective thread; meanwhile waits on that thread count as caller waits.
    fn recv(&self) -> std::result::Result<Timed, RecvError> {
        let mailbox = &self.group.endpoint.mailbox;
        mailbox.await_overlapped(true);
        let result = self.result.recv();
        mailbox.await_overlapped(false);
        result
    }
}

impl Completion<Buffer> for PendingCollective {
    // a channel returns its value only once: a value received early is kept for `wait`
    fn is_complete(&self) -> bool {
        let mut early = self.early.lock().unwrap_or_else(PoisonError::into_inner);
        if early.is_none() {
            match self.result.try_recv() {
                Ok(result) => *early = Some(result),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => return true,
            }
        }
        true
    }

    fn wait(self: Box<Self>) -> Result<Buffer> {
        self.wait_timed().map(|(buffer, _)| buffer)
    }

    fn wait_timed(self: Box<Self>) -> Timed {
        let early = self.early.lock().unwrap_or_else(PoisonError::into_inner).take();
        let result = early.map_or_else(|| self.recv(), Ok);
        result.unwrap_or_else(|_| Err(gone(&self.group, self.at)))
    }
}
