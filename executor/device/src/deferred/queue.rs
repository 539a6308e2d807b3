//! Queues of work by lane, and the order in which they run.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use dflop_comm::Buffer;

use super::slot::{Place, Slot, with_all};
use super::{Deferred, contents};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::runtime::{HostTask, Lane, Tensor};

/// Time between two looks at a communication in progress.
const POLL: Duration = Duration::from_micros(50);

/// Which of the lanes whose next work may run comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Operations before communication.
    ComputeFirst,
    /// Communication before operations, first made communicators first.
    CommunicationFirst,
    /// Communication before operations, last made communicators first.
    LastFirst,
    /// At random, by this seed.
    Random(u64),
}

impl Order {
    /// Number of orders of [`numbered`](Self::numbered).
    pub const NUMBER: u64 = 5;

    /// Returns one of five orders: the three fixed ones, then random ones.
    #[must_use]
    pub const fn numbered(number: u64) -> Self {
        match number {
            0 => Self::ComputeFirst,
            1 => Self::CommunicationFirst,
            2 => Self::LastFirst,
            seed => Self::Random(seed),
        }
    }
}

/// Point in a lane of [`Deferred`].
pub struct DeferredEvent<D: Device> {
    lane: Lane,
    /// Number of works in the lane up to this point.
    until: u64,
    reached: Arc<OnceLock<D::Event>>,
}

impl<D: Device> Clone for DeferredEvent<D> {
    fn clone(&self) -> Self {
        Self { lane: self.lane, until: self.until, reached: Arc::clone(&self.reached) }
    }
}

impl<D: Device> fmt::Debug for DeferredEvent<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeferredEvent({:?}, {})", self.lane, self.until)
    }
}

impl<D: Device> DeferredEvent<D> {
    /// Event of the inner device, once the point is reached.
    pub(super) fn reached(&self) -> Option<&D::Event> {
        self.reached.get()
    }
}

type Compute<D> = Box<dyn FnOnce(&D, &[&Tensor<D>], &mut [&mut Tensor<D>]) -> Result<()> + Send>;

/// Work of a lane.
pub(super) enum Work<D: Device> {
    /// An operation.
    Compute { reads: Vec<Place<D>>, writes: Vec<Place<D>>, run: Compute<D> },
    /// A point of the lane.
    Mark(DeferredEvent<D>),
    /// Waits for a point of another lane.
    Wait(DeferredEvent<D>),
    /// A task of the host.
    Host(HostWork<D>),
    /// Frees memory.
    Free(Arc<Slot<D>>),
}

/// A task of the host and the memory it exchanges.
pub(super) struct HostWork<D: Device> {
    input: Option<Tensor<Deferred<D>>>,
    updated: Option<Place<D>>,
    output: Option<Place<D>>,
    task: Box<dyn HostTask>,
    has_started: bool,
}

impl<D: Device> HostWork<D> {
    /// Makes a task that consumes a tensor and fills another.
    pub(super) fn new(
        input: Option<Tensor<Deferred<D>>>,
        output: Option<Place<D>>,
        task: Box<dyn HostTask>,
    ) -> Self {
        Self { input, updated: None, output, task, has_started: false }
    }

    /// Makes a task that changes a tensor.
    pub(super) fn update(place: Place<D>, task: Box<dyn HostTask>) -> Self {
        Self { input: None, updated: Some(place), output: None, task, has_started: false }
    }

