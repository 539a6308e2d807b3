//! Times every action and all communication in a step: duration, and time that operations waited.

use std::collections::BTreeMap;
use std::time::Instant;

use dflop_balancer::schedule::Action;
use dflop_device::{Device, Lane, Span, Tensor, Transfer};

use crate::error::Result;

/// Action in a step, with measured times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedAction {
    /// Executed action.
    pub action: Action,
    /// Start, in nanoseconds since the start of the step: of the call on a CPU, of the device work on a
    /// different processor, which runs asynchronously.
    pub start_ns: u64,
    /// End, in nanoseconds since the start of the step.
    pub end_ns: u64,
    /// Time that the device computed, without waits, in nanoseconds. On a CPU this is CPU time, of the
    /// leading thread if several threads compute a pass.
    pub busy_ns: u64,
}

/// Action that may still be running on the device.
struct Marked<D: Device> {
    action: Action,
    start_ns: u64,
    end_ns: u64,
    busy: [D::Event; 2],
}

/// Records the actions in a step.
pub(super) struct Clock<D: Device> {
    start: Instant,
    begin: D::Event,
    timeline: Vec<Marked<D>>,
    /// Communication that operations were ordered after.
    pub(super) awaited: Vec<Awaited<D>>,
}

impl<D: Device> Clock<D> {
    pub(super) fn start(device: &D, actions: usize) -> dflop_device::Result<Self> {
        let begin = device.mark(Lane::Compute)?;
        let (timeline, awaited) = (Vec::with_capacity(actions), Vec::new());
        Ok(Self { start: Instant::now(), begin, timeline, awaited })
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    pub(super) fn add(&mut self, action: Action, start_ns: u64, busy: [D::Event; 2]) {
        let end_ns = self.now_ns();
        self.timeline.push(Marked { action, start_ns, end_ns, busy });
    }

    /// Returns all communication that operations were ordered after, once the device has completed it.
    pub(super) fn communication(&self, device: &D) -> Vec<TimedCommunication> {
        timed(device, &self.begin, &self.awaited)
    }

    /// Returns all actions, after the device has completed them.
    pub(super) fn timeline(&self, device: &D) -> Vec<TimedAction> {
        // The calls on another processor return long before the work begins.
        let is_behind = device.host_threads().is_none();
        let since_begin = |event: &D::Event| u64::try_from(device.elapsed_ns(&self.begin, event)?).ok();
        let timed = |Marked { action, start_ns, end_ns, busy: [start, end] }: &Marked<D>| {
            let own = since_begin(start).zip(since_begin(end)).filter(|_| is_behind);
            let (start_ns, end_ns) = own.unwrap_or((*start_ns, *end_ns));
            TimedAction { action: *action, start_ns, end_ns, busy_ns: device.busy_ns(start, end) }
        };
        self.timeline.iter().map(timed).collect()
    }
}

/// Rank lane: communication in a lane runs sequentially.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CommunicationLane {
    /// Messages to another rank.
    Send {
        /// Receiving rank.
        to: usize,
    },
    /// Messages from another rank.
    Receive {
        /// Sending rank.
        from: usize,
    },
    /// Collectives over stage replicas.
    Replicas {
        /// Stage number.
        stage: u16,
    },
    /// Sums of tied parameters over the two stages that have them.
    Tie,
}

/// Communication kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CommunicationKind {
    /// Rows for the next stage.
    Activations,
    /// Row gradients, for the previous stage.
    Gradients,
    /// Complete parameter gradient sums.
    AllReduce,
    /// Parameter gradient sums, divided over the replicas.
    ReduceScatter,
    /// Updated weights from all replicas.
    AllGather,
}

/// Communication in a step, with measured times.
///
/// Times are in nanoseconds since the start of the step; a weight gather may have started in the previous
/// step. A received message begins when the receive is posted and the lane is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimedCommunication {
    /// Lane that the communication ran in.
    pub lane: CommunicationLane,
    /// Communication kind.
    pub kind: CommunicationKind,
    /// Stage on this rank that it belongs to.
    pub stage: u16,
    /// Microbatch, for messages.
    pub microbatch: Option<u32>,
    /// Tensor size in bytes.
    pub bytes: u64,
    /// Start time in nanoseconds.
    pub start_ns: i64,
    /// End time in nanoseconds.
    pub end_ns: i64,
    /// Exposed time in nanoseconds: how long the compute lane waited for it, 0 if it is completely hidden.
    /// For a received message this contains the wait for the pass that produces it.
    pub exposed_ns: u64,
}

/// Communication description.
#[derive(Debug, Clone, Copy)]
pub(super) struct CommunicationPlace {
    pub(super) lane: CommunicationLane,
    pub(super) kind: CommunicationKind,
    pub(super) stage: u16,
    pub(super) microbatch: Option<u32>,
    pub(super) bytes: u64,
}

/// Communication that the compute lane has been ordered after; it may still be running on the device.
pub(super) struct Awaited<D: Device> {
    pub(super) place: CommunicationPlace,
    pub(super) span: Span<D>,
    /// Compute lane events before and after the wait.
    pub(super) wait: [D::Event; 2],
}

