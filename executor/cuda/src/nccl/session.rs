//! State shared by a rank's communicators: device, job, operations in flight.
//!
//! Ends a job whose communication fails or takes too long.
//!
//! Message lanes get a dedicated communicator and stream as far as a device has queues. Every lane needs two
//! queues on each rank. If both ranks in a pair have enough queues, each lane between the ranks is dedicated.
//! Otherwise all lanes in a rank pair are merged, as long as both ranks have queues for the merged lane. All
//! remaining lanes share a single lane with a communicator over all ranks; every rank reserves two queues for
//! it.
//!
//! NCCL has no time limits, and a kernel that waits for another rank waits for ever. A thread looks at all
//! communicators and at the operations in flight: an NCCL failure, a compute lane wait beyond the job
//! communicator's limits, or a failure reported by a remote rank ends all communicators on this rank, so that
//! the device's work ends and every later call on the device returns the failure. A second thread, which
//! never calls the driver, ends the job if the first thread does not return from a call.

use super::communicator::{Communicator, Health};
use super::library::{Nccl, UniqueId};
use crate::device::Cuda;
use crate::driver::{Context, Event, Gate, lasting};
use dflop_comm::{Cause, Comm, Failure, StepContext, WaitRecord};
use dflop_device::{Error, MessageLane, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Maximum wait for the remaining ranks when communicators end.
const END_WAIT: Duration = Duration::from_secs(10);
/// Maximum wait for the job's communicator to name the rank that made an NCCL call fail.
const BLAME_WAIT: Duration = Duration::from_secs(1);

/// A rank's communicators, and the state that the watchdog reads.
pub(super) struct Session {
    pub(super) device: Cuda,
    pub(super) nccl: Nccl,
    /// Job communicator: wait limits, blame, job shutdown.
    pub(super) host: Arc<dyn Comm>,
    pub(super) operations: Mutex<Vec<Arc<Operation>>>,
    communicators: Mutex<Vec<Arc<Communicator>>>,
    /// Lanes with a stream.
    streams: Mutex<BTreeSet<u64>>,
    /// Number of device queues.
    queues: usize,
    /// Next device lane number.
    next_lane: AtomicU64,
    /// Number of bytes sent to remote ranks.
    pub(super) bytes_sent: AtomicU64,
    /// Time taken to create communicators.
    connect_ns: AtomicU64,
}

impl Session {
    /// Creates a session without communicators.
    ///
    /// - `queues`: number of device queues
    pub(super) fn new(device: &Cuda, nccl: Nccl, host: Arc<dyn Comm>, queues: usize) -> Self {
        Self {
            device: device.clone(),
            nccl,
            host,
            operations: Mutex::default(),
            communicators: Mutex::default(),
            streams: Mutex::default(),
            queues,
            next_lane: AtomicU64::new(dflop_device::reserve_lanes()),
            bytes_sent: AtomicU64::new(0),
            connect_ns: AtomicU64::new(0),
        }
    }

    /// Rank in the job.
    pub(super) fn rank(&self) -> usize {
        self.host.rank()
    }

    /// Returns an unused device lane number.
    pub(super) fn lane(&self) -> u64 {
        self.next_lane.fetch_add(1, Ordering::Relaxed)
    }

    /// Creates a communicator; all member ranks call it with the same id.
    ///
    /// - `peer`: job rank to query when the connection takes too long
    pub(super) fn connect(
        &self,
        id: UniqueId,
        (rank, size): (usize, usize),
        name: &str,
        at: StepContext,
        peer: usize,
    ) -> Result<Arc<Communicator>> {
        let context = &self.device.shared().context;
        let made = Communicator::start(&self.nccl, context, id, (rank, size), name.to_owned())?;
        let what = format!("connect {name}");
        let _wait = self.host.record_wait(peer, at);
        let ready = made.ready(|waited| Ok(self.host.check_wait(peer, at, &what, waited)?));
        if ready.is_err() {
            made.abort();
        }
        ready?;
        let made = Arc::new(made);
        self.communicators.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&made));
        Ok(made)
    }

    /// Runs work that creates communicators, and counts its time.
    pub(super) fn connecting<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let begin = Instant::now();
        let made = work();
        self.connect_ns.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
        made
    }

    /// Returns the time taken so far to create communicators.
    pub(super) fn connect_time(&self) -> Duration {
        Duration::from_nanos(self.connect_ns.load(Ordering::Relaxed))
    }

    /// Returns the communicators created so far.
    pub(super) fn communicators(&self) -> Vec<Arc<Communicator>> {
        self.communicators.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the number of queues not used by compute, communicators or possible communicator lanes.
    pub(super) fn free_queues(&self) -> usize {
        let communicators = self.communicators.lock().unwrap_or_else(PoisonError::into_inner).len();
        // the compute lane has one, and all communicators so far have lanes or may
        self.queues.saturating_sub(1 + QUEUES_PER_LANE * communicators)
    }

    /// Counts a lane's stream. Each communicator has a stream as well, on which NCCL waits for operations.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if the device has fewer queues than this rank has streams.
    pub(super) fn take_stream(&self, lane: u64) -> Result<()> {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.insert(lane);
        let communicators = self.communicators.lock().unwrap_or_else(PoisonError::into_inner).len();
        // the compute lane has one, too
        let needed = streams.len() + communicators + 1;
        if needed <= self.queues {
            return Ok(());
        }
        let (lanes, queues) = (streams.len(), self.queues);
        let reason = format!(
            "this rank needs {needed} streams ({lanes} lanes, {communicators} of NCCL, 1 of compute), and the device \
             has {queues} queues for them; streams that share one could wait for each other (at most {QUEUES_MAX})"
        );
        Err(Error::InvalidSetting { setting: QUEUES, reason })
    }

    /// Puts an operation under watch.
    pub(super) fn watch(
        &self,
        at: StepContext,
        what: String,
        peer: usize,
        done: Arc<Gate>,
    ) -> Arc<Operation> {
        let operation = Arc::new(Operation::new(at, what, peer, done));
        self.operations.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&operation));
        operation
    }

    /// Returns the action for the oldest operation in flight.
    pub(super) fn last_action(&self) -> StepContext {
        let operations = self.operations.lock().unwrap_or_else(PoisonError::into_inner);
        operations.first().map_or_else(|| StepContext::step(0, "communicate"), |operation| operation.at)
    }

    /// Ends the job on all ranks and returns the job failure, which may be an earlier failure.
    pub(super) fn fail(&self, cause: Cause, at: StepContext, message: String) -> Failure {
        let failure = Failure { cause, culprit: None, by: self.rank(), at, message };
        self.host.fail(failure.clone()).failure().cloned().unwrap_or(failure)
    }

    /// Ends the job after a failed NCCL call and returns this rank's error.
    pub(super) fn call_failed(&self, at: StepContext, error: &dyn std::fmt::Display) -> dflop_device::Error {
        // another rank that has failed is named by the job's communicator
        let deadline = Instant::now() + BLAME_WAIT;
        while self.host.failure().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let message = format!("rank {}: {error}", self.rank());
        let failure = self.host.failure().unwrap_or_else(|| self.fail(Cause::Transport, at, message));
        self.end(failure.clone());
        dflop_comm::Error::Failed { failure: Box::new(failure), rank: self.rank(), at: Box::new(at) }.into()
    }

    /// Ends this rank's work in a failed job.
    pub(super) fn end(&self, failure: Failure) {
        // before the work of the device ends with wrong numbers
        self.device.fail(failure, self.rank());
        // side by side: an abort that waits for the driver must not hold up that of what the driver waits for
        std::thread::scope(|scope| {
            for communicator in self.communicators() {
                scope.spawn(move || communicator.abort());
            }
        });
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let communicators = self.communicators();
        if self.host.failure().is_some() || std::thread::panicking() {
            for communicator in communicators {
                communicator.abort();
            }
            return;
        }
        // all are told to end before any is waited for, because ranks may have other orders
        for communicator in &communicators {
            communicator.finalize();
        }
        let deadline = Instant::now() + END_WAIT;
        for communicator in communicators {
            communicator.destroy(deadline);
        }
    }
}

