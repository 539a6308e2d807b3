//! State shared by all communicators on a rank: mailbox, transport, failure.
//!
//! Tree of job ranks, over which small facts travel: job end, farewells, digests.
//!
//! A wait that exceeds the short limit is reported: a dead rank, a deadlock, or a rank that is merely busy.
//! The awaited rank may itself wait for another rank. First the status of the awaited rank is requested, then
//! the status of the rank that it waits for, until a rank does not answer, computes, or was already visited.
//!
//! Rank 0 is the root. A rank has one parent and at most [`FANOUT`] children, for any job size.

mod mailbox;

use super::api::{Completion, Handle, Settings};
use super::error::{Cause, Error, Failure, Result, StepContext, seconds};
use super::message::{Buffer, Header, Key, Message, Payload};
use super::sync::{AtomicU64, Ordering};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use mailbox::{Expected, Interrupt, Mailbox, OpenWait, Status, Wait};

/// Job rank, as seen by communicators.
pub(super) struct Endpoint {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) transport: Box<dyn Transport>,
    pub(super) settings: Settings,
    /// Element bytes that were sent to other ranks.
    pub(super) bytes_sent: AtomicU64,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.size)
    }
}

impl Endpoint {
    pub(super) fn new(
        rank: usize,
        size: usize,
        mailbox: Arc<Mailbox>,
        transport: Box<dyn Transport>,
        settings: Settings,
    ) -> Self {
        Self { rank, size, mailbox, transport, settings, bytes_sent: AtomicU64::new(0) }
    }

    /// Starts a send. Results may be awaited in any order.
    pub(super) fn start_send(
        self: &Arc<Self>,
        to: usize,
        header: Header,
        buffer: Buffer,
        is_overlapped: bool,
    ) -> Result<PendingSend> {
        if let Some(failure) = self.mailbox.failure() {
            return Err(self.failed(failure, header.at));
        }
        self.mailbox.note(header.at);
        let message = Message { header, buffer };
        let sent = if to == self.rank {
            self.mailbox.deliver(self.rank, message);
            SendState::Done
        } else {
            self.bytes_sent.fetch_add(message.buffer.as_bytes().len() as u64, Ordering::Relaxed);
            self.transport.post(to, message)
        };
        let begin = Instant::now();
        Ok(PendingSend { endpoint: self.clone(), to, header, sent, begin, is_overlapped })
    }

    /// Sends a small message to a neighbor in the job tree, on the control connection.
    pub(super) fn send_control(&self, to: usize, header: Header, buffer: Buffer) -> Result<()> {
        if let Some(failure) = self.mailbox.failure() {
            return Err(self.failed(failure, header.at));
        }
        self.mailbox.note(header.at);
        self.bytes_sent.fetch_add(buffer.as_bytes().len() as u64, Ordering::Relaxed);
        self.transport.send_control(to, Message { header, buffer });
        Ok(())
    }

    /// Reserves the next message with the tag in this header.
    pub(super) fn start_recv(
        self: &Arc<Self>,
        from: usize,
        header: Header,
        is_overlapped: bool,
    ) -> PendingRecv {
        let key = header.key(from);
        // reserved now, so that several pending receives get messages in call order
        let number = self.mailbox.post(key, header);
        let endpoint = self.clone();
        PendingRecv { endpoint, from, header, key, number, is_overlapped, is_taken: false }
    }

    /// Receives a message, and waits for it.
    pub(super) fn recv(self: &Arc<Self>, from: usize, header: Header, is_overlapped: bool) -> Result<Buffer> {
        self.start_recv(from, header, is_overlapped).receive()
    }

    /// Ends the job on all ranks and returns the error for this rank. The first failure is kept.
    pub(super) fn fail(&self, failure: Failure) -> Error {
        let at = failure.at;
        self.failed(self.transport.end_job(failure), at)
    }

    /// Returns the error for this rank in a job that has ended.
    pub(super) fn failed(&self, failure: Failure, at: StepContext) -> Error {
        Error::Failed { failure: Box::new(failure), rank: self.rank, at: Box::new(at) }
    }

    /// Returns the failure that this rank noticed.
    pub(super) fn failure(
        &self,
        cause: Cause,
        culprit: Option<usize>,
        at: StepContext,
        message: String,
    ) -> Failure {
        Failure { cause, culprit, by: self.rank, at, message }
    }

