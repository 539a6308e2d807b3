//! State shared between the communicators of a rank and the thread that calls MPI, and the waits for it.
//!
//! A wait that exceeds the short limit asks why the awaited rank is late: it does not answer, it computes, or
//! ranks wait for each other.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dflop_comm::{Buffer, Cause, Error, Failure, Limits, Result, StepContext};

use crate::collective::Collective;
use crate::header::{Control, Header, Status};
use crate::mailbox::Mailbox;

/// Time for which a collective from a rank that has left may still be in flight.
const FAREWELL: Duration = Duration::from_secs(5);

/// Work for the thread that calls MPI.
#[derive(Debug)]
pub(crate) enum Command {
    Send { to: usize, header: Header, buffer: Buffer, number: u64 },
    Collective(Collective),
    Control(usize, Control),
}

/// Rank state, and change notifications.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) limits: Limits,
    state: Mutex<State>,
    /// Something has arrived, has been sent or has failed.
    pub(crate) changed: Condvar,
    /// There are commands.
    pub(crate) commanded: Condvar,
}

/// Rank state.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) commands: VecDeque<Command>,
    pub(crate) mailbox: Mailbox,
    /// Results by operation number: `None` for sends, elements for collectives.
    pub(crate) done: BTreeMap<u64, Option<Buffer>>,
    /// Operations whose results nobody reads.
    pub(crate) given_up: std::collections::BTreeSet<u64>,
    pub(crate) failure: Option<Failure>,
    /// Ranks that have left, with the number of messages to this rank and the farewell time.
    pub(crate) left: BTreeMap<usize, (u64, Instant)>,
    pub(crate) answers: BTreeMap<usize, Status>,
    pub(crate) bytes_sent: u64,
    /// Whether all communicators on the rank have been dropped.
    pub(crate) is_closing: bool,
    waits: BTreeMap<u64, (Option<usize>, Instant)>,
    last: Option<StepContext>,
    numbers: u64,
}

/// Wait of a thread for an operation.
pub(crate) struct Wait<'a> {
    /// Job ranks that are waited for: one rank, or all ranks in a collective.
    pub(crate) peers: &'a [usize],
    pub(crate) at: StepContext,
    /// Operation, such as `receive … from rank 1`.
    pub(crate) operation: &'a dyn Fn() -> String,
}

impl State {
    /// Returns a number for an operation.
    pub(crate) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(crate) fn note(&mut self, at: StepContext) {
        self.last = Some(at);
    }

    pub(crate) fn complete(&mut self, number: u64, result: Option<Buffer>) {
        if !self.given_up.remove(&number) {
            self.done.insert(number, result);
        }
    }

    /// Abandons the result of an operation.
    pub(crate) fn give_up(&mut self, number: u64) {
        if self.done.remove(&number).is_none() {
            self.given_up.insert(number);
        }
    }

    /// Returns the rank activity: the oldest wait for a single rank.
    pub(crate) fn status(&self) -> Status {
        let mut waits = self.waits.values().filter_map(|&(peer, begin)| Some((peer?, begin.elapsed())));
        Status { wait: waits.next(), last: self.last }
    }
}