/// Variable with the number of device queues, over which the driver spreads streams.
pub(super) const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// Default number of queues.
const QUEUES_DEFAULT: usize = 8;
/// Maximum number of queues that the driver creates.
pub(super) const QUEUES_MAX: usize = 32;

/// Variable that sets whether modules and libraries load all kernels at once.
const LOADING: &str = "CUDA_MODULE_LOADING";

/// Variables that a process with NCCL communication must set before the first CUDA use: queues for all
/// streams on a rank, and no kernel load at first launch.
pub const NCCL_VARIABLES: [(&str, &str); 2] = [(QUEUES, "32"), (LOADING, "EAGER")];

/// Rejects kernels that load at first launch: a cuBLASLt kernel load may wait for a message from a rank that
/// itself waits for this rank.
pub(super) fn check_loading(ranks: usize) -> Result<()> {
    if ranks == 1 || Context::loads_eagerly()? {
        return Ok(());
    }
    let reason =
        "expected EAGER when the process first uses CUDA, found LAZY: a kernel that loads while ranks wait \
                  for each other may never be loaded"
            .to_owned();
    Err(Error::InvalidSetting { setting: LOADING, reason })
}

/// Returns the number of queues per device in this process.
///
/// # Source
/// NVIDIA: "CUDA C++ Programming Guide", environment variables, `CUDA_DEVICE_MAX_CONNECTIONS`.
pub(super) fn queues() -> usize {
    queues_from_text(std::env::var(QUEUES).ok().as_deref())
}

