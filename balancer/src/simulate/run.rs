//! Runs all ranks' lists until none can continue.

use super::times::Communication;
use super::{Activity, CriticalStep, Event, History, Simulation};
use crate::error::{Error, Result};
use crate::schedule::{Action, Message, Part, Pass, PassKind, PipelineLayout};
use std::collections::BTreeMap;

/// Records activities, with times or as a graph.
pub(super) trait Recorder {
    /// End of an activity, or of the later of several.
    type End: Copy + Default;

    /// Records a pass that starts when the cause ends.
    fn pass(&mut self, pass: Pass, rank: usize, cause: Option<Self::End>) -> Self::End;

    /// Records a different activity that starts when the cause ends.
    fn push(&mut self, activity: Activity, rank: usize, cause: Option<Self::End>, time_ns: u64) -> Self::End;

    /// Returns the later of two ends; the first if both are equal.
    fn later(&mut self, first: Option<Self::End>, second: Option<Self::End>) -> Option<Self::End>;

    /// Returns the time and rank of an end; 0 for both if they are unknown.
    fn end(&self, end: Self::End) -> (u64, usize);
}

/// Completed passes for a part.
#[derive(Clone, Copy, Default)]
struct Progress<E> {
    forward: Option<E>,
    /// Input gradient, once computed.
    input: Option<E>,
    /// Weight gradient, once computed.
    weight: Option<E>,
}

/// Messages between two parts; empty if they share a rank.
#[derive(Clone, Copy, Default)]
struct Link<E> {
    /// Activation message: when it left, when the send ended, and whether it was received.
    left: Option<E>,
    sent: Option<E>,
    is_taken: bool,
    /// Gradient messages in the opposite direction, with the same states.
    grad_left: Option<E>,
    grad_sent: Option<E>,
    is_grad_taken: bool,
}

/// Gradient sum: the arrived ranks, and the ends that it waits for and has.
#[derive(Clone, Default)]
struct Sum<E> {
    arrived: Vec<usize>,
    ready: Option<E>,
    done: Option<E>,
}

pub(super) struct Run<'a, R: Recorder> {
    layout: &'a PipelineLayout,
    communication: Option<&'a Communication>,
    recorder: R,
    /// End of the last activity on each rank.
    last: Vec<Option<R::End>>,
    /// Completed passes for every part, `[stages * microbatches]`.
    progress: Vec<Progress<R::End>>,
    /// Links from all parts to the producers, part by part.
    links: Vec<Link<R::End>>,
    /// First link index for every part.
    link_starts: Vec<usize>,
    /// Gradient sums, `[stages]`.
    sums: Vec<Sum<R::End>>,
    /// Parts that receive a part's activations or gradients, in send order.
    takers: BTreeMap<(bool, Part), Vec<Part>>,
    /// Last message between two ranks.
    lanes: BTreeMap<(usize, usize), R::End>,
    /// Stages whose weights a rank has waited for.
    gathered: Vec<(usize, u16)>,
    communication_ns: Vec<u64>,
    exposed_ns: Vec<u64>,
    /// Ranks that may be able to continue.
    waiting: Vec<usize>,
}

impl<'a, R: Recorder> Run<'a, R> {
    pub(super) fn new(
        layout: &'a PipelineLayout,
        communication: Option<&'a Communication>,
        recorder: R,
    ) -> Self {
        let mut link_starts = vec![0];
        for cell in 0..layout.stages() * layout.microbatches() {
            let (stage, microbatch) = (cell / layout.microbatches(), cell % layout.microbatches());
            let part = Part { microbatch: microbatch as u32, stage: stage as u16 };
            let links = if layout.has(part) { layout.producers(part).count() } else { 0 };
            link_starts.push(link_starts[cell] + links);
        }
        Self {
            layout,
            communication,
            recorder,
            last: vec![None; layout.ranks()],
            progress: vec![Progress::default(); layout.stages() * layout.microbatches()],
            links: vec![Link::default(); link_starts[layout.stages() * layout.microbatches()]],
            link_starts,
            sums: vec![Sum::default(); layout.stages()],
            takers: BTreeMap::new(),
            lanes: BTreeMap::new(),
            gathered: Vec::new(),
            communication_ns: vec![0; layout.ranks()],
            exposed_ns: vec![0; layout.ranks()],
            waiting: (0..layout.ranks()).rev().collect(),
        }
    }

