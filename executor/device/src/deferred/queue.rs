//! Work queues by lane, points in lanes, and execution in a chosen order.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use super::host_work::HostWork;
use super::slot::{Place, Slot, with_all};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::runtime::{Lane, Tensor};

/// Polling interval for a communication in progress.
const POLL: Duration = Duration::from_micros(50);

type Compute<D> = Box<dyn FnOnce(&D, &[&Tensor<D>], &mut [&mut Tensor<D>]) -> Result<()> + Send>;

/// Lane work.
pub(super) enum Work<D: Device> {
    /// An operation.
    Compute { reads: Vec<Place<D>>, writes: Vec<Place<D>>, run: Compute<D> },
    /// A point in the lane.
    Mark(DeferredEvent<D>),
    /// Waits for a point in another lane.
    Wait(DeferredEvent<D>),
    /// A host task.
    Host(HostWork<D>),
    /// Frees memory.
    Free(Arc<Slot<D>>),
}

impl<D: Device> Work<D> {
    fn may_run(&self) -> bool {
        match self {
            Self::Wait(event) => event.reached().is_some(),
            Self::Host(host) => !host.is_in_progress(),
            _ => true,
        }
    }
}

/// Lane work that has not run.
struct LaneWork<D: Device> {
    waiting: VecDeque<Work<D>>,
    /// Number of work items queued so far.
    queued: u64,
}

impl<D: Device> LaneWork<D> {
    const fn new() -> Self {
        Self { waiting: VecDeque::new(), queued: 0 }
    }

    /// Queues work and returns the work number.
    fn push(&mut self, work: Work<D>) -> u64 {
        self.waiting.push_back(work);
        self.queued += 1;
        self.queued
    }

    /// Takes the next work with its number.
    fn pop(&mut self) -> Option<(u64, Work<D>)> {
        let number = self.queued + 1 - self.waiting.len() as u64;
        self.waiting.pop_front().map(|work| (number, work))
    }
}

struct Lanes<D: Device> {
    work: BTreeMap<Lane, LaneWork<D>>,
    random: u64,
    /// First error; the queue rejects work after it.
    failure: Option<String>,
}

/// Next action for the thread that runs work.
enum Next<D: Device> {
    /// Runs this lane work.
    Run(Lane, u64, Work<D>),
    /// Looks again later: all runnable work is communication in progress.
    Poll,
    /// Returns because all work is done.
    Done,
    /// Fails because all lanes wait for events that no queued work reaches.
    Stuck(String),
}

/// All device work that has not run.
pub(super) struct Queue<D: Device> {
    lanes: Mutex<Lanes<D>>,
    /// Held by the thread that runs work.
    running: Mutex<()>,
    order: Order,
}

impl<D: Device> Queue<D> {
    pub(super) fn new(order: Order) -> Self {
        let lanes = Lanes { work: BTreeMap::new(), random: order.random(), failure: None };
        Self { lanes: Mutex::new(lanes), running: Mutex::new(()), order }
    }

