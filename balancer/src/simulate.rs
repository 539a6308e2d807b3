//! Runs a pipeline schedule on predicted times, without devices.
//!
//! Stages run their lists in order; a stage waits where its input is not there yet, sends take no time.
//! All times are whole nanoseconds. [`crate::makespan`] is the fast way to the makespan alone.

use crate::error::{Error, Result};
use crate::schedule::Action;

/// How long every stage computes every microbatch, checked once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageTimes {
    stages: usize,
    microbatches: usize,
    forward_ns: Vec<u64>,
    backward_ns: Vec<u64>,
}

/// One pass of one microbatch through one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Index of the stage.
    pub stage: usize,
    /// Index of the microbatch.
    pub microbatch: u32,
    /// Whether it is the backward pass.
    pub is_backward: bool,
    /// When the pass begins, nanoseconds since the step's begin.
    pub start_ns: u64,
    /// When the pass ends.
    pub end_ns: u64,
}

/// What running a schedule takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Simulation {
    /// When the last pass ends, nanoseconds.
    pub makespan_ns: u64,
    /// How long each stage computes, `[stages]` nanoseconds.
    pub busy_ns: Vec<u64>,
    /// All passes, stage by stage, each in the order of time.
    pub events: Vec<Event>,
}

impl StageTimes {
    /// Checks given times of both passes.
    ///
    /// - `forward_ns`, `backward_ns`: `[stages * microbatches]`, row-major by stage, nanoseconds
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::Config`] if there is no stage, or all times together do not fit 63 bits.
    pub fn new(
        stages: usize,
        microbatches: usize,
        forward_ns: Vec<u64>,
        backward_ns: Vec<u64>,
    ) -> Result<Self> {
        let expected = stages.saturating_mul(microbatches);
        for (field, times) in [("forward_ns", &forward_ns), ("backward_ns", &backward_ns)] {
            if times.len() != expected {
                return Err(Error::Length { field, found: times.len(), expected });
            }
        }
        if stages == 0 {
            return Err(Error::Config { setting: "stages", reason: "there is none".to_owned() });
        }
        let all = forward_ns.iter().chain(&backward_ns);
        let sum = all.fold(0_u64, |sum, time| sum.saturating_add(*time));
        if i64::try_from(sum).is_err() {
            return Err(Error::Config { setting: "stage times", reason: "their sum overflows".to_owned() });
        }
        Ok(Self { stages, microbatches, forward_ns, backward_ns })
    }

    /// Splits times of forward and backward together, one to two.
    ///
    /// - `times_ns`: `[stages * microbatches]`, row-major by stage, nanoseconds
    ///
    /// # Errors
    /// Those of [`StageTimes::new`].
    pub fn split(stages: usize, microbatches: usize, times_ns: &[u64]) -> Result<Self> {
        let (forward_ns, backward_ns) = times_ns.iter().map(|time| split_time(*time)).unzip();
        Self::new(stages, microbatches, forward_ns, backward_ns)
    }

    /// Returns the number of stages, at least 1.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Returns the number of microbatches.
    #[must_use]
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// Times of the forward passes, `[stages * microbatches]`.
    pub(crate) fn forward_ns(&self) -> &[u64] {
        &self.forward_ns
    }

    /// Times of the backward passes, `[stages * microbatches]`.
    pub(crate) fn backward_ns(&self) -> &[u64] {
        &self.backward_ns
    }
}

/// Splits the time of forward and backward together: a third, rounded down, and the rest.
#[must_use]
pub fn split_time(time_ns: u64) -> (u64, u64) {
    (time_ns / 3, time_ns - time_ns / 3)
}

impl Simulation {
    /// Returns how long each stage waits, `[stages]` nanoseconds.
    #[must_use]
    pub fn idle_ns(&self) -> Vec<u64> {
        self.busy_ns.iter().map(|busy| self.makespan_ns - busy).collect()
    }

    /// Returns the share of all stages' time that is waiting, in `0..1`.
    #[must_use]
    pub fn bubble_fraction(&self) -> f64 {
        if self.makespan_ns == 0 {
            return 0.0;
        }
        let busy: f64 = self.busy_ns.iter().map(|busy| *busy as f64).sum();
        1.0 - busy / (self.makespan_ns as f64 * self.busy_ns.len() as f64)
    }
}

/// Runs action lists, one per stage.
///
/// The lists need not come from [`schedule`](crate::schedule::schedule): whatever never gets its input is
/// an error.
///
/// # Errors
/// [`Error::Length`] if there is not a list per stage; [`Error::Deadlock`] with the first stage that waits
/// for ever, be it for a message, for a pass of its own or for a microbatch that does not exist.
///
/// # Examples
/// ```
/// use dflop_balancer::schedule::{ScheduleKind, schedule};
/// use dflop_balancer::{StageTimes, simulate};
///
/// // two stages, three microbatches, 3 ns each: (2 - 1) / 3 of the ideal time is added by the bubble
/// let lists: Vec<_> = (0..2).map(|s| schedule(ScheduleKind::OneForwardOneBackward, s, 2, 3)).collect();
/// let simulation = simulate(&lists, &StageTimes::split(2, 3, &[3; 6])?)?;
/// assert_eq!(simulation.makespan_ns, 12);
/// assert!((simulation.bubble_fraction() - 0.25).abs() < 1e-12);
/// # Ok::<(), dflop_balancer::Error>(())
/// ```
pub fn simulate(lists: &[Vec<Action>], times: &StageTimes) -> Result<Simulation> {
    if lists.len() != times.stages {
        return Err(Error::Length { field: "lists", found: lists.len(), expected: times.stages });
    }
    let mut run = Run::new(times);
    let mut next = vec![0; lists.len()];
    loop {
        let before = next.clone();
        for (stage, list) in lists.iter().enumerate() {
            while list.get(next[stage]).is_some_and(|action| run.try_action(stage, *action)) {
                next[stage] += 1;
            }
        }
        if before == next {
            break;
        }
    }
    for (stage, list) in lists.iter().enumerate() {
        if let Some(&action) = list.get(next[stage]) {
            return Err(Error::Deadlock { stage, action });
        }
    }
    Ok(run.finish())
}

/// When a microbatch reached each point of a stage.
#[derive(Clone, Copy, Default)]
struct Progress {
    received: Option<u64>,
    forwarded: Option<u64>,
    sent: Option<u64>,
    grad_received: Option<u64>,
    backwarded: Option<u64>,
    grad_sent: Option<u64>,
}

struct Run<'a> {
    times: &'a StageTimes,
    clock_ns: Vec<u64>,
    /// `[stages * microbatches]`.
    progress: Vec<Progress>,
    events: Vec<Vec<Event>>,
}

