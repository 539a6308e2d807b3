//! Exposed communication: the simulator agrees with a clock that ticks every nanosecond.

use dflop_balancer::schedule::{Action, Message, Pass, PassKind, PipelineLayout, ScheduleKind};
use dflop_balancer::{Communication, CompiledSchedule, StageTimes};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Message key: whether it has activations, the sending stage, and the microbatch.
type Key = (bool, u16, u32);

/// Times for a chain of stages.
#[derive(Debug)]
struct Times {
    stages: usize,
    microbatches: usize,
    passes: StageTimes,
    activation_ns: Vec<u64>,
    gradient_ns: Vec<u64>,
    reduce_ns: Vec<u64>,
    gather_ns: Vec<u64>,
}

impl Times {
    fn communication(&self) -> Communication {
        let free = Communication::free(self.stages, self.microbatches);
        let with_messages = free.messages(&self.activation_ns, &self.gradient_ns).unwrap();
        let with_sums = with_messages.reduce_grads(self.reduce_ns.clone(), true).unwrap();
        with_sums.gather_weights(self.gather_ns.clone()).unwrap()
    }

    fn message_ns(&self, (is_forward, stage, microbatch): Key) -> u64 {
        let row = |stage: usize| stage * self.microbatches + microbatch as usize;
        if is_forward {
            self.activation_ns[row(stage.into())]
        } else {
            self.gradient_ns[row(usize::from(stage) - 1)]
        }
    }
}

/// Messages between two ranks.
#[derive(Default)]
struct LaneState {
    waiting: VecDeque<Key>,
    traveling: Option<(Key, u64)>,
}

/// State over all ranks at a tick.
struct Clock<'a> {
    lists: &'a [Vec<Action>],
    times: &'a Times,
    next: Vec<usize>,
    running: Vec<Option<(Pass, u64)>>,
    started: BTreeSet<u16>,
    made: BTreeSet<Key>,
    arrived: BTreeSet<Key>,
    lanes: BTreeMap<(usize, usize), LaneState>,
    /// Latest end of the backward passes per stage so far, and the remaining passes.
    sums: Vec<(u64, usize)>,
}

impl<'a> Clock<'a> {
    fn new(lists: &'a [Vec<Action>], times: &'a Times) -> Self {
        let of_stage = |stage: usize| {
            let passes = lists.iter().flatten().filter_map(|action| action.pass());
            passes.filter(|pass| pass.kind.is_backward() && usize::from(pass.part.stage) == stage).count()
        };
        Self {
            lists,
            times,
            next: vec![0; lists.len()],
            running: vec![None; lists.len()],
            started: BTreeSet::new(),
            made: BTreeSet::new(),
            arrived: BTreeSet::new(),
            lanes: BTreeMap::new(),
            sums: (0..times.stages).map(|stage| (0, of_stage(stage))).collect(),
        }
    }

    /// Processes everything that happens at a tick; returns whether anything happened.
    fn advance(&mut self, now_ns: u64) -> bool {
        let mut has_changed = false;
        for lane in self.lanes.values_mut() {
            if let Some((key, _)) = lane.traveling.filter(|(_, end_ns)| *end_ns <= now_ns) {
                self.arrived.insert(key);
                lane.traveling = None;
                has_changed = true;
            }
            if let (None, Some(key)) = (lane.traveling, lane.waiting.front().copied()) {
                lane.waiting.pop_front();
                lane.traveling = Some((key, now_ns + self.times.message_ns(key)));
                has_changed = true;
            }
        }
        for rank in 0..self.lists.len() {
            if let Some((pass, _)) = self.running[rank].filter(|(_, end_ns)| *end_ns <= now_ns) {
                self.running[rank] = None;
                self.end(rank, pass, now_ns);
                has_changed = true;
            }
            if self.running[rank].is_none()
                && let Some(&action) = self.lists[rank].get(self.next[rank])
                && self.begin(rank, action, now_ns)
            {
                self.next[rank] += 1;
                has_changed = true;
            }
        }
        has_changed
    }

