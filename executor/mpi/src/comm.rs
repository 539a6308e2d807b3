//! Rank communicator over MPI.
//!
//! Handles are the sends, receives and sums that a caller waits for.

use crate::channels::{SPLIT_WORDS, SplitPart, WORLD};
use crate::collective::{Collective, Kind};
use crate::engine::Job;
use crate::header::Header;
use crate::shared::{Command, Wait};
use dflop_comm::{
    Buffer, Cause, Comm, Completion, Dtype, Error, Failure, Handle, Payload, PayloadShape, Result, Settings,
    Slice, StepContext,
};
use std::sync::Arc;

/// Maximum number of elements in a message: MPI counts them in 32 bits.
const ELEMENTS_MAX: usize = i32::MAX as usize;

/// Rank endpoint in a communicator over MPI.
#[derive(Debug)]
pub struct MpiComm {
    job: Arc<Job>,
    /// Distinguishes messages in different communicators.
    id: u64,
    /// MPI communicator index.
    channel: usize,
    rank: usize,
    /// World rank for every rank.
    members: Arc<[usize]>,
}

/// Joins the ranks that `mpirun`, or another MPI launcher, has started, including this process.
///
/// A single thread makes all MPI calls, so MPI needs no multithreading support. The job communicator and its
/// splits leave the job together, when the last one is dropped; this waits until all ranks leave, as MPI
/// requires.
///
/// # Errors
/// [`Error::InvalidSetting`] if a time limit is zero, if this process has joined before, or if other code in
/// the process has initialized MPI.
pub fn world(settings: Settings) -> Result<MpiComm> {
    let job = Job::join(settings)?;
    let (rank, members) = (job.shared.rank, (0..job.shared.size).collect());
    Ok(MpiComm { job: Arc::new(job), id: WORLD, channel: 0, rank, members })
}

impl MpiComm {
    fn member(&self, rank: usize) -> Result<usize> {
        self.members.get(rank).copied().ok_or(Error::Rank { rank, size: self.size() })
    }

    /// Queues a collective.
    fn start(
        &self,
        at: StepContext,
        kind: Kind,
        name: &'static str,
        buffer: Buffer,
    ) -> Result<PendingCollective> {
        check_count(buffer.elements())?;
        let shared = &self.job.shared;
        let mut state = shared.lock();
        shared.check(&state, at)?;
        state.note(at);
        let number = state.number();
        let collective = Collective { channel: self.channel, kind, at, buffer, number };
        shared.command(&mut state, Command::Collective(collective));
        let (job, members) = (Arc::clone(&self.job), Arc::clone(&self.members));
        Ok(PendingCollective { job, members, at, name, number, is_taken: false })
    }

    fn run(&self, at: StepContext, kind: Kind, name: &'static str, buffer: Buffer) -> Result<Buffer> {
        self.start(at, kind, name, buffer)?.finish()
    }

    fn start_sum(&self, at: StepContext, buffer: Buffer) -> Result<PendingCollective> {
        check_summable(buffer.dtype())?;
        self.start(at, Kind::AllReduce, "all-reduce", buffer)
    }

    /// Checks that the parts in a collective match the ranks and the elements.
    fn check_parts(&self, values: &Slice<'_>, parts: &[usize]) -> Result<()> {
        let (sum, size, elements) = (parts.iter().sum(), self.size(), values.elements());
        if parts.len() == size && sum == elements {
            return Ok(());
        }
        Err(Error::Parts { parts: parts.len(), sum, size, elements })
    }
}