fn queues_from_text(set: Option<&str>) -> usize {
    let set = set.and_then(|text| text.trim().parse().ok());
    set.unwrap_or(QUEUES_DEFAULT).clamp(1, QUEUES_MAX)
}

/// Number of queues per lane: a queue for the lane stream and a queue for NCCL's internal stream.
pub(super) const QUEUES_PER_LANE: usize = 2;

/// Lane that carries messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    /// Dedicated to a single direction and flow.
    Own(MessageLane),
    /// Shared by a rank pair, lower rank first.
    Pair([usize; 2]),
    /// Shared by all ranks.
    Shared,
}

/// Chooses the places for new lanes, the same on all ranks.
///
/// - `free`: number of unused queues on each rank
/// - `open`: existing lanes, except dedicated lanes
pub(super) fn places(
    new: &BTreeSet<MessageLane>,
    free: &[usize],
    open: &BTreeSet<Place>,
) -> BTreeMap<MessageLane, Place> {
    let kept = if open.contains(&Place::Shared) { 0 } else { QUEUES_PER_LANE };
    let mut left: Vec<usize> = free.iter().map(|free| free.saturating_sub(kept)).collect();
    let mut needed = vec![0; free.len()];
    for lane in new {
        for rank in [lane.from, lane.to] {
            needed[rank] += QUEUES_PER_LANE;
        }
    }
    let is_enough: Vec<bool> = needed.iter().zip(&left).map(|(needed, left)| needed <= left).collect();
    let mut pairs = BTreeMap::<[usize; 2], Vec<MessageLane>>::new();
    for &lane in new {
        pairs.entry([lane.from.min(lane.to), lane.from.max(lane.to)]).or_default().push(lane);
    }
    // lanes of their own come first, because their ranks have counted them
    let (own, others): (Vec<_>, Vec<_>) = pairs.into_iter().partition(|(pair, _)| {
        !open.contains(&Place::Pair(*pair)) && pair.iter().all(|&rank| is_enough[rank])
    });
    let mut places = BTreeMap::new();
    for (pair, lanes) in own {
        for rank in pair {
            left[rank] -= QUEUES_PER_LANE * lanes.len();
        }
        places.extend(lanes.into_iter().map(|lane| (lane, Place::Own(lane))));
    }
    for (pair, lanes) in others {
        let is_open = open.contains(&Place::Pair(pair));
        let has_room = is_open || pair.iter().all(|&rank| left[rank] >= QUEUES_PER_LANE);
        if has_room && !is_open {
            for rank in pair {
                left[rank] -= QUEUES_PER_LANE;
            }
        }
        let place = if has_room { Place::Pair(pair) } else { Place::Shared };
        places.extend(lanes.into_iter().map(|lane| (lane, place)));
    }
    places
}

/// Operation between the call and the end on the device.
pub(super) struct Operation {
    /// Step, microbatch and action.
    pub(super) at: StepContext,
    /// What it does, such as `receive from rank 1`.
    pub(super) what: String,
    /// Rank in the job communicator that status queries name when the operation takes too long.
    pub(super) peer: usize,
    /// Opens with the event behind the operation.
    done: Arc<Gate>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Point in the compute lane before the wait for the operation.
    awaited: Option<Event>,
    /// Compute lane wait, once observed.
    wait: Option<(Instant, WaitRecord)>,
}

/// What the watchdog finds.
pub(super) enum Progress {
    /// The operation is done, or was never queued.
    Done,
    /// Nothing waits for it.
    Ahead,
    /// The compute lane waits for it since then.
    Awaited(Instant),
}

impl Operation {
    pub(super) fn new(at: StepContext, what: String, peer: usize, done: Arc<Gate>) -> Self {
        Self { at, what, peer, done, state: Mutex::default() }
    }