    fn lock(&self) -> MutexGuard<'_, Lanes<D>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, lane: Lane, work: Work<D>) {
        let mut lanes = self.lock();
        if lanes.failure.is_none() {
            lanes.of(lane).push(work);
        } else {
            // its tensors queue `Free` work when dropped, so drop them without the lock
            drop(lanes);
            drop(work);
        }
    }

    /// Queues a point after all work in a lane.
    pub(super) fn mark(&self, lane: Lane) -> DeferredEvent<D> {
        let mut lanes = self.lock();
        let is_alive = lanes.failure.is_none();
        let of_lane = lanes.of(lane);
        let event = DeferredEvent { lane, number: of_lane.queued + 1, reached: Arc::default() };
        if is_alive {
            of_lane.push(Work::Mark(event.clone()));
        }
        event
    }

    /// Runs all work. After an error the remaining work is dropped, and every later call returns the error.
    pub(super) fn drain(&self, inner: &D) -> Result<()> {
        self.drain_until(inner, |_| false)
    }

    /// Runs work, in any lane, until a lane is empty. Errors are the same as in [`drain`](Self::drain).
    pub(super) fn drain_lane(&self, lane: Lane, inner: &D) -> Result<()> {
        self.drain_until(inner, |lanes| lanes.of(lane).waiting.is_empty())
    }

    fn drain_until(&self, inner: &D, is_done: impl Fn(&mut Lanes<D>) -> bool) -> Result<()> {
        let _running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reason) = self.lock().failure.clone() {
            return Err(Error::Failed { reason });
        }
        loop {
            if is_done(&mut self.lock()) {
                return Ok(());
            }
            match self.next() {
                Next::Done => return Ok(()),
                Next::Poll => std::thread::sleep(POLL),
                Next::Stuck(reason) => {
                    self.fail(reason.clone());
                    return Err(Error::Failed { reason });
                }
                Next::Run(lane, number, work) => {
                    if let Err(error) = self.run(inner, lane, work) {
                        let reason = format!("work {number} of lane {lane:?}: {error}");
                        self.fail(reason.clone());
                        // callers handle these by kind
                        let is_kept = matches!(error, Error::Comm(_) | Error::OutOfMemory { .. });
                        return Err(if is_kept { error } else { Error::Failed { reason } });
                    }
                }
            }
        }
    }

    /// Keeps the first error, and drops all work.
    fn fail(&self, reason: String) {
        let mut lanes = self.lock();
        lanes.failure = Some(reason);
        let dropped = std::mem::take(&mut lanes.work);
        // its tensors queue `Free` work when dropped
        drop(lanes);
        drop(dropped);
    }

    /// Runs lane work, or starts it.
    fn run(&self, inner: &D, lane: Lane, work: Work<D>) -> Result<()> {
        match work {
            Work::Compute { reads, writes, run } => with_all(inner, &reads, &writes, run),
            Work::Mark(event) => inner.mark(Lane::Compute).map(|now| drop(event.reached.set(now))),
            Work::Wait(_) => Ok(()),
            Work::Free(slot) => {
                slot.free();
                Ok(())
            }
            Work::Host(mut host) if !host.has_started() => {
                host.start(inner)?;
                // at the front again, until it is ready
                self.lock().of(lane).waiting.push_front(Work::Host(host));
                Ok(())
            }
            Work::Host(host) => host.finish(inner),
        }
    }

    /// Takes the next work that may run.
    fn next(&self) -> Next<D> {
        let mut lanes = self.lock();
        let Lanes { work, random, .. } = &mut *lanes;
        let fronts = || work.iter().filter_map(|(&lane, of_lane)| Some((lane, of_lane.waiting.front()?)));
        let ready: Vec<Lane> = fronts().filter(|(_, work)| work.may_run()).map(|(lane, _)| lane).collect();
        if ready.is_empty() {
            return idle(fronts());
        }
        let lane = self.order.choose(&ready, random);
        let (number, next) = work.get_mut(&lane).and_then(LaneWork::pop).expect("its lane is ready");
        Next::Run(lane, number, next)
    }
}

impl<D: Device> Lanes<D> {
    fn of(&mut self, lane: Lane) -> &mut LaneWork<D> {
        self.work.entry(lane).or_insert_with(LaneWork::new)
    }
}

/// Decides the next action while no work may run, based on the first work in every lane.
fn idle<'a, D: Device>(fronts: impl Iterator<Item = (Lane, &'a Work<D>)>) -> Next<D> {
    let mut waits = Vec::new();
    let mut is_in_progress = false;
    for (lane, work) in fronts {
        match work {
            Work::Wait(DeferredEvent { lane: other, number, .. }) => {
                waits.push(format!("lane {lane:?} waits for event {number} of lane {other:?}"));
            }
            _ => is_in_progress = true,
        }
    }
    match (is_in_progress, waits.is_empty()) {
        (true, _) => Next::Poll,
        (false, true) => Next::Done,
        (false, false) => Next::Stuck(format!("no queued work reaches an event: {}", waits.join(", "))),
    }
}

/// Point in a [`Deferred`](super::Deferred) lane.
pub struct DeferredEvent<D: Device> {
    pub(super) lane: Lane,
    /// Number of work items in the lane up to this point.
    pub(super) number: u64,
    pub(super) reached: Arc<OnceLock<D::Event>>,
}