    fn inquirer(&self) -> Inquirer<'_> {
        let Self { rank, transport, mailbox, settings, .. } = self;
        Inquirer { rank: *rank, transport: &**transport, mailbox, settings }
    }

    /// Waits until an attempt succeeds. An attempt that exceeds the short limit is repeated while the peer is
    /// busy, up to the long limit.
    ///
    /// - `what`: description of the wait, such as `receive … from rank 1`
    fn wait<T>(
        &self,
        mut wait: Wait,
        what: impl Fn() -> String,
        mut attempt: impl FnMut(&mut Wait, Duration) -> Result<T, Interrupt>,
    ) -> Result<T> {
        let slow = self.settings.slow.max(self.settings.wait);
        let begin = Instant::now();
        let mut limit = self.settings.wait;
        loop {
            match attempt(&mut wait, limit) {
                Ok(value) => return Ok(value),
                Err(Interrupt::TimedOut) => {}
                Err(interrupt) => return Err(self.interrupted(interrupt, &wait, &what())),
            }
            let report = find(&self.inquirer(), wait.peer);
            let left = slow.saturating_sub(begin.elapsed());
            if report.verdict == Verdict::Busy && !left.is_zero() {
                limit = left.min(self.settings.wait);
                continue;
            }
            // the awaited event may have occurred during the inquiry
            return match attempt(&mut wait, Duration::ZERO) {
                Ok(value) => Ok(value),
                Err(Interrupt::TimedOut) => Err(self.timed_out(&report, begin.elapsed(), &wait, &what())),
                Err(interrupt) => Err(self.interrupted(interrupt, &wait, &what())),
            };
        }
    }

    /// Records a wait outside the message layer, until the record is dropped.
    pub(super) fn open_wait(&self, peer: usize, at: StepContext) -> ForeignWait {
        let mut wait = Wait::new(peer, at, false);
        self.mailbox.begin_wait(&mut wait);
        ForeignWait { mailbox: Arc::clone(&self.mailbox), wait }
    }

    /// Decides whether a wait outside the message layer may continue.
    pub(super) fn check_wait(
        &self,
        peer: usize,
        at: StepContext,
        what: &str,
        waited: Duration,
    ) -> Result<()> {
        if let Some(failure) = self.mailbox.failure() {
            return Err(self.failed(failure, at));
        }
        let Settings { wait, slow, .. } = self.settings;
        if waited < wait {
            return Ok(());
        }
        let report = find(&self.inquirer(), peer);
        if report.verdict == Verdict::Busy && waited < slow.max(wait) {
            return Ok(());
        }
        Err(self.timed_out(&report, waited, &Wait::new(peer, at, false), what))
    }

    fn timed_out(&self, report: &TimeoutReport, waited: Duration, wait: &Wait, what: &str) -> Error {
        let limit = match report.verdict {
            Verdict::Busy => format!("the limit for a busy rank is {}", seconds(self.settings.slow)),
            Verdict::Dead | Verdict::Deadlock => {
                format!("the limit for a rank that is not busy is {}", seconds(self.settings.wait))
            }
        };
        let (rank, waited) = (self.rank, seconds(waited));
        let message = format!("rank {rank} waited {waited} to {what}; {}; {limit}", report.message);
        self.fail(self.failure(Cause::TimedOut, report.culprit, wait.at, message))
    }

    fn interrupted(&self, interrupt: Interrupt, wait: &Wait, what: &str) -> Error {
        let Interrupt::Failed(failure) = interrupt else {
            let (peer, rank) = (wait.peer, self.rank);
            let message = format!("rank {peer} finished while rank {rank} waited to {what}");
            return self.fail(self.failure(Cause::Left, Some(peer), wait.at, message));
        };
        self.failed(failure, wait.at)
    }
}

/// Recorded wait outside the message layer.
pub(super) struct ForeignWait {
    mailbox: Arc<Mailbox>,
    wait: Wait,
}

impl Drop for ForeignWait {
    fn drop(&mut self) {
        self.mailbox.end_wait(&mut self.wait);
    }
}

/// Message that is being sent.
pub(super) struct PendingSend {
    endpoint: Arc<Endpoint>,
    to: usize,
    header: Header,
    sent: SendState,
    begin: Instant,
    is_overlapped: bool,
}

impl PendingSend {
    /// Waits until the message has left.
    pub(super) fn finish(&self) -> Result<()> {
        let Self { endpoint, to, header, sent, is_overlapped, .. } = self;
        let wait = Wait::new(*to, header.at, *is_overlapped);
        let attempt = |wait: &mut Wait, limit| endpoint.transport.wait_sent(sent, wait, limit);
        endpoint.wait(wait, || format!("send {header} to rank {to}"), attempt)
    }
}

impl Completion<()> for PendingSend {
    fn is_complete(&self) -> bool {
        self.endpoint.transport.is_sent(self.to, &self.sent)
    }

    fn wait(self: Box<Self>) -> Result<()> {
        self.finish()
    }

    fn wait_timed(self: Box<Self>) -> Result<((), Instant)> {
        self.finish()?;
        let left = match self.sent {
            SendState::Queued(count) => self.endpoint.mailbox.written_at(self.to, count),
            _ => Some(self.begin),
        };
        Ok(((), left.unwrap_or_else(Instant::now)))
    }
}