impl Comm for MpiComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn world_rank(&self, rank: usize) -> usize {
        self.members[rank]
    }

    fn start_send(&self, to: usize, tag: u64, at: StepContext, payload: Payload) -> Result<Handle<()>> {
        let (to, shared) = (self.member(to)?, &self.job.shared);
        let header = Header { comm: self.id, tag, at, shape: payload.shape() };
        let buffer = payload.into_buffer();
        check_count(buffer.elements())?;
        let mut state = shared.lock();
        shared.check(&state, at)?;
        state.note(at);
        let number = if to == shared.rank {
            let key = header.key(to);
            let number = state.mailbox.announce(key, buffer.as_bytes().len());
            state.mailbox.arrive(key, number, header, buffer);
            shared.changed.notify_all();
            None
        } else {
            state.bytes_sent += buffer.as_bytes().len() as u64;
            let number = state.number();
            shared.command(&mut state, Command::Send { to, header, buffer, number });
            Some(number)
        };
        drop(state);
        Ok(Handle::new(PendingSend { job: Arc::clone(&self.job), to, header, number }))
    }

    fn start_recv(
        &self,
        from: usize,
        tag: u64,
        at: StepContext,
        shape: PayloadShape,
    ) -> Result<Handle<Payload>> {
        let (from, header) = (self.member(from)?, Header { comm: self.id, tag, at, shape });
        let number = self.job.shared.lock().mailbox.post(header.key(from));
        let job = Arc::clone(&self.job);
        Ok(Handle::new(PendingReceive { job, from, header, number, is_taken: false }))
    }

    fn start_all_reduce(&self, at: StepContext, buffer: Buffer) -> Result<Handle<Buffer>> {
        Ok(Handle::new(self.start_sum(at, buffer)?))
    }

    fn all_reduce(&self, at: StepContext, values: Slice<'_>) -> Result<()> {
        let sum = self.start_sum(at, copied_slice(&values))?.finish()?;
        copy_in(values, 0, &sum);
        Ok(())
    }

    fn reduce_scatter(&self, at: StepContext, values: Slice<'_>, parts: &[usize]) -> Result<()> {
        self.check_parts(&values, parts)?;
        check_summable(values.dtype())?;
        let kind = Kind::ReduceScatter(parts.to_vec());
        let part = self.run(at, kind, "reduce-scatter", copied_slice(&values))?;
        copy_in(values, parts[..self.rank].iter().sum(), &part);
        Ok(())
    }

    fn all_gather(&self, at: StepContext, values: Slice<'_>, parts: &[usize]) -> Result<()> {
        self.check_parts(&values, parts)?;
        let gathered = self.run(at, Kind::AllGather(parts.to_vec()), "all-gather", copied_slice(&values))?;
        copy_in(values, 0, &gathered);
        Ok(())
    }

    fn broadcast(&self, at: StepContext, root: usize, values: Slice<'_>) -> Result<()> {
        self.member(root)?;
        let copied = self.run(at, Kind::Broadcast(root), "broadcast", copied_slice(&values))?;
        copy_in(values, 0, &copied);
        Ok(())
    }

    fn barrier(&self, at: StepContext) -> Result<()> {
        self.run(at, Kind::Barrier, "barrier", Buffer::U8(Vec::new())).map(drop)
    }

    fn split(&self, at: StepContext, color: Option<u64>, key: u64) -> Result<Option<Box<dyn Comm>>> {
        let mut words = vec![0; SPLIT_WORDS * self.size()];
        let own = [u64::from(color.is_some()), color.unwrap_or(0), key];
        words[SPLIT_WORDS * self.rank..][..SPLIT_WORDS].copy_from_slice(&own);
        let result = self.run(at, Kind::Split, "split", Buffer::U64(words))?;
        let Some(SplitPart { id, channel, members }) = SplitPart::read(&result) else { return Ok(None) };
        let (job, members) = (Arc::clone(&self.job), Arc::from(members));
        let rank = rank_in(&members, job.shared.rank);
        Ok(Some(Box::new(Self { job, id, channel, rank, members })))
    }

    /// Counts messages between ranks; MPI does not report what its collectives send.
    fn bytes_sent(&self) -> u64 {
        self.job.shared.lock().bytes_sent
    }

    fn failure(&self) -> Option<Failure> {
        self.job.shared.lock().failure.clone()
    }

    fn note(&self, at: StepContext) {
        self.job.shared.lock().note(at);
    }

    fn abort(&self, at: StepContext, reason: &str) -> Error {
        let shared = &self.job.shared;
        let message = format!("rank {} ended the job: {reason}", shared.rank);
        shared.fail(shared.failure(Cause::Caller, Some(shared.rank), at, message))
    }

    fn fail(&self, failure: Failure) -> Error {
        self.job.shared.fail(failure)
    }
}

impl Drop for MpiComm {
    fn drop(&mut self) {
        // The other ranks must not wait for a rank whose thread has panicked.
        if std::thread::panicking() {
            let shared = &self.job.shared;
            let at = shared.lock().status().last.unwrap_or(StepContext::step(0, "start"));
            let message = format!("the thread of rank {} panicked at {at}", shared.rank);
            drop(shared.fail(shared.failure(Cause::Died, Some(shared.rank), at, message)));
        }
    }
}

fn rank_in(members: &[usize], rank: usize) -> usize {
    members.iter().position(|&member| member == rank).unwrap_or_default()
}

fn check_summable(dtype: Dtype) -> Result<()> {
    match dtype {
        Dtype::F32 | Dtype::F64 | Dtype::U64 => Ok(()),
        _ => Err(Error::NotSummable { dtype }),
    }
}

fn check_count(elements: usize) -> Result<()> {
    if elements <= ELEMENTS_MAX {
        return Ok(());
    }
    Err(Error::Length { found: elements, expected: format!("at most {ELEMENTS_MAX} elements over MPI") })
}

fn copied_slice(values: &Slice<'_>) -> Buffer {
    match values {
        Slice::U8(elements) => elements.to_vec().into(),
        Slice::Bf16(elements) => elements.to_vec().into(),
        Slice::F32(elements) => elements.to_vec().into(),
        Slice::F64(elements) => elements.to_vec().into(),
        Slice::U64(elements) => elements.to_vec().into(),
        _ => Buffer::U8(Vec::new()),
    }
}

