//! Work queues by lane, points in lanes, and execution in a chosen order.
//!
//! Memory that queued work fills.

use super::{Deferred, contents};
use crate::error::{Error, Result};
use crate::ops::Device;
use crate::ops::argument::Call;
use crate::runtime::{HostTask, Lane, Tensor};
use dflop_comm::Buffer;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Polling interval for a communication in progress.
const POLL: Duration = Duration::from_micros(50);

/// Lane work.
pub(super) enum Work<D: Device> {
    /// An operation.
    Compute { reads: Vec<Place<D>>, writes: Vec<Place<D>>, run: Call<D> },
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

/// Allocation contents, on the inner device.
pub(super) struct Slot<D: Device> {
    contents: Mutex<Option<Tensor<D>>>,
    is_freed: AtomicBool,
}

impl<D: Device> Slot<D> {
    pub(super) fn new(contents: Tensor<D>) -> Self {
        Self { contents: Mutex::new(Some(contents)), is_freed: AtomicBool::new(false) }
    }

    /// Poisons the contents; later work that touches them fails.
    pub(super) fn free(&self) {
        self.is_freed.store(true, Ordering::Relaxed);
        *self.contents.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Slot range that work reads or writes.
pub(crate) struct Place<D: Device> {
    slot: Arc<Slot<D>>,
    range: Range<usize>,
}

impl<D: Device> Place<D> {
    pub(super) fn of(tensor: &Tensor<Deferred<D>>) -> Self {
        Self { slot: Arc::clone(&tensor.memory().slot), range: tensor.range() }
    }

    /// Calls a closure with the elements.
    pub(super) fn with<R>(&self, inner: &D, run: impl FnOnce(&D, &Tensor<D>) -> Result<R>) -> Result<R> {
        let mut result = None;
        let run = |inner: &D, reads: &[&Tensor<D>], _: &mut [&mut Tensor<D>]| {
            result = Some(run(inner, reads[0])?);
            Ok(())
        };
        with_all(inner, std::slice::from_ref(self), &[], run)?;
        Ok(result.expect("the closure has run"))
    }

    /// Calls a closure with the elements, mutable.
    pub(super) fn with_mut(
        &self,
        inner: &D,
        run: impl FnOnce(&D, &mut Tensor<D>) -> Result<()>,
    ) -> Result<()> {
        with_all(inner, &[], std::slice::from_ref(self), |inner, _, writes| run(inner, writes[0]))
    }
}

/// Slot elements, cut at the ranges that work needs.
struct Cut<'a, D: Device> {
    slot: &'a Arc<Slot<D>>,
    ranges: Vec<Range<usize>>,
    pieces: Vec<Tensor<D>>,
}

/// Calls work with the operand elements. Ranges in the same allocation are either equal or disjoint.
pub(super) fn with_all<D: Device>(
    inner: &D,
    reads: &[Place<D>],
    writes: &[Place<D>],
    run: impl FnOnce(&D, &[&Tensor<D>], &mut [&mut Tensor<D>]) -> Result<()>,
) -> Result<()> {
    let mut cuts: Vec<Cut<'_, D>> = Vec::new();
    for place in reads.iter().chain(writes) {
        let index = cuts.iter().position(|cut| Arc::ptr_eq(cut.slot, &place.slot)).unwrap_or_else(|| {
            cuts.push(Cut { slot: &place.slot, ranges: Vec::new(), pieces: Vec::new() });
            cuts.len() - 1
        });
        if !cuts[index].ranges.contains(&place.range) {
            cuts[index].ranges.push(place.range.clone());
        }
    }
    for cut in &mut cuts {
        if cut.slot.is_freed.load(Ordering::Relaxed) {
            let reason = "freed before work of another lane was done with it".to_owned();
            return Err(Error::InvalidSetting { setting: "memory", reason });
        }
        let whole = cut.slot.contents.lock().unwrap_or_else(PoisonError::into_inner).take();
        let whole = whole.expect("work runs one at a time");
        // An empty range comes first among ranges with the same start.
        cut.ranges.sort_by_key(|range| (range.start, range.end));
        let mut lens = Vec::new();
        let mut next = 0;
        for range in &cut.ranges {
            lens.extend([range.start - next, range.len()]);
            next = range.end;
        }
        lens.push(whole.len() - next);
        cut.pieces = whole.split(&lens);
    }
    let piece = |place: &Place<D>| {
        let cut = cuts.iter().position(|cut| Arc::ptr_eq(cut.slot, &place.slot)).expect("it was cut above");
        let range =
            cuts[cut].ranges.iter().position(|range| *range == place.range).expect("it was cut above");
        // before each range is the piece that no operand needs
        (cut, 2 * range + 1)
    };
    let read: Vec<(usize, usize)> = reads.iter().map(piece).collect();
    let written: Vec<(usize, usize)> = writes.iter().map(piece).collect();
    let mut pieces: Vec<Vec<Option<&mut Tensor<D>>>> =
        cuts.iter_mut().map(|cut| cut.pieces.iter_mut().map(Some).collect()).collect();
    let mut exclusive: Vec<&mut Tensor<D>> =
        written.iter().map(|&(cut, piece)| pieces[cut][piece].take().expect("it is written once")).collect();
    let shared: Vec<&Tensor<D>> =
        read.iter().map(|&(cut, piece)| pieces[cut][piece].as_deref().expect("it is not written")).collect();
    let result = run(inner, &shared, &mut exclusive);
    drop(shared);
    drop(exclusive);
    drop(pieces);
    for cut in cuts {
        *cut.slot.contents.lock().unwrap_or_else(PoisonError::into_inner) = Some(Tensor::join(cut.pieces));
    }
    result
}

/// Host task and the memory that it exchanges.
pub(super) struct HostWork<D: Device> {
    input: Option<Tensor<Deferred<D>>>,
    updated: Option<Place<D>>,
    output: Option<Place<D>>,
    task: Box<dyn HostTask>,
    has_started: bool,
}

impl<D: Device> HostWork<D> {
    /// Creates a task that consumes a tensor and fills a second tensor.
    pub(super) fn new(
        input: Option<Tensor<Deferred<D>>>,
        output: Option<Place<D>>,
        task: Box<dyn HostTask>,
    ) -> Self {
        Self { input, updated: None, output, task, has_started: false }
    }