    /// Records that the compute lane waits for the operation from this point on.
    pub(super) fn await_from(&self, event: Event) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).awaited = Some(event);
    }

    /// Checks the operation's progress; `record` records a compute lane wait.
    pub(super) fn look(&self, record: impl FnOnce() -> WaitRecord) -> Progress {
        if self.done.is_passed() {
            self.state.lock().unwrap_or_else(PoisonError::into_inner).wait = None;
            return Progress::Done;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.awaited.as_ref().is_some_and(Event::is_reached) {
            return Progress::Ahead;
        }
        let wait = state.wait.get_or_insert_with(|| (Instant::now(), record()));
        Progress::Awaited(wait.0)
    }
}

/// Time between checks.
const INTERVAL: Duration = Duration::from_millis(50);
/// Time after which a check is assumed to be blocked in the driver.
const STUCK: Duration = Duration::from_secs(1);
/// Time in which the rank that failed is expected to be named by the job's communicator, once NCCL reports a
/// remote failure.
const REMOTE_WAIT: Duration = Duration::from_secs(10);

/// Starts the threads, which end with the session.
pub(super) fn start_watchdog(session: &Arc<Session>) -> dflop_device::Result<()> {
    let looked = Arc::new(Mutex::new(Instant::now()));
    let (watched, timed, pulse) = (Arc::downgrade(session), Arc::downgrade(session), Arc::clone(&looked));
    spawn("dflop-nccl-watch", move || watch(&watched, &looked))?;
    spawn("dflop-nccl-time", move || keep_time(&timed, &pulse))
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> dflop_device::Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    let failed = |error| dflop_device::Error::Failed {
        reason: format!("could not start the NCCL watchdog thread: {error}"),
    };
    thread.map(drop).map_err(failed)
}

/// Checks communicators and operations.
///
/// - `looked`: time of the last check, which calls the driver and may not return
fn watch(session: &Weak<Session>, looked: &Mutex<Instant>) {
    let mut remote = None;
    loop {
        std::thread::sleep(INTERVAL);
        *looked.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        let Some(session) = session.upgrade() else { return };
        let ended =
            session.host.failure().or_else(|| unwell(&session, &mut remote)).or_else(|| overdue(&session));
        if let Some(failure) = ended {
            session.end(failure);
            return;
        }
    }
}

/// Ends the job, without a driver call, if the watching thread does not return from the driver.
fn keep_time(session: &Weak<Session>, looked: &Mutex<Instant>) {
    loop {
        std::thread::sleep(INTERVAL);
        let Some(session) = session.upgrade() else { return };
        let since = looked.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
        if since < STUCK {
            continue;
        }
        let failure = session.host.failure().or_else(|| stuck(&session, since));
        if let Some(failure) = failure {
            // aborts set marks that kernels of NCCL see, and then call the driver
            let _ = spawn("dflop-nccl-end", move || session.end(failure));
            return;
        }
    }
}

/// Returns the job failure if the driver has not answered within the wait limit.
fn stuck(session: &Session, since: Duration) -> Option<Failure> {
    if since < session.host.wait_max() {
        return None;
    }
    let calls = lasting(since / 2).unwrap_or_else(|| "a call of other code".to_owned());
    let (rank, seconds) = (session.rank(), since.as_secs_f64());
    let message = format!(
        "rank {rank}: the driver of its device has not answered for {seconds:.1} s; it is in {calls}"
    );
    Some(session.fail(Cause::TimedOut, session.last_action(), message))
}

/// Returns the job failure if NCCL has failed.
///
/// - `remote`: time when NCCL first reported a failure on a remote rank
fn unwell(session: &Session, remote: &mut Option<Instant>) -> Option<Failure> {
    for communicator in session.communicators() {
        let reason = match communicator.health() {
            Health::Well => continue,
            // the rank itself is blamed over the job's communicator, which learns of its end as well
            Health::RemoteFailed(reason) => {
                if remote.get_or_insert_with(Instant::now).elapsed() < REMOTE_WAIT {
                    continue;
                }
                reason
            }
            Health::Failed(reason) => reason,
        };
        let (rank, name) = (session.rank(), communicator.name());
        let message = format!("rank {rank}: NCCL failed in {name}: {reason}");
        return Some(session.fail(Cause::Transport, session.last_action(), message));
    }
    None
}