/// Copies elements with the same type to a position in a slice.
fn copy_in(values: Slice<'_>, begin: usize, from: &Buffer) {
    match (values, from) {
        (Slice::U8(values), Buffer::U8(from)) => values[begin..][..from.len()].copy_from_slice(from),
        (Slice::Bf16(values), Buffer::Bf16(from)) => values[begin..][..from.len()].copy_from_slice(from),
        (Slice::F32(values), Buffer::F32(from)) => values[begin..][..from.len()].copy_from_slice(from),
        (Slice::F64(values), Buffer::F64(from)) => values[begin..][..from.len()].copy_from_slice(from),
        (Slice::U64(values), Buffer::U64(from)) => values[begin..][..from.len()].copy_from_slice(from),
        _ => unreachable!("a collective keeps the type"),
    }
}

/// Message that is being sent.
pub(crate) struct PendingSend {
    pub(crate) job: Arc<Job>,
    pub(crate) to: usize,
    pub(crate) header: Header,
    /// Operation number; `None` for a message from the rank to itself, which is sent at once.
    pub(crate) number: Option<u64>,
}

/// Message that is being received.
pub(crate) struct PendingReceive {
    pub(crate) job: Arc<Job>,
    pub(crate) from: usize,
    pub(crate) header: Header,
    pub(crate) number: u64,
    pub(crate) is_taken: bool,
}

/// Collective that is in progress.
pub(crate) struct PendingCollective {
    pub(crate) job: Arc<Job>,
    /// Job ranks that take part.
    pub(crate) members: Arc<[usize]>,
    pub(crate) at: StepContext,
    pub(crate) name: &'static str,
    pub(crate) number: u64,
    pub(crate) is_taken: bool,
}

impl Completion<()> for PendingSend {
    fn is_complete(&self) -> bool {
        let state = self.job.shared.lock();
        let is_done = self.number.is_none_or(|number| state.done.contains_key(&number));
        is_done || state.failure.is_some()
    }

    fn wait(mut self: Box<Self>) -> Result<()> {
        let Some(number) = self.number else { return Ok(()) };
        let (to, header) = (self.to, self.header);
        let operation = || format!("send {header} to rank {to}");
        let wait = Wait { peers: &[to], at: header.at, operation: &operation };
        self.job.shared.wait(&wait, |state| state.done.remove(&number).map(drop))?;
        self.number = None;
        Ok(())
    }
}

impl Drop for PendingSend {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.job.shared.lock().give_up(number);
        }
    }
}

impl Completion<Payload> for PendingReceive {
    fn is_complete(&self) -> bool {
        let state = self.job.shared.lock();
        state.mailbox.is_ready(self.header.key(self.from), self.number) || state.failure.is_some()
    }

    fn wait(mut self: Box<Self>) -> Result<Payload> {
        let (shared, from, header) = (&self.job.shared, self.from, self.header);
        let (key, number) = (header.key(from), self.number);
        let operation = || format!("receive {header} from rank {from}");
        let wait = Wait { peers: &[from], at: header.at, operation: &operation };
        let (found, buffer) = shared.wait(&wait, |state| state.mailbox.take(key, number))?;
        if !header.admits(&found) {
            let text = format!(
                "rank {from} sent {found}, but rank {} expects {header}: their plans differ",
                shared.rank
            );
            let error = shared.fail(shared.failure(Cause::Mismatch, Some(from), header.at, text));
            self.is_taken = true;
            return Err(error);
        }
        self.is_taken = true;
        Payload::new(header.shape.rows, header.shape.cols, buffer)
    }
}

impl Drop for PendingReceive {
    fn drop(&mut self) {
        if !self.is_taken {
            self.job.shared.lock().mailbox.give_up(self.header.key(self.from), self.number);
        }
    }
}

impl Completion<Buffer> for PendingCollective {
    fn is_complete(&self) -> bool {
        let state = self.job.shared.lock();
        state.done.contains_key(&self.number) || state.failure.is_some()
    }

    fn wait(mut self: Box<Self>) -> Result<Buffer> {
        self.finish()
    }
}

impl PendingCollective {
    pub(crate) fn finish(&mut self) -> Result<Buffer> {
        let (number, name) = (self.number, self.name);
        let operation = || format!("finish the {name} of {} ranks", self.members.len());
        let wait = Wait { peers: &self.members, at: self.at, operation: &operation };
        let result = self.job.shared.wait(&wait, |state| state.done.remove(&number))?;
        self.is_taken = true;
        result.ok_or_else(|| no_result(name))
    }
}

impl Drop for PendingCollective {
    fn drop(&mut self) {
        if !self.is_taken {
            self.job.shared.lock().give_up(self.number);
        }
    }
}

fn no_result(name: &str) -> Error {
    Error::Length { found: 0, expected: format!("the result of {name}") }
}