/// Message that is being received.
pub(super) struct PendingRecv {
    endpoint: Arc<Endpoint>,
    from: usize,
    header: Header,
    key: Key,
    number: u64,
    is_overlapped: bool,
    /// Whether the message has left the mailbox.
    is_taken: bool,
}

impl PendingRecv {
    /// Waits for the message and checks the header.
    pub(super) fn receive(self) -> Result<Buffer> {
        self.receive_timed().map(|(buffer, _)| buffer)
    }

    /// Waits for the message, and also returns the arrival time.
    fn receive_timed(mut self) -> Result<(Buffer, Instant)> {
        let Self { endpoint, from, header, key, number, is_overlapped, is_taken } = &mut self;
        let wait = Wait::new(*from, header.at, *is_overlapped);
        let attempt = |wait: &mut Wait, limit| endpoint.mailbox.take(*key, *number, wait, limit);
        let (message, arrived) =
            endpoint.wait(wait, || format!("receive {header} from rank {from}"), attempt)?;
        *is_taken = true;
        // tags match already; a difference in step, microbatch or shape means different plans
        if header.admits(&message.header) {
            return Ok((message.buffer, arrived));
        }
        let text = format!(
            "rank {from} sent {}, but rank {} expects {header}: their plans differ",
            message.header, endpoint.rank
        );
        Err(endpoint.fail(endpoint.failure(Cause::Mismatch, Some(*from), header.at, text)))
    }
}

impl Drop for PendingRecv {
    fn drop(&mut self) {
        // a message that is never received must not keep its share of the buffered bytes limit
        if !self.is_taken {
            self.endpoint.mailbox.discard(self.key, self.number, self.from);
        }
    }
}

impl Completion<Payload> for PendingRecv {
    fn is_complete(&self) -> bool {
        self.endpoint.mailbox.is_ready(self.key, self.number)
    }

    fn wait(self: Box<Self>) -> Result<Payload> {
        self.wait_timed().map(|(payload, _)| payload)
    }

    fn wait_timed(self: Box<Self>) -> Result<(Payload, Instant)> {
        let shape = self.header.shape;
        let (buffer, arrived) = self.receive_timed()?;
        Ok((Payload::new(shape.rows, shape.cols, buffer)?, arrived))
    }
}

impl From<PendingSend> for Handle<()> {
    fn from(sending: PendingSend) -> Self {
        if sending.sent == SendState::Done { Self::ready(()) } else { Self::new(sending) }
    }
}

/// Rank transport. Ranks are world ranks.
pub(crate) trait Transport: Send + Sync {
    /// Starts to send a message to another rank; returns immediately.
    fn post(&self, to: usize, message: Message) -> SendState;

    /// Waits until a [posted](Self::post) message to the awaited peer is in flight.
    fn wait_sent(&self, sent: &SendState, wait: &mut Wait, timeout: Duration) -> Result<(), Interrupt>;

    /// Returns whether [`wait_sent`](Self::wait_sent) would return immediately.
    fn is_sent(&self, to: usize, sent: &SendState) -> bool;

    /// Sends a small message to a neighbor in the job tree. A neighbor that does not accept it is detected
    /// elsewhere.
    fn send_control(&self, to: usize, message: Message);

    /// Aborts the job: notifies all reachable ranks, then the mailbox of this rank. Returns the job failure,
    /// which differs from `failure` if another failure came first.
    fn end_job(&self, failure: Failure) -> Failure;

    /// Requests the status of a rank; returns `None` if it does not answer in time.
    fn ask(&self, peer: usize, timeout: Duration) -> Option<Status>;
}

/// Progress of a message send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendState {
    /// Completed; nothing to wait for.
    Done,
    /// Completes once the peer has room.
    Delivered,
    /// Completes once this many messages are written.
    Queued(u64),
    /// The peer is gone.
    Closed,
}

/// Outcome at the end of a chain of waiting ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// A rank computes, or a wait in a cycle is younger than the short limit: the wait may continue.
    Busy,
    /// A rank does not answer.
    Dead,
    /// Ranks have waited for each other for the short limit.
    Deadlock,
}

/// End of a chain of waiting ranks.
#[derive(Debug, PartialEq, Eq)]
struct TimeoutReport {
    verdict: Verdict,
    /// Rank at the end of the chain; `None` for a deadlock.
    culprit: Option<usize>,
    message: String,
}

/// Rank that requests the status of other ranks.
struct Inquirer<'a> {
    rank: usize,
    transport: &'a dyn Transport,
    mailbox: &'a Mailbox,
    settings: &'a Settings,
}