/// Returns the job failure if the compute lane waits for an operation beyond the limits.
fn overdue(session: &Session) -> Option<Failure> {
    let operations = || session.operations.lock().unwrap_or_else(PoisonError::into_inner);
    // not locked during a look, which calls the driver
    let looked_at = operations().clone();
    let (mut done, mut waits) = (Vec::new(), Vec::new());
    for operation in looked_at {
        match operation.look(|| session.host.record_wait(operation.peer, operation.at)) {
            Progress::Done => done.push(operation),
            Progress::Ahead => {}
            Progress::Awaited(since) => waits.push((operation, since)),
        }
    }
    operations().retain(|operation| !done.iter().any(|done| Arc::ptr_eq(done, operation)));
    waits.iter().find_map(|(operation, since)| {
        let checked = session.host.check_wait(operation.peer, operation.at, &operation.what, since.elapsed());
        checked.err().and_then(|error| error.failure().cloned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_the_queues_that_the_driver_makes_of_the_variable() {
        for (set, queues) in
            [(None, 8), (Some("32"), 32), (Some(" 4 "), 4), (Some("100"), 32), (Some("0"), 1)]
        {
            assert_eq!(queues_from_text(set), queues, "{set:?}");
        }
        assert_eq!(queues_from_text(Some("many")), 8, "the driver takes no other text");
    }

    fn lane(from: usize, to: usize, flow: u64) -> MessageLane {
        MessageLane { from, to, flow }
    }

    /// Lanes for a chain of ranks: activations forward, gradients backward.
    fn chain(ranks: usize) -> BTreeSet<MessageLane> {
        (1..ranks).flat_map(|rank| [lane(rank - 1, rank, 0), lane(rank, rank - 1, 1)]).collect()
    }

    fn count(places: &BTreeMap<MessageLane, Place>, rank: usize) -> usize {
        let own = places.iter().filter(|(lane, _)| [lane.from, lane.to].contains(&rank));
        own.map(|(_, place)| place).collect::<BTreeSet<_>>().len()
    }

    #[test]
    fn lanes_are_separate_as_long_as_there_are_queues() {
        let lanes = chain(4);
        let places = places(&lanes, &[10; 4], &BTreeSet::new());
        assert!(places.iter().all(|(lane, place)| *place == Place::Own(*lane)), "{places:?}");
    }

    #[test]
    fn pairs_share_before_all_ranks_do() {
        // the ranks in the middle have four lanes, for which 6 queues are too few
        let places_of = |queues| places(&chain(4), &[queues; 4], &BTreeSet::new());
        let found = places_of(8);
        assert!(found.values().all(|place| matches!(place, Place::Pair(_))), "{found:?}");
        let found = places_of(4);
        assert_eq!(found[&lane(0, 1, 0)], Place::Pair([0, 1]));
        assert_eq!(found[&lane(2, 1, 1)], Place::Shared);
        assert_eq!(found[&lane(2, 3, 0)], Place::Pair([2, 3]));
        let found = places_of(2);
        assert!(found.values().all(|place| *place == Place::Shared), "{found:?}");
    }

    #[test]
    fn no_rank_takes_more_queues_than_it_has() {
        for queues in 2..40 {
            let free: Vec<usize> = (0..9).map(|rank| queues + rank % 3).collect();
            let pairs = (0..9).flat_map(|from| (0..9).map(move |to| (from, to)));
            let lanes: BTreeSet<MessageLane> = pairs
                .filter(|(from, to)| from != to && (from * to) % 4 != 3)
                .map(|(from, to)| lane(from, to, u64::from(from > to)))
                .collect();
            let (first, later): (Vec<_>, Vec<_>) = lanes.iter().partition(|lane| lane.from % 2 == 0);
            let mut all = places(&first.into_iter().collect(), &free, &BTreeSet::new());
            let mut left = free.clone();
            let open: BTreeSet<Place> =
                all.values().copied().filter(|place| !matches!(place, Place::Own(_))).collect();
            for (rank, left) in left.iter_mut().enumerate() {
                let own = all.iter().filter(|(lane, _)| [lane.from, lane.to].contains(&rank));
                let own: BTreeSet<Place> = own.map(|(_, place)| *place).collect();
                let shared = usize::from(open.contains(&Place::Shared) && !own.contains(&Place::Shared));
                *left -= QUEUES_PER_LANE * (own.len() + shared);
            }
            all.extend(places(&later.into_iter().collect(), &left, &open));
            for (rank, free) in free.iter().enumerate() {
                assert!(QUEUES_PER_LANE * count(&all, rank) <= *free, "{queues}: rank {rank} of {all:?}");
            }
        }
    }
}