impl Shared {
    pub(crate) fn new([rank, size]: [usize; 2], limits: Limits) -> Self {
        let (state, changed, commanded) = (Mutex::default(), Condvar::new(), Condvar::new());
        Self { rank, size, limits, state, changed, commanded }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a command.
    pub(crate) fn command(&self, state: &mut State, command: Command) {
        state.commands.push_back(command);
        self.commanded.notify_all();
    }

    /// Returns the job failure as an error on this rank, if there is one.
    pub(crate) fn check(&self, state: &State, at: StepContext) -> Result<()> {
        state.failure.as_ref().map_or(Ok(()), |failure| Err(self.failed(failure.clone(), at)))
    }

    fn failed(&self, failure: Failure, at: StepContext) -> Error {
        Error::Failed { failure: Box::new(failure), rank: self.rank, at: Box::new(at) }
    }

    /// Describes a failure that this rank noticed.
    pub(crate) fn failure(
        &self,
        cause: Cause,
        culprit: Option<usize>,
        at: StepContext,
        message: String,
    ) -> Failure {
        Failure { cause, culprit, by: self.rank, at, message }
    }

    /// Ends the job on all ranks and returns the error for this rank. The first failure is kept.
    pub(crate) fn fail(&self, failure: Failure) -> Error {
        let (mut state, at) = (self.lock(), failure.at);
        if let Some(first) = &state.failure {
            return self.failed(first.clone(), at);
        }
        state.failure = Some(failure.clone());
        for to in (0..self.size).filter(|&to| to != self.rank) {
            self.command(&mut state, Command::Control(to, Control::Failed(failure.clone())));
        }
        self.changed.notify_all();
        self.failed(failure, at)
    }

    /// Waits until an attempt succeeds, at most for the time limits in the settings.
    pub(crate) fn wait<T>(
        &self,
        wait: &Wait<'_>,
        mut attempt: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T> {
        let begin = Instant::now();
        let Limits { wait: short, slow, .. } = self.limits;
        let mut limit = short;
        let mut state = self.lock();
        let number = state.number();
        let single = if let [peer] = wait.peers { Some(*peer) } else { None };
        state.waits.insert(number, (single, begin));
        loop {
            let failure = if let Some(value) = attempt(&mut state) {
                state.waits.remove(&number);
                return Ok(value);
            } else if let Some(failure) = state.failure.clone() {
                failure
            } else if let Some(peer) = self.absent(&state, wait.peers) {
                let operation = (wait.operation)();
                let message = format!("rank {peer} finished while rank {} waited to {operation}", self.rank);
                self.failure(Cause::Left, Some(peer), wait.at, message)
            } else if begin.elapsed() < limit {
                let left = limit.saturating_sub(begin.elapsed()).min(Duration::from_secs(1));
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            } else {
                drop(state);
                let report = report(self, single);
                state = self.lock();
                if report.verdict == Verdict::Busy && begin.elapsed() < slow {
                    limit = (begin.elapsed() + short).min(slow);
                    continue;
                }
                if let Some(value) = attempt(&mut state) {
                    state.waits.remove(&number);
                    return Ok(value);
                }
                let (rank, waited) = (self.rank, begin.elapsed().as_secs_f64());
                let operation = (wait.operation)();
                let message = format!("rank {rank} waited {waited:.1} s to {operation}: {}", report.message);
                self.failure(Cause::TimedOut, report.culprit, wait.at, message)
            };
            state.waits.remove(&number);
            drop(state);
            return Err(self.fail(failure));
        }
    }

    /// Returns a rank that has left and will send no more.
    fn absent(&self, state: &State, peers: &[usize]) -> Option<usize> {
        let is_absent = |peer: &usize| {
            let farewell = state.left.get(peer);
            farewell.is_some_and(|&(messages, since)| match peers {
                [_] => state.mailbox.arrived(*peer) == messages,
                // A collective that the rank took part in may still be in flight.
                _ => since.elapsed() > FAREWELL,
            })
        };
        peers.iter().copied().find(|peer| *peer != self.rank && is_absent(peer))
    }
}

/// Outcome at the end of a chain of waiting ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// A rank computes or is in a collective, or a wait in a cycle is younger than the short limit.
    Busy,
    /// A rank does not answer.
    Silent,
    /// Ranks have waited for each other for the short limit.
    Deadlock,
}

/// End of a chain of waiting ranks.
#[derive(Debug)]
struct Report {
    verdict: Verdict,
    culprit: Option<usize>,
    message: String,
}

/// Follows the chain of waiting ranks, starting at a rank; a wait for a collective counts as busy.
fn report(shared: &Shared, peer: Option<usize>) -> Report {
    let Some(mut current) = peer else {
        let message = "not all ranks take part in the collective".to_owned();
        return Report { verdict: Verdict::Busy, culprit: None, message };
    };
    let mut chain: Vec<(usize, Duration)> = Vec::new();
    loop {
        let Some(status) = ask(shared, current) else {
            let message = format!("rank {current} does not answer");
            return Report { verdict: Verdict::Silent, culprit: Some(current), message };
        };
        let Some((next, age)) = status.wait else {
            let message = status.last.map_or_else(
                || format!("rank {current} has not started"),
                |at| format!("rank {current} is busy since {at}"),
            );
            return Report { verdict: Verdict::Busy, culprit: Some(current), message };
        };
        chain.push((current, age));
        current = next;
        if let Some(first) = chain.iter().position(|&(rank, _)| rank == current) {
            let cycle = &chain[first..];
            let is_young = cycle.iter().any(|&(_, age)| age < shared.limits.wait);
            let verdict = if is_young { Verdict::Busy } else { Verdict::Deadlock };
            let ranks = cycle.iter().chain(cycle.first()).map(|(rank, _)| rank.to_string());
            let arrows = ranks.collect::<Vec<_>>().join(" → ");
            let message = format!("deadlock: ranks wait for each other: {arrows}");
            return Report { verdict, culprit: None, message };
        }
    }
}

/// Returns the activity of a rank, if it answers in time.
fn ask(shared: &Shared, rank: usize) -> Option<Status> {
    let mut state = shared.lock();
    if rank == shared.rank {
        return Some(state.status());
    }
    state.answers.remove(&rank);
    shared.command(&mut state, Command::Control(rank, Control::Ask));
    let end = Instant::now() + shared.limits.answer;
    loop {
        if let Some(status) = state.answers.remove(&rank) {
            return Some(status);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        state = shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}