    /// Runs the lists; returns what was recorded.
    ///
    /// # Errors
    /// [`Error::Deadlock`] with the first rank that never completes.
    pub(super) fn run(mut self, lists: &[Vec<Action>]) -> Result<Self> {
        for (rank, list) in lists.iter().enumerate() {
            for action in list {
                self.add_taker(rank, *action);
            }
        }
        let mut next = vec![0; lists.len()];
        // A rank runs as far as it can; an action that unblocks it queues it again.
        while let Some(rank) = self.waiting.pop() {
            while lists[rank].get(next[rank]).is_some_and(|action| self.try_action(rank, *action).is_some()) {
                next[rank] += 1;
            }
        }
        for (rank, list) in lists.iter().enumerate() {
            if let Some(&action) = list.get(next[rank]) {
                return Err(Error::Deadlock { rank, action: action.to_string() });
            }
        }
        Ok(self)
    }

    /// Returns the recorder of a completed run.
    pub(super) fn into_recorder(self) -> R {
        self.recorder
    }

    /// Runs an action if all inputs are present.
    fn try_action(&mut self, rank: usize, action: Action) -> Option<()> {
        match action {
            Action::Send(message) => self.send(rank, message),
            Action::SendGrad(message) => self.send_grad(rank, message),
            Action::Recv(message) => self.recv(rank, message),
            Action::RecvGrad(message) => self.recv_grad(rank, message),
            Action::ReduceGrads(stage) => self.reduce_grads(rank, stage),
            Action::Forward(_)
            | Action::Backward(_)
            | Action::BackwardInput(_)
            | Action::BackwardWeight(_) => self.compute(rank, action.pass()?),
        }
    }

    fn send(&mut self, rank: usize, message: Message) -> Option<()> {
        let part = self.own(rank, message.part())?;
        let consumer = self.peer(rank, self.layout.consumers(part), message)?;
        let link = self.link(part, consumer)?;
        let sent = self.links[link].left?;
        set_once(&mut self.links[link].sent, sent)?;
        self.waiting.push(self.layout.rank(consumer));
        Some(())
    }

    fn send_grad(&mut self, rank: usize, message: Message) -> Option<()> {
        let part = self.own(rank, message.part())?;
        let consumer = self.peer(rank, self.layout.producers(part), message)?;
        let link = self.link(consumer, part)?;
        let sent = self.links[link].grad_left?;
        set_once(&mut self.links[link].grad_sent, sent)?;
        self.waiting.push(self.layout.rank(consumer));
        Some(())
    }

    fn recv(&mut self, rank: usize, message: Message) -> Option<()> {
        let part = self.own(rank, message.part())?;
        let producer = self.peer(rank, self.layout.producers(part), message)?;
        let link = self.link(producer, part)?;
        let sent = self.links[link].sent?;
        raise_once(&mut self.links[link].is_taken)?;
        self.await_message(rank, self.progress[self.cell(producer)].forward, sent);
        Some(())
    }

    fn recv_grad(&mut self, rank: usize, message: Message) -> Option<()> {
        let part = self.own(rank, message.part())?;
        let producer = self.peer(rank, self.layout.consumers(part), message)?;
        let link = self.link(part, producer)?;
        let sent = self.links[link].grad_sent?;
        raise_once(&mut self.links[link].is_grad_taken)?;
        self.await_message(rank, self.progress[self.cell(producer)].input, sent);
        Some(())
    }

    fn compute(&mut self, rank: usize, pass: Pass) -> Option<()> {
        let part = self.own(rank, pass.part)?;
        let is_ready = match pass.kind {
            PassKind::Forward => self.has_input(rank, part),
            PassKind::Backward | PassKind::BackwardInput => self.has_gradient(rank, part),
            PassKind::BackwardWeight => self.progress[self.cell(part)].input.is_some(),
        };
        let cell = self.cell(part);
        let is_done = match pass.kind {
            PassKind::Forward => self.progress[cell].forward,
            PassKind::Backward | PassKind::BackwardInput => self.progress[cell].input,
            PassKind::BackwardWeight => self.progress[cell].weight,
        };
        if !is_ready || is_done.is_some() {
            return None;
        }
        if pass.kind == PassKind::Forward {
            self.await_weights(rank, part.stage);
        }
        let step = Some(self.recorder.pass(pass, rank, self.last[rank]));
        self.last[rank] = step;
        let progress = &mut self.progress[cell];
        match pass.kind {
            PassKind::Forward => progress.forward = step,
            // A whole backward pass is both halves at once.
            PassKind::Backward => (progress.input, progress.weight) = (step, step),
            PassKind::BackwardInput => progress.input = step,
            PassKind::BackwardWeight => progress.weight = step,
        }
        if let Some(made) = step.filter(|_| pass.kind != PassKind::BackwardWeight) {
            self.leave(rank, pass, made);
        }
        let sum = &mut self.sums[part.stage as usize];
        if pass.kind.is_backward() && self.communication.is_some_and(|times| times.is_overlapped) {
            sum.ready = self.recorder.later(sum.ready, step);
        }
        Some(())
    }