    /// Creates a task that changes a tensor.
    pub(super) fn update(place: Place<D>, task: Box<dyn HostTask>) -> Self {
        Self { input: None, updated: Some(place), output: None, task, has_started: false }
    }

    /// Returns whether the task waits for other ranks.
    pub(super) fn is_in_progress(&self) -> bool {
        self.has_started && !self.task.is_ready()
    }

    pub(super) const fn has_started(&self) -> bool {
        self.has_started
    }

    pub(super) fn start(&mut self, inner: &D) -> Result<()> {
        self.has_started = true;
        let buffer = match (&self.input, &self.updated) {
            (Some(input), _) => {
                Some(Place::of(input).with(inner, |inner, tensor| contents(inner, tensor, false))?)
            }
            (None, Some(place)) => {
                let adds = self.task.adds();
                Some(place.with(inner, |inner, tensor| contents(inner, tensor, adds))?)
            }
            (None, None) => None,
        };
        self.task.start(buffer)
    }

    pub(super) fn finish(self, inner: &D) -> Result<()> {
        let Self { input, updated, output, task, .. } = self;
        let result = task.finish()?;
        if let (Some(place), Some(buffer)) = (updated.or(output), result) {
            place.with_mut(inner, |inner, tensor| store(inner, &buffer, tensor))?;
        }
        drop(input);
        Ok(())
    }
}

/// Writes host elements to an inner device tensor.
fn store<D: Device>(inner: &D, buffer: &Buffer, tensor: &mut Tensor<D>) -> Result<()> {
    match buffer {
        Buffer::F32(values) => inner.write(values, tensor),
        Buffer::Bf16(values) => {
            inner.write(&values.iter().map(|value| value.to_f32()).collect::<Vec<_>>(), tensor)
        }
        Buffer::F64(values) => inner.write_scalars(values, tensor),
        other => {
            let reason = format!("expected numbers, received {:?}", other.dtype());
            Err(Error::InvalidSetting { setting: "tensor", reason })
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
            let run: Call<Cpu> =
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