/// Follows the chain of waiting ranks from `peer` on.
fn find(own: &Inquirer<'_>, peer: usize) -> TimeoutReport {
    let (mut chain, mut current) = (Vec::new(), peer);
    loop {
        let Some(status) = status(own, current) else {
            let heard = own.mailbox.heard(current);
            let heard = heard.map_or("never heard of before".into(), |at| format!("last heard of at {at}"));
            let message = format!("rank {current} does not answer, {heard}");
            return TimeoutReport { verdict: Verdict::Dead, culprit: Some(current), message };
        };
        let busy = |message| TimeoutReport { verdict: Verdict::Busy, culprit: Some(current), message };
        let Some(wait) = status.wait else {
            return busy(match status.last {
                Some(at) => format!("rank {current} is busy since {at}"),
                None => format!("rank {current} has not started"),
            });
        };
        chain.push((current, wait.age));
        current = wait.peer;
        // a cycle: every rank in it waits, so none can be blamed
        if let Some(first) = chain.iter().position(|&(rank, _)| rank == current) {
            let cycle = &chain[first..];
            // a young wait may be about to end: its message may be in flight
            let is_young = cycle.iter().any(|&(_, age)| age < own.settings.wait);
            let verdict = if is_young { Verdict::Busy } else { Verdict::Deadlock };
            let message = format!("deadlock: ranks wait for each other: {}", arrows(cycle));
            return TimeoutReport { verdict, culprit: None, message };
        }
    }
}

/// Returns the status of a rank; also for this rank, in which another thread may wait elsewhere or compute.
fn status(own: &Inquirer<'_>, rank: usize) -> Option<Status> {
    if rank == own.rank {
        return Some(own.mailbox.status());
    }
    own.transport.ask(rank, own.settings.answer())
}

/// Formats a cycle, which ends with its first rank.
fn arrows(cycle: &[(usize, Duration)]) -> String {
    cycle.iter().chain(cycle.first()).map(|(rank, _)| rank.to_string()).collect::<Vec<_>>().join(" → ")
}

/// Maximum number of children per rank: two levels reach 20 ranks, four levels 340.
pub(crate) const FANOUT: usize = 4;

/// Returns the parent of a rank; `None` for the root.
pub(crate) fn parent(rank: usize) -> Option<usize> {
    Some(rank.checked_sub(1)? / FANOUT)
}

/// Returns the children of a rank.
pub(crate) fn children(rank: usize, size: usize) -> impl Iterator<Item = usize> {
    (FANOUT * rank + 1..=FANOUT * rank + FANOUT).take_while(move |&child| child < size)
}

/// Returns parent and children of a rank.
pub(crate) fn neighbors(rank: usize, size: usize) -> impl Iterator<Item = usize> {
    parent(rank).into_iter().chain(children(rank, size))
}

/// Returns a rank and all ranks below it, in a fixed order.
pub(crate) fn subtree(rank: usize, size: usize) -> Vec<usize> {
    let mut ranks = vec![rank];
    let mut next = 0;
    while let Some(&rank) = ranks.get(next) {
        ranks.extend(children(rank, size));
        next += 1;
    }
    ranks
}

/// Returns the nearest ranks beyond a neighbor that is gone, skipping further ranks that are gone.
///
/// - `rank`: the calling rank; ranks on the side of this rank are left out
pub(crate) fn beyond(
    rank: usize,
    neighbor: usize,
    size: usize,
    is_gone: impl Fn(usize) -> bool,
) -> Vec<usize> {
    let (mut seen, mut open, mut found) = (BTreeSet::from([rank, neighbor]), vec![neighbor], Vec::new());
    while let Some(gone) = open.pop() {
        for next in neighbors(gone, size).filter(|&next| seen.insert(next)).collect::<Vec<_>>() {
            if is_gone(next) { open.push(next) } else { found.push(next) }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_reached_once_with_few_neighbors() {
        for size in [1, 2, 5, 6, 64, 1000] {
            let mut all = subtree(0, size);
            all.sort_unstable();
            assert_eq!(all, (0..size).collect::<Vec<_>>());
            for rank in 1..size {
                assert!(children(parent(rank).unwrap(), size).any(|child| child == rank));
            }
            assert!((0..size).all(|rank| neighbors(rank, size).count() <= FANOUT + 1));
        }
    }

    #[test]
    fn ranks_beyond_gone_ones_are_found() {
        // 0 has 1 to 4, 1 has 5 to 8, 2 has 9 to 12
        assert_eq!(beyond(5, 1, 13, |rank| rank == 1), [0, 6, 7, 8]);
        let mut found = beyond(5, 1, 13, |rank| [0, 1, 2].contains(&rank));
        found.sort_unstable();
        assert_eq!(found, [3, 4, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!(beyond(3, 0, 13, |_| true), [0; 0]);
    }
}