    /// Joins a sum; the rank waits for the other ranks unless sums are overlapped.
    fn reduce_grads(&mut self, rank: usize, stage: u16) -> Option<()> {
        let layout = self.layout;
        if stage as usize >= layout.stages() || !layout.holders(stage as usize).any(|holder| holder == rank) {
            return None;
        }
        let Some(times) = self.communication else { return Some(()) };
        let time_ns = times.reduce_ns[stage as usize];
        if time_ns == 0 {
            return Some(());
        }
        let sum = &mut self.sums[stage as usize];
        // The action is tried again once the other ranks arrived; each rank counts once.
        if !sum.arrived.contains(&rank) {
            sum.arrived.push(rank);
            if !times.is_overlapped {
                // Without overlap, the sum starts when the last rank arrives.
                sum.ready = self.recorder.later(sum.ready, self.last[rank]);
            }
            if sum.arrived.len() == layout.holders(stage as usize).count() {
                let at = sum.ready.map_or(rank, |ready| self.recorder.end(ready).1);
                sum.done = Some(self.recorder.push(Activity::ReduceGrads(stage), at, sum.ready, time_ns));
                for holder in layout.holders(stage as usize) {
                    self.communication_ns[holder] += time_ns;
                }
                self.waiting.extend(layout.holders(stage as usize).filter(|holder| *holder != rank));
            }
        }
        if !times.is_overlapped {
            self.last[rank] = Some(sum.done?);
            self.exposed_ns[rank] += time_ns;
        }
        Some(())
    }

    /// Whether all activations that a forward pass needs have arrived.
    fn has_input(&self, rank: usize, part: Part) -> bool {
        self.layout.producers(part).all(|producer| {
            if self.layout.rank(producer) == rank {
                return self.progress[self.cell(producer)].forward.is_some();
            }
            self.link(producer, part).is_some_and(|link| self.links[link].is_taken)
        })
    }

    /// Whether the forward pass is done and all activation gradients have arrived.
    fn has_gradient(&self, rank: usize, part: Part) -> bool {
        let has_gradient_from = |consumer| {
            if self.layout.rank(consumer) == rank {
                return self.progress[self.cell(consumer)].input.is_some();
            }
            self.link(part, consumer).is_some_and(|link| self.links[link].is_grad_taken)
        };
        self.progress[self.cell(part)].forward.is_some() && self.layout.consumers(part).all(has_gradient_from)
    }

    /// Returns the part, if it exists and the rank runs it.
    fn own(&self, rank: usize, part: Part) -> Option<Part> {
        (self.layout.has(part) && self.layout.rank(part) == rank).then_some(part)
    }

    /// Finds the part on the peer rank that a message names.
    fn peer(&self, rank: usize, mut parts: impl Iterator<Item = Part>, message: Message) -> Option<Part> {
        let peer = message.peer as usize;
        parts.find(|&part| peer != rank && self.layout.rank(part) == peer)
    }

    /// Returns the index of the link between two parts.
    fn link(&self, producer: Part, consumer: Part) -> Option<usize> {
        let place = self.layout.producers(consumer).position(|part| part == producer)?;
        Some(self.link_starts[self.cell(consumer)] + place)
    }

    /// Records the part that receives what a part on this rank sends.
    fn add_taker(&mut self, rank: usize, action: Action) {
        let taker = match action {
            Action::Send(message) => self.own(rank, message.part()).and_then(|part| {
                let consumer = self.peer(rank, self.layout.consumers(part), message)?;
                Some((true, part, consumer))
            }),
            Action::SendGrad(message) => self.own(rank, message.part()).and_then(|part| {
                let consumer = self.peer(rank, self.layout.producers(part), message)?;
                Some((false, part, consumer))
            }),
            _ => None,
        };
        if let Some((is_forward, part, consumer)) = taker {
            self.takers.entry((is_forward, part)).or_default().push(consumer);
        }
    }

    /// Sends a pass's messages.
    fn leave(&mut self, rank: usize, pass: Pass, made: R::End) {
        let (is_forward, part) = (pass.kind == PassKind::Forward, pass.part);
        for consumer in self.takers.remove(&(is_forward, part)).unwrap_or_default() {
            let (activity, row) = if is_forward {
                (Activity::Activations(part), self.cell(part))
            } else {
                (Activity::Gradients(consumer), self.cell(consumer))
            };
            let time_ns = self.communication.map_or(0, |times| {
                if is_forward { times.activation_ns[row] } else { times.gradient_ns[row] }
            });
            let ends = if is_forward { (part, consumer) } else { (consumer, part) };
            let Some(link) = self.link(ends.0, ends.1) else { continue };
            let left = Some(self.travel(activity, (rank, consumer), made, time_ns));
            let link = &mut self.links[link];
            if is_forward { link.left = left } else { link.grad_left = left }
        }
    }