/// Orders the compute lane after a transfer, and records the wait.
pub(super) fn wait<D: Device>(
    device: &D,
    (place, transfer): (CommunicationPlace, Transfer<D>),
    awaited: &mut Vec<Awaited<D>>,
) -> Result<Option<Tensor<D>>> {
    let (span, before) = (transfer.span(), device.mark(Lane::Compute)?);
    let received = transfer.wait(Lane::Compute)?;
    awaited.push(Awaited { place, span, wait: [before, device.mark(Lane::Compute)?] });
    Ok(received)
}

/// Returns communication times, by lane in time order, after the device has completed the communication.
///
/// - `begin`: step start
pub(super) fn timed<D: Device>(
    device: &D,
    begin: &D::Event,
    awaited: &[Awaited<D>],
) -> Vec<TimedCommunication> {
    let times = |Awaited { place, span, wait: [before, behind] }: &Awaited<D>| {
        // If a device does not measure a transfer, use the wait.
        let [start, end] = span.get().map_or([before, behind], |[start, end]| [start, end]);
        let CommunicationPlace { lane, kind, stage, microbatch, bytes } = *place;
        let exposed = device.elapsed_ns(before, behind)?;
        Some(TimedCommunication {
            lane,
            kind,
            stage,
            microbatch,
            bytes,
            start_ns: device.elapsed_ns(begin, start)?,
            end_ns: device.elapsed_ns(begin, end)?,
            exposed_ns: u64::try_from(exposed).unwrap_or(0),
        })
    };
    let mut all: Vec<TimedCommunication> = awaited.iter().filter_map(times).collect();
    all.sort_by_key(|timed| (timed.lane, timed.end_ns, timed.start_ns));
    one_after_another(&mut all);
    all
}

/// Lets each communication begin when the previous communication in the same lane has ended.
fn one_after_another(all: &mut [TimedCommunication]) {
    let mut free_ns: BTreeMap<CommunicationLane, i64> = BTreeMap::new();
    for timed in all {
        let free_ns = free_ns.entry(timed.lane).or_insert(timed.start_ns);
        timed.start_ns = timed.start_ns.max(*free_ns).min(timed.end_ns);
        *free_ns = timed.end_ns.max(*free_ns);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use dflop_device::{Cpu, Runtime};

    use super::*;

    fn place(lane: CommunicationLane) -> CommunicationPlace {
        let kind = CommunicationKind::Activations;
        CommunicationPlace { lane, kind, stage: 1, microbatch: Some(2), bytes: 4 }
    }

    #[test]
    fn a_hidden_communication_exposes_nothing_and_an_awaited_one_its_wait() {
        const PAUSE: Duration = Duration::from_millis(20);
        let device = Cpu::new(1).unwrap();
        let begin = device.mark(Lane::Compute).unwrap();
        let mut awaited = Vec::new();
        for (is_hidden, to) in [(true, 5), (false, 6)] {
            let (span, start) = (Span::default(), device.mark(Lane::Compute).unwrap());
            let (times, own) = (span.clone(), device.clone());
            if is_hidden {
                std::thread::sleep(PAUSE);
            }
            let transfer = Transfer::timed(span, move |lane| {
                if !is_hidden {
                    std::thread::sleep(PAUSE);
                }
                times.set(start, own.mark(lane)?);
                Ok(None)
            });
            let place = place(CommunicationLane::Send { to });
            assert!(wait(&device, (place, transfer), &mut awaited).unwrap().is_none());
        }
        let timed = timed(&device, &begin, &awaited);
        let pause_ns = PAUSE.as_nanos() as i64;
        for timed in &timed {
            assert!(timed.start_ns >= 0 && timed.end_ns - timed.start_ns >= pause_ns, "{timed:?}");
            assert_eq!((timed.stage, timed.microbatch, timed.bytes), (1, Some(2), 4));
        }
        let [hidden, awaited] = timed[..] else { panic!("two communications: {timed:?}") };
        assert!(hidden.exposed_ns < pause_ns as u64 && awaited.exposed_ns >= pause_ns as u64, "{timed:?}");
        assert!(hidden.end_ns <= awaited.start_ns);
    }

    #[test]
    fn communication_of_a_lane_runs_one_after_another() {
        let of = |lane, start_ns, end_ns| {
            let kind = CommunicationKind::Gradients;
            TimedCommunication {
                lane,
                kind,
                stage: 0,
                microbatch: None,
                bytes: 1,
                start_ns,
                end_ns,
                exposed_ns: 0,
            }
        };
        let (one, other) = (CommunicationLane::Receive { from: 1 }, CommunicationLane::Receive { from: 2 });
        let mut all = [of(one, 0, 10), of(one, 0, 30), of(one, 40, 50), of(other, 5, 20)];
        one_after_another(&mut all);
        assert_eq!(all.map(|timed| timed.start_ns), [0, 10, 40, 5]);
    }
}
