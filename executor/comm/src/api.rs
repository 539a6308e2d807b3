//! Interface of all transports: the trait [`Comm`], handles for pending calls, limits, recorded waits.

use crate::error::{Cause, Error, Failure, Result, StepContext, seconds};
use crate::message::{Buffer, Payload, PayloadShape, Slice};
use std::any::Any;
use std::fmt::{self, Debug};
use std::time::{Duration, Instant};

/// Rank endpoint in a communicator.
///
/// Ranks count from 0 within the communicator. Messages between two ranks are matched by tag, and messages
/// with the same tag keep their order. A receiver states step, microbatch and shape; a message that differs
/// ends the job. Several threads may send and receive; collectives must start in the same order on all ranks.
/// A transport that matches only by order (NCCL) needs the sends and receives between two ranks posted in the
/// same order on both sides; schedules do that.
///
/// # Errors
/// [`Error::Failed`] once the job has ended for any reason; [`Error::Rank`] for a rank that does not exist.
pub trait Comm: Send + Sync + Debug {
    /// Returns this rank, below [`size`](Self::size).
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn size(&self) -> usize;

    /// Returns the world rank (rank in the complete job) for a rank in this communicator; errors name world
    /// ranks.
    ///
    /// # Panics
    /// If `rank` is not below [`size`](Self::size).
    fn world_rank(&self, rank: usize) -> usize;

    /// Starts a send. Never waits for the receiver.
    ///
    /// # Errors
    /// See the [trait documentation](Comm).
    fn start_send(&self, to: usize, tag: u64, at: StepContext, payload: Payload) -> Result<Handle<()>>;

    /// Starts a receive. Handles for the same sender and tag receive messages in call order. Dropping a
    /// handle still consumes its message.
    ///
    /// # Errors
    /// See the [trait documentation](Comm).
    fn start_recv(
        &self,
        from: usize,
        tag: u64,
        at: StepContext,
        shape: PayloadShape,
    ) -> Result<Handle<Payload>>;

    /// Starts a sum over all ranks while the caller computes. The result has the same bits as
    /// [`all_reduce`](Self::all_reduce).
    ///
    /// # Errors
    /// See the [trait documentation](Comm).
    fn start_all_reduce(&self, at: StepContext, buffer: Buffer) -> Result<Handle<Buffer>>;