    /// Sends a pass's outputs.
    fn end(&mut self, rank: usize, pass: Pass, now_ns: u64) {
        if pass.kind.is_backward() {
            let (end_ns, left) = &mut self.sums[usize::from(pass.part.stage)];
            (*end_ns, *left) = (now_ns, *left - 1);
        }
        for action in &self.lists[rank] {
            let (message, is_forward) = match (action, pass.kind) {
                (Action::Send(message), PassKind::Forward) => (message, true),
                (Action::SendGrad(message), PassKind::Backward | PassKind::BackwardInput) => (message, false),
                _ => continue,
            };
            if message.part() != pass.part {
                continue;
            }
            let key = (is_forward, message.stage, message.microbatch);
            self.made.insert(key);
            if self.times.message_ns(key) == 0 {
                self.arrived.insert(key);
            } else {
                self.lanes.entry((rank, message.peer as usize)).or_default().waiting.push_back(key);
            }
        }
    }

    /// Begins an action, if it need not wait.
    fn begin(&mut self, rank: usize, action: Action, now_ns: u64) -> bool {
        if let Some(key) = awaited(action) {
            return self.arrived.contains(&key);
        }
        let Some(pass) = action.pass() else { return true };
        if self.awaits_weights(action, now_ns) {
            return false;
        }
        self.started.insert(pass.part.stage);
        self.running[rank] = Some((pass, now_ns + self.times.passes.pass_ns(pass)));
        true
    }

    fn awaits_weights(&self, action: Action, now_ns: u64) -> bool {
        let Action::Forward(part) = action else { return false };
        !self.started.contains(&part.stage) && now_ns < self.times.gather_ns[usize::from(part.stage)]
    }

    /// Returns whether a rank waits for communication that has begun.
    fn is_exposed(&self, rank: usize, now_ns: u64) -> bool {
        if self.running[rank].is_some() {
            return false;
        }
        let Some(&action) = self.lists[rank].get(self.next[rank]) else {
            let stages = (rank..self.times.stages).step_by(self.lists.len());
            return stages.map(|stage| (stage, self.sums[stage])).any(|(stage, (end_ns, left))| {
                left == 0 && (end_ns..end_ns + self.times.reduce_ns[stage]).contains(&now_ns)
            });
        };
        awaited(action).is_some_and(|key| self.made.contains(&key)) || self.awaits_weights(action, now_ns)
    }

    fn is_done(&self, now_ns: u64) -> bool {
        let are_done =
            |rank: usize| self.next[rank] == self.lists[rank].len() && self.running[rank].is_none();
        let sums = self.sums.iter().zip(&self.times.reduce_ns);
        (0..self.lists.len()).all(are_done)
            && sums.map(|((end_ns, _), sum_ns)| end_ns + sum_ns).all(|end_ns| end_ns <= now_ns)
    }
}

/// Returns the message that an action waits for.
fn awaited(action: Action) -> Option<Key> {
    match action {
        Action::Recv(Message { microbatch, stage, .. }) => Some((true, stage - 1, microbatch)),
        Action::RecvGrad(Message { microbatch, stage, .. }) => Some((false, stage + 1, microbatch)),
        _ => None,
    }
}

/// Returns the makespan, and each rank's exposed time.
fn by_ticks(lists: &[Vec<Action>], times: &Times) -> (u64, Vec<u64>) {
    let mut clock = Clock::new(lists, times);
    let mut exposed_ns = vec![0; lists.len()];
    for now_ns in 0..100_000 {
        while clock.advance(now_ns) {}
        if clock.is_done(now_ns) {
            return (now_ns, exposed_ns);
        }
        for (rank, exposed_ns) in exposed_ns.iter_mut().enumerate() {
            *exposed_ns += u64::from(clock.is_exposed(rank, now_ns));
        }
    }
    panic!("the lists never end");
}