impl<D: Device> Clone for DeferredEvent<D> {
    fn clone(&self) -> Self {
        Self { lane: self.lane, number: self.number, reached: Arc::clone(&self.reached) }
    }
}

impl<D: Device> fmt::Debug for DeferredEvent<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeferredEvent({:?}, {})", self.lane, self.number)
    }
}

impl<D: Device> DeferredEvent<D> {
    /// Returns the event of the inner device, once the point is reached.
    pub(super) fn reached(&self) -> Option<&D::Event> {
        self.reached.get()
    }
}

/// Priority among lanes whose next work may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Operations before communication.
    ComputeFirst,
    /// Communication before operations, oldest communicators first.
    CommunicationFirst,
    /// Communication before operations, newest communicators first.
    LastFirst,
    /// At random, with this seed.
    Random(u64),
}

impl Order {
    /// Number of orders in [`numbered`](Self::numbered).
    pub const NUMBER: u64 = 5;

    /// Returns one of five orders: the three fixed orders, then random orders.
    #[must_use]
    pub const fn numbered(number: u64) -> Self {
        match number {
            0 => Self::ComputeFirst,
            1 => Self::CommunicationFirst,
            2 => Self::LastFirst,
            seed => Self::Random(seed),
        }
    }

    /// Returns the first random state for this order.
    pub(super) const fn random(self) -> u64 {
        let seed = if let Self::Random(seed) = self { seed } else { 0 };
        seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
    }

    /// Chooses a lane from a nonempty list of lanes that may run, sorted with compute first.
    pub(super) fn choose(self, ready: &[Lane], random: &mut u64) -> Lane {
        match self {
            Self::ComputeFirst => ready[0],
            Self::CommunicationFirst => ready.get(1).copied().unwrap_or(ready[0]),
            Self::LastFirst => ready[ready.len() - 1],
            Self::Random(_) => {
                *random ^= *random << 13;
                *random ^= *random >> 7;
                *random ^= *random << 17;
                ready[*random as usize % ready.len()]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Cpu;

    const OTHER: Lane = Lane::Communication(5);

    fn failure(queue: &Queue<Cpu>, inner: &Cpu) -> String {
        queue.drain(inner).unwrap_err().to_string()
    }

    #[test]
    fn lanes_that_wait_for_each_other_are_an_error() {
        let inner = Cpu::new(1).unwrap();
        for number in 0..Order::NUMBER {
            let queue = Queue::new(Order::numbered(number));
            let event = |lane| DeferredEvent { lane, number: 2, reached: Arc::default() };
            let (first, second) = (event(Lane::Compute), event(OTHER));
            queue.push(Lane::Compute, Work::Wait(second.clone()));
            queue.push(Lane::Compute, Work::Mark(first.clone()));
            queue.push(OTHER, Work::Wait(first));
            queue.push(OTHER, Work::Mark(second));
            let error = failure(&queue, &inner);
            assert!(error.contains("lane Compute waits for event 2 of lane Communication(5)"), "{error}");
            assert!(error.contains("lane Communication(5) waits for event 2 of lane Compute"), "{error}");
        }
    }

    #[test]
    fn the_first_error_ends_all_work_and_every_later_read_reports_it() {
        let inner = Cpu::new(1).unwrap();
        let queue = Queue::new(Order::ComputeFirst);
        queue.mark(Lane::Compute);
        let failing = |reason: &str| {
            let reason = reason.to_owned();
            let run: Compute<Cpu> =
                Box::new(move |_, _, _| Err(Error::InvalidSetting { setting: "test", reason }));
            Work::Compute { reads: Vec::new(), writes: Vec::new(), run }
        };
        queue.push(Lane::Compute, failing("first"));
        queue.push(OTHER, failing("second"));
        let dropped = queue.mark(Lane::Compute);
        let error = failure(&queue, &inner);
        assert!(error.contains("work 2 of lane Compute") && error.contains("first"), "{error}");
        // a wait for dropped work, and for work queued after the error
        for event in [dropped, queue.mark(OTHER)] {
            queue.push(OTHER, Work::Wait(event));
            assert_eq!(failure(&queue, &inner), error);
        }
    }
}