    /// Sums over all ranks, element by element, in an order that depends only on the number of ranks.
    ///
    /// # Errors
    /// See the [trait documentation](Comm); [`Error::NotSummable`] for bytes and bf16.
    fn all_reduce(&self, at: StepContext, values: Slice<'_>) -> Result<()>;

    /// Sums like [`all_reduce`](Self::all_reduce), but leaves only part `r` of the sum on rank `r`.
    ///
    /// `parts[r]` is the number of elements in part `r`; parts are contiguous, in rank order, with any
    /// length. The remaining parts are unspecified afterwards. Over threads and TCP, every element has the
    /// same bits as in an `all_reduce` over the same elements, for any parts: an
    /// [`all_gather`](Self::all_gather) with the same parts completes the `all_reduce`.
    ///
    /// # Errors
    /// See the [trait documentation](Comm); [`Error::Parts`]; [`Error::NotSummable`] for bytes and bf16.
    fn reduce_scatter(&self, at: StepContext, values: Slice<'_>, parts: &[usize]) -> Result<()>;

    /// Starts [`reduce_scatter`](Self::reduce_scatter) while the caller computes; the result has the same
    /// bits. Default: runs it before it returns.
    ///
    /// # Errors
    /// Errors from [`reduce_scatter`](Self::reduce_scatter).
    fn start_reduce_scatter(
        &self,
        at: StepContext,
        mut buffer: Buffer,
        parts: &[usize],
    ) -> Result<Handle<Buffer>> {
        self.reduce_scatter(at, Slice::from(&mut buffer), parts)?;
        Ok(Handle::ready(buffer))
    }

    /// Starts [`all_gather`](Self::all_gather) while the caller computes. Default: runs it before it returns.
    ///
    /// # Errors
    /// Errors from [`all_gather`](Self::all_gather).
    fn start_all_gather(
        &self,
        at: StepContext,
        mut buffer: Buffer,
        parts: &[usize],
    ) -> Result<Handle<Buffer>> {
        self.all_gather(at, Slice::from(&mut buffer), parts)?;
        Ok(Handle::ready(buffer))
    }

    /// Gathers the parts of all ranks on every rank; each rank contributes its part, in place.
    ///
    /// # Errors
    /// See the [trait documentation](Comm); [`Error::Parts`].
    fn all_gather(&self, at: StepContext, values: Slice<'_>, parts: &[usize]) -> Result<()>;

    /// Copies the values on `root` to every rank.
    ///
    /// # Errors
    /// See the [trait documentation](Comm).
    fn broadcast(&self, at: StepContext, root: usize, values: Slice<'_>) -> Result<()>;

    /// Waits until every rank has called it.
    ///
    /// # Errors
    /// See the [trait documentation](Comm).
    fn barrier(&self, at: StepContext) -> Result<()>;

    /// Creates a communicator per color, with the ranks that passed the color, ordered by `key`, then by
    /// rank. A rank without a color takes part in the call and gets no communicator.
    ///
    /// # Errors
    /// See the [trait documentation](Comm).
    fn split(&self, at: StepContext, color: Option<u64>, key: u64) -> Result<Option<Box<dyn Comm>>>;

    /// Returns the number of message bytes that this rank has sent to other ranks, over all communicators in
    /// the job.
    ///
    /// Counts elements, without headers, from the start of each send; messages from a rank to itself are not
    /// counted.
    fn bytes_sent(&self) -> u64;

    /// Gathers a few numbers from every rank on all ranks, in rank order; all ranks must pass equally many.
    ///
    /// Over TCP, a gather over the complete job uses the control connections in the job tree, for any job
    /// size.
    ///
    /// # Errors
    /// See the [trait documentation](Comm).
    fn gather(&self, at: StepContext, own: &[u64]) -> Result<Vec<u64>> {
        let mut all = vec![0; own.len() * self.size()];
        all[own.len() * self.rank()..][..own.len()].copy_from_slice(own);
        self.all_gather(at, all.as_mut_slice().into(), &vec![own.len(); self.size()])?;
        Ok(all)
    }

    /// Returns the failure that has ended the job, if this rank knows about it. Never waits.
    fn failure(&self) -> Option<Failure> {
        None
    }

    /// Records that this rank waits for a peer outside the message layer, for example in a transfer between
    /// devices, until the record is dropped. Status requests to this rank return the wait.
    fn record_wait(&self, peer: usize, at: StepContext) -> WaitRecord {
        let _ = (peer, at);
        WaitRecord::empty()
    }

    /// Returns the time limit for waits for a rank that is not busy.
    fn wait_max(&self) -> Duration {
        Settings::default().wait
    }

    /// Checks whether a [recorded](Self::record_wait) wait may continue.
    ///
    /// - `what`: description of the wait, such as `receive from rank 1`
    /// - `waited`: time since the wait began
    ///
    /// # Errors
    /// [`Error::Failed`] with [`Cause::TimedOut`] beyond the time limits of the communicator, by the same
    /// rules as for message waits; the job has then ended. Without other limits after 30 minutes.
    fn check_wait(&self, peer: usize, at: StepContext, what: &str, waited: Duration) -> Result<()> {
        if waited < Settings::default().slow {
            return Ok(());
        }
        let (by, peer) = (self.world_rank(self.rank()), self.world_rank(peer));
        let message = format!("rank {by} waited {} to {what}", seconds(waited));
        Err(self.fail(Failure { cause: Cause::TimedOut, culprit: Some(peer), by, at, message }))
    }

    /// Records the activity of this rank between messages, so that a rank that waits too long can name it.
    fn note(&self, at: StepContext);

    /// Ends the job on all ranks for a caller-supplied reason, and returns the error to report.
    fn abort(&self, at: StepContext, reason: &str) -> Error;

    /// Ends the job on all ranks with this failure, if it is the first failure, and returns the error to
    /// report.
    fn fail(&self, failure: Failure) -> Error;

    /// Sends a message, and waits until the message has left.
    ///
    /// # Errors
    /// See the [trait documentation](Comm).
    fn send(&self, to: usize, tag: u64, at: StepContext, payload: Payload) -> Result<()> {
        self.start_send(to, tag, at, payload)?.wait()
    }

    /// Receives a message, and waits for it.
    ///
    /// # Errors
    /// See the [trait documentation](Comm).
    fn recv(&self, from: usize, tag: u64, at: StepContext, shape: PayloadShape) -> Result<Payload> {
        self.start_recv(from, tag, at, shape)?.wait()
    }

    /// Sends and receives together, for any order on the peers, and returns the received messages in receive
    /// order.
    ///
    /// # Errors
    /// See the [trait documentation](Comm).
    fn group(&self, at: StepContext, exchanges: Vec<P2pOp>) -> Result<Vec<Payload>> {
        let size = self.size();
        let peer = |exchange: &P2pOp| match *exchange {
            P2pOp::Send { to: rank, .. } | P2pOp::Recv { from: rank, .. } => rank,
        };
        if let Some(rank) = exchanges.iter().map(peer).find(|&rank| rank >= size) {
            return Err(Error::Rank { rank, size });
        }
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for exchange in exchanges {
            match exchange {
                P2pOp::Send { to, tag, payload } => sends.push(self.start_send(to, tag, at, payload)?),
                P2pOp::Recv { from, tag, shape } => receives.push(self.start_recv(from, tag, at, shape)?),
            }
        }
        // receives first: a peer's sends may complete only once this rank receives its messages
        let received = receives.into_iter().map(Handle::wait).collect::<Result<_>>()?;
        sends.into_iter().try_for_each(Handle::wait)?;
        Ok(received)
    }

    /// Compares plan digests over all ranks.
    ///
    /// # Errors
    /// [`Error::Failed`] with [`Cause::Digest`] if a digest differs; the failure names both sides and blames
    /// the rank whose digest fewer ranks share.
    fn check_digest(&self, step: u64, digest: u64) -> Result<()> {
        let at = StepContext::step(step, "check digest");
        let mut digests = vec![0; self.size()];
        // every rank gathers all digests, so all ranks find the same culprit without another message
        digests[self.rank()] = digest;
        self.all_gather(at, digests.as_mut_slice().into(), &vec![1; self.size()])?;
        compare_digests(self, at, &digests)
    }
}

/// Ends the job if a digest differs.
pub(crate) fn compare_digests<C: Comm + ?Sized>(comm: &C, at: StepContext, digests: &[u64]) -> Result<()> {
    let Some((culprit, other)) = odd_one(digests) else { return Ok(()) };
    let (culprit_rank, other_rank) = (comm.world_rank(culprit), comm.world_rank(other));
    let message = format!(
        "plan digests of step {} differ: rank {culprit_rank} has {:#018x}, rank {other_rank} has {:#018x}",
        at.step, digests[culprit], digests[other]
    );
    let by = comm.world_rank(comm.rank());
    Err(comm.fail(Failure { cause: Cause::Digest, culprit: Some(culprit_rank), by, at, message }))
}

/// A send or receive in a [`Comm::group`].
#[derive(Debug)]
pub enum P2pOp {
    /// Sends a message.
    Send {
        /// Receiving rank.
        to: usize,
        /// Message tag.
        tag: u64,
        /// Message content.
        payload: Payload,
    },
    /// Receives a message.
    Recv {
        /// Sending rank.
        from: usize,
        /// Message tag.
        tag: u64,
        /// Expected type, rows and columns.
        shape: PayloadShape,
    },
}

/// Returns the first rank without the most frequent digest, and the first rank with it. Between two equally
/// frequent digests, the digest of the lower rank counts as normal.
fn odd_one(digests: &[u64]) -> Option<(usize, usize)> {
    let count = |digest: u64| digests.iter().filter(|&&other| other == digest).count();
    let most = digests.iter().map(|&digest| count(digest)).max()?;
    let usual = digests.iter().position(|&digest| count(digest) == most)?;
    let odd = digests.iter().position(|&digest| digest != digests[usual])?;
    Some((odd, usual))
}

/// Guard that records a wait outside the message layer until it is dropped
/// ([`Comm::record_wait`](crate::Comm::record_wait)).
#[must_use = "a wait is on record as long as this lives"]
pub struct WaitRecord {
    /// Ends the wait when it is dropped.
    end: Option<Box<dyn Any + Send + Sync>>,
}

impl WaitRecord {
    /// Creates a record that lasts as long as a value, whose drop ends the wait.
    pub fn new(end: impl Any + Send + Sync) -> Self {
        Self { end: Some(Box::new(end)) }
    }

    /// Creates an empty record, for communicators whose status is never requested.
    pub const fn empty() -> Self {
        Self { end: None }
    }
}

impl fmt::Debug for WaitRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WaitRecord({})", if self.end.is_some() { "open" } else { "empty" })
    }
}

/// Operation that completes later; implemented by each transport.
pub trait Completion<T>: Send {
    /// Returns whether [`wait`](Self::wait) would return immediately.
    fn is_complete(&self) -> bool;

    /// Waits, at most for the time limit of the communicator.
    ///
    /// # Errors
    /// [`Error::Failed`](crate::Error::Failed) if the job has ended or the time limit is reached.
    fn wait(self: Box<Self>) -> Result<T>;

    /// Waits like [`wait`](Self::wait), and returns the time at which the operation was complete, as far as
    /// the transport can tell. Default: the end of the wait.
    ///
    /// # Errors
    /// Errors from [`wait`](Self::wait).
    fn wait_timed(self: Box<Self>) -> Result<(T, Instant)> {
        let value = self.wait()?;
        Ok((value, Instant::now()))
    }
}

/// Pending send, receive or collective. The caller may compute until [`wait`](Self::wait).
#[must_use = "a message that no one waits for may never have arrived"]
pub struct Handle<T>(Box<dyn Completion<T>>);

impl<T> std::fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Handle(complete: {})", self.is_complete())
    }
}