fn assert_agrees(kind: ScheduleKind, ranks: usize, times: &Times) {
    let layout = PipelineLayout::chain(ranks, times.stages / ranks, times.microbatches).unwrap();
    let lists = layout.schedule(kind).unwrap();
    let communication = times.communication();
    let simulation = layout.simulate(&lists, &times.passes, &communication).unwrap();
    let (makespan_ns, exposed_ns) = by_ticks(&lists, times);
    assert_eq!((simulation.makespan_ns, &simulation.exposed_ns), (makespan_ns, &exposed_ns), "{kind}");
    let rows: Vec<usize> = (0..times.stages).collect();
    let mut compiled = CompiledSchedule::from_layout(kind, &layout, &rows, &communication).unwrap();
    assert_eq!(compiled.makespan_ns(&times.passes), makespan_ns, "{kind}, compiled");
}

proptest! {
    #[test]
    fn exposed_times_are_those_that_a_clock_counts(
        kind in prop::sample::select(vec![
            ScheduleKind::GPipe, ScheduleKind::OneForwardOneBackward,
            ScheduleKind::Interleaved { chunks: 2 }, ScheduleKind::ZeroBubble,
        ]),
        ranks in 1usize..4, rounds in 1usize..3,
        drawn in prop::collection::vec(0u64..9, 64), long in prop::collection::vec(0u64..40, 12),
    ) {
        let (stages, microbatches) = (ranks * kind.chunks(), ranks * rounds);
        let mut drawn = drawn.into_iter().cycle();
        let mut take = |count: usize| drawn.by_ref().take(count).collect::<Vec<u64>>();
        let cells = stages * microbatches;
        let times = Times {
            stages,
            microbatches,
            passes: StageTimes::new(stages, microbatches, take(cells), take(cells)).unwrap(),
            activation_ns: take(cells),
            gradient_ns: take(cells),
            reduce_ns: long[..stages].to_vec(),
            gather_ns: long[6..6 + stages].to_vec(),
        };
        assert_agrees(kind, ranks, &times);
    }
}

#[test]
fn exposed_times_made_by_hand_are_reproduced() {
    // Two stages, two microbatches: 2 ns forward, 3 ns backward, all forward passes first.
    let times = Times {
        stages: 2,
        microbatches: 2,
        passes: StageTimes::new(2, 2, vec![2; 4], vec![3; 4]).unwrap(),
        activation_ns: vec![5; 4],
        gradient_ns: vec![1; 4],
        reduce_ns: vec![4, 6],
        gather_ns: vec![1, 8],
    };
    let layout = PipelineLayout::chain(2, 1, 2).unwrap();
    let lists = layout.schedule(ScheduleKind::GPipe).unwrap();
    let simulation = layout.simulate(&lists, &times.passes, &times.communication()).unwrap();
    // Rank 0 waits 1 for its weights and computes until 5. Its messages travel in 3..8 and 8..13: the second
    // waits for the first, which arrives together with rank 1's weights. Rank 1 waits from 3, when the
    // message is sent, until 8, computes until 10, waits until 13, and computes until 21: backward ends at 18
    // and 21. Gradients arrive at 19 and 22. Rank 0 waits 18..19, computes until 22, then until 25.
    assert_eq!(rank_spans(&simulation.events, 1), [(8, 10), (13, 15), (15, 18), (18, 21)]);
    assert_eq!(rank_spans(&simulation.events, 0), [(1, 3), (3, 5), (19, 22), (22, 25)]);
    // Then rank 0 sums until 29, and rank 1 until 27.
    assert_eq!(simulation.makespan_ns, 29);
    assert_eq!(simulation.exposed_ns, [1 + 1 + 4, 5 + 3 + 6]);
    assert_eq!(simulation.communication_ns, [1 + 2 * 5 + 4, 8 + 2 + 6]);
    assert_agrees(ScheduleKind::GPipe, 2, &times);
}

fn rank_spans(events: &[dflop_balancer::Event], rank: usize) -> Vec<(u64, u64)> {
    let own = events.iter().filter(|event| event.rank == rank);
    own.map(|event| (event.start_ns, event.end_ns)).collect()
}