impl<'a> Run<'a> {
    fn new(times: &'a StageTimes) -> Self {
        Self {
            times,
            clock_ns: vec![0; times.stages],
            progress: vec![Progress::default(); times.stages * times.microbatches],
            events: vec![Vec::new(); times.stages],
        }
    }

    /// Runs an action if what it needs is there; returns whether it was.
    fn try_action(&mut self, stage: usize, action: Action) -> bool {
        match action {
            Action::Recv(microbatch) => {
                let sent = stage.checked_sub(1).and_then(|before| self.at(before, microbatch)?.sent);
                self.arrive(stage, microbatch, sent, |progress| &mut progress.received)
            }
            Action::RecvGrad(microbatch) => {
                let sent = self.at(stage + 1, microbatch).and_then(|progress| progress.grad_sent);
                self.arrive(stage, microbatch, sent, |progress| &mut progress.grad_received)
            }
            Action::Send(microbatch) => {
                let ready = self.at(stage, microbatch).and_then(|progress| progress.forwarded);
                self.arrive(stage, microbatch, ready, |progress| &mut progress.sent)
            }
            Action::SendGrad(microbatch) => {
                let ready = self.at(stage, microbatch).and_then(|progress| progress.backwarded);
                self.arrive(stage, microbatch, ready, |progress| &mut progress.grad_sent)
            }
            Action::Forward(microbatch) => {
                let Some(progress) = self.at(stage, microbatch) else { return false };
                let is_ready = stage == 0 || progress.received.is_some();
                is_ready && self.compute(stage, microbatch, false)
            }
            Action::Backward(microbatch) => {
                let Some(progress) = self.at(stage, microbatch) else { return false };
                let is_last = stage + 1 == self.times.stages;
                let is_ready = progress.forwarded.is_some() && (is_last || progress.grad_received.is_some());
                is_ready && self.compute(stage, microbatch, true)
            }
        }
    }

    /// Notes a message at the later of the stage's clock and when it is ready, if it ever is.
    fn arrive(
        &mut self,
        stage: usize,
        microbatch: u32,
        ready: Option<u64>,
        point: fn(&mut Progress) -> &mut Option<u64>,
    ) -> bool {
        let Some(ready) = ready else { return false };
        let clock = self.clock_ns[stage].max(ready);
        let cell = self.cell(stage, microbatch);
        self.clock_ns[stage] = clock;
        *point(&mut self.progress[cell]) = Some(clock);
        true
    }

    /// Runs a pass whose inputs are there.
    fn compute(&mut self, stage: usize, microbatch: u32, is_backward: bool) -> bool {
        let cell = self.cell(stage, microbatch);
        let times = if is_backward { &self.times.backward_ns } else { &self.times.forward_ns };
        let start_ns = self.clock_ns[stage];
        let end_ns = start_ns + times[cell];
        let progress = &mut self.progress[cell];
        *if is_backward { &mut progress.backwarded } else { &mut progress.forwarded } = Some(end_ns);
        self.clock_ns[stage] = end_ns;
        self.events[stage].push(Event { stage, microbatch, is_backward, start_ns, end_ns });
        true
    }