impl<T> Handle<T> {
    /// Wraps a pending transport operation.
    pub fn new(completion: impl Completion<T> + 'static) -> Self {
        Self(Box::new(completion))
    }

    /// Creates a handle for an operation that is complete.
    pub fn ready(value: T) -> Self
    where
        T: Send + 'static,
    {
        Self::new(Ready(value, Instant::now()))
    }

    /// Returns whether [`wait`](Self::wait) would return immediately.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.0.is_complete()
    }

    /// Waits for completion, at most for the time limit of the communicator.
    ///
    /// # Errors
    /// [`Error::Failed`](crate::Error::Failed) if the job has ended, or ends because the time limit is
    /// reached.
    pub fn wait(self) -> Result<T> {
        self.0.wait()
    }

    /// Waits like [`wait`](Self::wait), and returns the time at which the operation was complete, as far as
    /// the transport can tell: before the wait, if the caller computed longer.
    ///
    /// # Errors
    /// Errors from [`wait`](Self::wait).
    pub fn wait_timed(self) -> Result<(T, Instant)> {
        self.0.wait_timed()
    }
}

/// Completed operation, and the completion time.
struct Ready<T>(T, Instant);

impl<T: Send> Completion<T> for Ready<T> {
    fn is_complete(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<T> {
        Ok(self.0)
    }

    fn wait_timed(self: Box<Self>) -> Result<(T, Instant)> {
        Ok((self.0, self.1))
    }
}

/// Time and buffer limits; must be the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    pub(crate) wait: Duration,
    pub(crate) slow: Duration,
    pub(crate) rendezvous: Duration,
    pub(crate) buffered_bytes_max: usize,
}