    fn start(&mut self, inner: &D) -> Result<()> {
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

    fn finish(self, inner: &D) -> Result<()> {
        let Self { input, updated, output, task, .. } = self;
        let result = task.finish()?;
        if let (Some(place), Some(buffer)) = (updated.or(output), result) {
            place.with_mut(inner, |inner, tensor| store(inner, &buffer, tensor))?;
        }
        drop(input);
        Ok(())
    }
}

/// Writes elements that the host has to a tensor of the inner device.
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

struct Lanes<D: Device> {
    waiting: BTreeMap<Lane, VecDeque<Work<D>>>,
    /// Number of works that were queued, and that were done.
    queued: BTreeMap<Lane, u64>,
    done: BTreeMap<Lane, u64>,
    random: u64,
}

/// All work of a device that has not run.
pub(super) struct Queue<D: Device> {
    lanes: Mutex<Lanes<D>>,
    /// Held by the thread that runs work.
    running: Mutex<()>,
    order: Order,
}

impl<D: Device> Queue<D> {
    pub(super) fn new(order: Order) -> Self {
        let random = if let Order::Random(seed) = order { seed } else { 0 };
        let lanes = Lanes {
            waiting: BTreeMap::new(),
            queued: BTreeMap::new(),
            done: BTreeMap::new(),
            random: random.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        };
        Self { lanes: Mutex::new(lanes), running: Mutex::new(()), order }
    }

    fn lock(&self) -> MutexGuard<'_, Lanes<D>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, lane: Lane, work: Work<D>) {
        let mut lanes = self.lock();
        *lanes.queued.entry(lane).or_default() += 1;
        lanes.waiting.entry(lane).or_default().push_back(work);
    }

    /// Queues a point behind all work of a lane.
    pub(super) fn mark(&self, lane: Lane) -> DeferredEvent<D> {
        let mut lanes = self.lock();
        let queued = lanes.queued.entry(lane).or_default();
        *queued += 1;
        let event = DeferredEvent { lane, until: *queued, reached: Arc::default() };
        lanes.waiting.entry(lane).or_default().push_back(Work::Mark(event.clone()));
        event
    }

    /// Runs all work. After an error the remaining work is dropped.
    pub(super) fn drain(&self, inner: &D) -> Result<()> {
        let _running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let Some((lane, work)) = self.next() else {
                let is_done = self.lock().waiting.values().all(VecDeque::is_empty);
                if is_done {
                    return Ok(());
                }
                // Only communication in progress is left that may run.
                std::thread::sleep(POLL);
                continue;
            };
            let done = match work {
                Work::Compute { reads, writes, run } => with_all(inner, &reads, &writes, run),
                Work::Mark(event) => inner.mark(Lane::Compute).map(|now| drop(event.reached.set(now))),
                Work::Wait(_) => Ok(()),
                Work::Free(slot) => {
                    slot.free();
                    Ok(())
                }
                Work::Host(mut host) if !host.has_started => match host.start(inner) {
                    Ok(()) => {
                        // At the front again, until it is ready.
                        self.lock().waiting.entry(lane).or_default().push_front(Work::Host(host));
                        continue;
                    }
                    Err(error) => Err(error),
                },
                Work::Host(host) => host.finish(inner),
            };
            if let Err(error) = done {
                let dropped = std::mem::take(&mut self.lock().waiting);
                drop(dropped);
                return Err(error);
            }
            *self.lock().done.entry(lane).or_default() += 1;
        }
    }

    /// Takes the next work that may run; `None` if all that is left waits.
    fn next(&self) -> Option<(Lane, Work<D>)> {
        let mut lanes = self.lock();
        let Lanes { waiting, done, random, .. } = &mut *lanes;
        let may_run = |work: &Work<D>| match work {
            Work::Wait(event) => done.get(&event.lane).copied().unwrap_or(0) >= event.until,
            Work::Host(host) => !host.has_started || host.task.is_ready(),
            _ => true,
        };
        let ready: Vec<Lane> = waiting
            .iter()
            .filter(|(_, works)| works.front().is_some_and(may_run))
            .map(|(&lane, _)| lane)
            .collect();
        let lane = match self.order {
            // lanes sort with compute first
            Order::ComputeFirst => ready.first().copied()?,
            Order::CommunicationFirst => ready.get(1).or(ready.first()).copied()?,
            Order::LastFirst => ready.last().copied()?,
            Order::Random(_) => {
                *random ^= *random << 13;
                *random ^= *random >> 7;
                *random ^= *random << 17;
                *ready.get(*random as usize % ready.len().max(1))?
            }
        };
        let work = waiting.get_mut(&lane)?.pop_front()?;
        Some((lane, work))
    }
}