    fn at(&self, stage: usize, microbatch: u32) -> Option<Progress> {
        let exists = stage < self.times.stages && (microbatch as usize) < self.times.microbatches;
        exists.then(|| self.progress[self.cell(stage, microbatch)])
    }

    fn cell(&self, stage: usize, microbatch: u32) -> usize {
        stage * self.times.microbatches + microbatch as usize
    }

    fn finish(self) -> Simulation {
        let busy = |events: &Vec<Event>| events.iter().map(|event| event.end_ns - event.start_ns).sum();
        Simulation {
            makespan_ns: self.clock_ns.into_iter().max().unwrap_or(0),
            busy_ns: self.events.iter().map(busy).collect(),
            events: self.events.into_iter().flatten().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{ScheduleKind, schedule};

    fn run(kind: ScheduleKind, stages: usize, microbatches: usize, times_ns: &[u64]) -> Simulation {
        let lists: Vec<_> = (0..stages).map(|stage| schedule(kind, stage, stages, microbatches)).collect();
        simulate(&lists, &StageTimes::split(stages, microbatches, times_ns).unwrap()).unwrap()
    }

    #[test]
    fn equal_microbatches_meet_the_closed_form() {
        for kind in ScheduleKind::ALL {
            for stages in 1..7 {
                for microbatches in 1..12 {
                    let simulation = run(kind, stages, microbatches, &vec![9; stages * microbatches]);
                    assert_eq!(simulation.makespan_ns as usize, 9 * (microbatches + stages - 1));
                    let bubble = (stages - 1) as f64 / (microbatches + stages - 1) as f64;
                    assert!((simulation.bubble_fraction() - bubble).abs() < 1e-12);
                    assert_eq!(simulation.idle_ns(), vec![9 * (stages as u64 - 1); stages]);
                }
            }
        }
    }

    #[test]
    fn a_timeline_made_by_hand_is_reproduced() {
        // Stage 0: 3 and 6 ns, stage 1: 6 and 3 ns; forward is a third.
        let simulation = run(ScheduleKind::OneForwardOneBackward, 2, 2, &[3, 6, 6, 3]);
        let spans: Vec<_> = simulation
            .events
            .iter()
            .map(|event| (event.stage, event.microbatch, event.is_backward, event.start_ns, event.end_ns))
            .collect();
        let expected = [
            (0, 0, false, 0, 1),
            (0, 1, false, 1, 3),
            (0, 0, true, 7, 9),
            (0, 1, true, 10, 14),
            (1, 0, false, 1, 3),
            (1, 0, true, 3, 7),
            (1, 1, false, 7, 8),
            (1, 1, true, 8, 10),
        ];
        assert_eq!(spans, expected);
        assert_eq!((simulation.makespan_ns, simulation.busy_ns), (14, vec![9, 9]));
    }

    #[test]
    fn lists_that_wait_for_one_another_are_an_error() {
        let times = StageTimes::split(2, 1, &[3, 3]).unwrap();
        let early = [vec![Action::RecvGrad(0), Action::Forward(0), Action::Send(0)], vec![Action::Recv(0)]];
        let error = simulate(&early, &times).unwrap_err().to_string();
        assert_eq!(error, "stage 0 waits for ever at RecvGrad(0)");
    }

    #[test]
    fn a_pass_without_its_input_is_an_error() {
        let times = StageTimes::split(2, 1, &[3, 3]).unwrap();
        for (list, action) in [
            (vec![Action::Forward(0)], Action::Forward(0)),
            (vec![Action::Backward(0)], Action::Backward(0)),
            (vec![Action::SendGrad(0)], Action::SendGrad(0)),
            (vec![Action::Recv(7)], Action::Recv(7)),
        ] {
            let found = simulate(&[vec![], list], &times).unwrap_err();
            assert!(matches!(found, Error::Deadlock { stage: 1, action: at } if at == action));
        }
    }

    #[test]
    fn wrong_lengths_are_errors() {
        assert!(StageTimes::split(2, 2, &[1; 3]).is_err());
        assert!(StageTimes::split(0, 0, &[]).is_err());
        assert!(StageTimes::split(1, 2, &[u64::MAX; 2]).is_err());
        assert!(simulate(&[], &StageTimes::split(1, 1, &[1]).unwrap()).is_err());
    }

    #[test]
    fn a_third_rounded_down_is_forward() {
        assert_eq!([0, 1, 2, 3, 8].map(split_time), [(0, 0), (0, 1), (0, 2), (1, 2), (2, 6)]);
    }
}