/// Limits that follow from [`Settings`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Time after which a waiting rank requests the status of its peer.
    pub wait: Duration,
    /// Maximum time that a rank waits for a busy peer; at least `wait`.
    pub slow: Duration,
    /// Time limit for the answer of a peer.
    pub answer: Duration,
    /// Maximum number of unreceived bytes from one peer, in addition to one message.
    pub buffered_bytes_max: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            wait: Duration::from_secs(30),
            slow: Duration::from_mins(30),
            rendezvous: Duration::from_mins(1),
            buffered_bytes_max: 1 << 30,
        }
    }
}

impl Settings {
    /// Sets the time after which a waiting rank requests its peer's status. Default: 30 s.
    ///
    /// A peer that computes, or that waits for a rank that computes, is busy: the wait continues, at most to
    /// the [`slow`](Self::slow) limit, and the peer's status is requested again after every such period. The
    /// job ends if a rank does not answer, or if ranks have waited for each other for this time: a dead or
    /// stopped process and a deadlock end the job everywhere within this time, plus at most a quarter of it
    /// (1 s to 10 s) for the rank that does not answer.
    #[must_use]
    pub fn wait(mut self, timeout: Duration) -> Self {
        self.wait = timeout;
        self
    }

    /// Sets the maximum time that a rank waits for a busy peer, after which the job ends. Default: 30 min.
    ///
    /// The longest computation between two messages, such as a checkpoint or the first kernel compilation,
    /// must be shorter. A limit below [`wait`](Self::wait) counts as `wait`.
    #[must_use]
    pub fn slow(mut self, timeout: Duration) -> Self {
        self.slow = timeout;
        self
    }