    /// Records a message after the previous message in the lane; a zero-time message is not a separate step.
    fn travel(
        &mut self,
        activity: Activity,
        (from, consumer): (usize, Part),
        made: R::End,
        time_ns: u64,
    ) -> R::End {
        if time_ns == 0 {
            return made;
        }
        let to = self.layout.rank(consumer);
        let free = self.recorder.later(Some(made), self.lanes.get(&(from, to)).copied());
        let sent = self.recorder.push(activity, to, free, time_ns);
        self.lanes.insert((from, to), sent);
        self.communication_ns[from] += time_ns;
        sent
    }

    /// Makes a rank wait for a message.
    fn await_message(&mut self, rank: usize, made: Option<R::End>, sent: R::End) {
        let begin_ns = self.end_ns(self.last[rank]).max(self.end_ns(made));
        self.exposed_ns[rank] += self.end_ns(Some(sent)).saturating_sub(begin_ns);
        self.last[rank] = self.recorder.later(self.last[rank], Some(sent));
    }

    /// Makes a rank wait for a stage's weights, before the stage's first forward pass.
    fn await_weights(&mut self, rank: usize, stage: u16) {
        let time_ns = self.communication.map_or(0, |times| times.gather_ns[usize::from(stage)]);
        if time_ns == 0 || self.gathered.contains(&(rank, stage)) {
            return;
        }
        self.gathered.push((rank, stage));
        self.communication_ns[rank] += time_ns;
        self.exposed_ns[rank] += time_ns.saturating_sub(self.end_ns(self.last[rank]));
        let gathered = self.recorder.push(Activity::GatherWeights(stage), rank, None, time_ns);
        self.last[rank] = self.recorder.later(self.last[rank], Some(gathered));
    }

    fn end_ns(&self, end: Option<R::End>) -> u64 {
        end.map_or(0, |end| self.recorder.end(end).0)
    }

    /// Adds the time that each rank waits for overlapped sums after the rank's last pass.
    fn await_sums(&mut self) {
        if !self.communication.is_some_and(|times| times.is_overlapped) {
            return;
        }
        for rank in 0..self.layout.ranks() {
            let own = (0..self.layout.stages())
                .filter(|&stage| self.layout.holders(stage).any(|holder| holder == rank))
                .map(|stage| &self.sums[stage]);
            let idle_ns = own.filter_map(|sum| {
                let done_ns = self.end_ns(Some(sum.done?));
                let begin_ns = self.end_ns(self.last[rank]).max(self.end_ns(sum.ready));
                Some(done_ns.saturating_sub(begin_ns))
            });
            let idle_ns = idle_ns.max().unwrap_or(0);
            self.exposed_ns[rank] += idle_ns;
        }
    }

    fn cell(&self, part: Part) -> usize {
        part.stage as usize * self.layout.microbatches() + part.microbatch as usize
    }
}

impl Run<'_, History<'_>> {
    /// Returns the timeline of a completed run.
    pub(super) fn into_simulation(mut self) -> Simulation {
        self.await_sums();
        let mut events: Vec<Event> = self.recorder.steps().iter().filter_map(event).collect();
        // A stable sort keeps each rank's events in time order.
        events.sort_by_key(|event| event.rank);
        let mut busy_ns = vec![0; self.layout.ranks()];
        for event in &events {
            busy_ns[event.rank] += event.end_ns - event.start_ns;
        }
        let critical_path = self.recorder.critical_path();
        let makespan_ns = critical_path.last().map_or(0, |step| step.end_ns);
        let Self { communication_ns, exposed_ns, .. } = self;
        Simulation { makespan_ns, busy_ns, communication_ns, exposed_ns, events, critical_path }
    }
}

/// Returns the event for a pass.
fn event(step: &CriticalStep) -> Option<Event> {
    let Activity::Pass(Pass { kind, part }) = step.activity else { return None };
    let CriticalStep { rank, start_ns, end_ns, .. } = *step;
    let (stage, microbatch) = (part.stage as usize, part.microbatch);
    Some(Event { rank, stage, microbatch, kind, start_ns, end_ns })
}

/// Sets a step that is not set yet.
fn set_once<E>(place: &mut Option<E>, step: E) -> Option<()> {
    place.is_none().then(|| *place = Some(step))
}

/// Raises a flag that is not raised yet.
fn raise_once(flag: &mut bool) -> Option<()> {
    (!*flag).then(|| *flag = true)
}