    /// Returns the time limit for the answer to a status request.
    pub(crate) fn answer(&self) -> Duration {
        (self.wait / 4).clamp(Duration::from_secs(1), Duration::from_secs(10))
    }

    /// Returns the limits, for transports in other crates.
    #[must_use]
    pub fn limits(&self) -> Limits {
        let Self { wait, slow, buffered_bytes_max, .. } = *self;
        Limits { wait, slow: slow.max(wait), answer: self.answer(), buffered_bytes_max }
    }

    /// Sets the time within which all ranks must join and find each other. Default: 60 s.
    #[must_use]
    pub fn rendezvous(mut self, timeout: Duration) -> Self {
        self.rendezvous = timeout;
        self
    }

    /// Sets the maximum number of unreceived bytes that are buffered per peer, plus at most one message.
    /// Default: 1 GiB.
    ///
    /// Beyond this limit, the peer's sends do not complete until the receiver takes or awaits a message from
    /// that peer.
    #[must_use]
    pub fn buffered_bytes_max(mut self, bytes: usize) -> Self {
        self.buffered_bytes_max = bytes;
        self
    }

    /// Checks the bounds.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if a time limit is zero.
    pub fn check(&self) -> Result<()> {
        let zero = [("wait", self.wait), ("slow", self.slow), ("rendezvous", self.rendezvous)];
        match zero.into_iter().find(|(_, limit)| limit.is_zero()) {
            Some((setting, _)) => {
                Err(Error::InvalidSetting { setting, reason: "must be longer than 0".into() })
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rarer_digest_is_blamed() {
        assert_eq!(odd_one(&[7, 7, 7]), None);
        assert_eq!(odd_one(&[7, 8, 8]), Some((0, 1)));
        assert_eq!(odd_one(&[7, 8]), Some((1, 0)));
    }
}
