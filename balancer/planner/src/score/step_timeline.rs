//! Simulates a step for pipelines whose encoders and LLM differ in stages and DP degree.
//!
//! Each encoder is a chain of stages, concurrent with the other encoders; the LLM's first stage receives all
//! encoder outputs. A *shared* encoder's ranks process the media from all LLM ranks' microbatches in a *slot*
//! (the k-th microbatch on each LLM rank) and send the outputs together, so there is one time per slot, and a
//! slot's gradient returns when the last LLM rank has sent it. An encoder with the LLM's DP degree belongs to
//! its rank instead. Stages are numbered encoder by encoder, then LLM stages; the schedule orders their
//! passes.
//!
//! With one LLM rank this is the pipeline in [`dflop_balancer::simulate`]; a test compares them.

use super::ordered_timeline::{OrderedTimeline, is_ordered};
pub(crate) use super::step_times::{ChainTimes, LanePass, StepTimes};
use dflop_balancer::schedule::{
    LanePasses, StageLanes, StepLanes, StepNodes, StepShape, StepWalk, WalkState,
};
use std::cell::RefCell;

thread_local! {
    static TIMELINE: RefCell<StepTimeline> = RefCell::default();
}

/// Returns the step's end time.
pub(crate) fn makespan_ns(step: &StepTimes) -> u64 {
    TIMELINE.with_borrow_mut(|timeline| timeline.makespan_ns(step))
}

/// Returns all passes in a step, in order on every lane.
pub(crate) fn passes(step: &StepTimes) -> Vec<LanePass> {
    TIMELINE.with_borrow_mut(|timeline| timeline.passes(step))
}

/// Simulates steps, in memory that is reused.
#[derive(Debug, Clone, Default)]
struct StepTimeline {
    /// Connected passes for the last step, reused because all steps in a plan have the same passes.
    known: Option<((StepShape, StepLanes), StepWalk)>,
    /// Pass times, chain by chain.
    passes_ns: Vec<u64>,
    messages_ns: Vec<u64>,
    state: WalkState<u64>,
    /// Schedules with several stages per rank or split backward passes.
    ordered: OrderedTimeline,
}

impl StepTimeline {
    fn makespan_ns(&mut self, step: &StepTimes) -> u64 {
        if is_ordered(step.shape.kind) {
            return self.ordered.makespan_ns(step);
        }
        let key = (step.shape, self.copy_times(step));
        let known = self.known.take().filter(|(known, _)| *known == key);
        let (key, walk) = known.unwrap_or_else(|| {
            let walk = StepWalk::new(&key.0, &key.1);
            (key, walk)
        });
        let mut ends = PassEnds { step, passes_ns: &self.passes_ns, messages_ns: &self.messages_ns };
        let last_ns = walk.walk(&mut ends, &mut self.state);
        let end = |(stage, own): (usize, &StageLanes)| {
            let backward_ns = &self.passes_ns[own.passes[1] + (step.shape.slots - 1) * own.lanes..];
            let ended = last_ns[walk.stage_lanes(stage)].iter().zip(backward_ns);
            ended.map(|(end, last_ns)| end + step.exposed_reduce_ns(stage, *last_ns)).max().unwrap_or(0)
        };
        let makespan_ns = key.1.stages.iter().enumerate().map(end).max().unwrap_or(0);
        self.known = Some((key, walk));
        makespan_ns
    }

    fn passes(&mut self, step: &StepTimes) -> Vec<LanePass> {
        if is_ordered(step.shape.kind) {
            return self.ordered.passes(step);
        }
        let lanes = self.copy_times(step);
        let ends = PassEnds { step, passes_ns: &self.passes_ns, messages_ns: &self.messages_ns };
        let mut recorder = Recorder { ends, passes: Vec::new() };
        StepWalk::new(&step.shape, &lanes).walk(&mut recorder, &mut self.state);
        recorder.passes
    }

    /// Copies all times.
    fn copy_times(&mut self, step: &StepTimes) -> StepLanes {
        self.passes_ns.clear();
        self.messages_ns.clear();
        let mut stages = Vec::with_capacity(step.shape.stages);
        for chain in step.encoders.iter().chain([&step.llm]) {
            let (lanes, cells) = (chain.lanes, step.shape.slots * chain.lanes);
            let (first, messages) = (self.passes_ns.len(), self.messages_ns.len());
            let passes = |row: &usize| [first + 2 * row * cells, first + (2 * row + 1) * cells];
            stages.extend(chain.stages.iter().map(|row| StageLanes { lanes, passes: passes(row), messages }));
            if let Some(last) = stages.last_mut() {
                last.messages += cells;
            }
            chain.rows_ns.iter().flatten().for_each(|row_ns| self.passes_ns.extend(row_ns));
            for (hops, hop_ns) in [&chain.hop_ns, &chain.out_hop_ns].into_iter().enumerate() {
                self.messages_ns.extend(hop_ns);
                // Messages over free links take no time.
                self.messages_ns.resize(messages + (hops + 1) * cells, 0);
            }
        }
        StepLanes { ranks: step.ranks, stages }
    }
}

/// Ends of all passes in a step.
struct PassEnds<'a> {
    step: &'a StepTimes,
    passes_ns: &'a [u64],
    messages_ns: &'a [u64],
}

impl StepNodes for PassEnds<'_> {
    /// End time, nanoseconds.
    type Node = u64;

    fn start(&self) -> u64 {
        0
    }

    fn later(&mut self, _: &LanePasses, _: usize, [first_ns, second_ns]: [u64; 2]) -> u64 {
        first_ns.max(second_ns)
    }

    /// A zero-time message does not wait for the previous message.
    fn send(&mut self, time: usize, previous_ns: &mut u64, output_ns: u64) -> u64 {
        let hop_ns = self.messages_ns[time];
        if hop_ns == 0 {
            return output_ns;
        }
        *previous_ns = output_ns.max(*previous_ns) + hop_ns;
        *previous_ns
    }

    fn run(&mut self, passes: &LanePasses, lane: usize, previous_ns: u64, input_ns: u64) -> u64 {
        previous_ns.max(input_ns) + self.passes_ns[passes.time as usize + lane]
    }

    fn gather(&mut self, passes: &LanePasses, lane: usize, previous_ns: u64) -> u64 {
        let pass_ns = self.passes_ns[passes.time as usize + lane];
        previous_ns.max(self.step.gathered_ns(passes.pass.stage as usize, pass_ns))
    }

    fn announce(&mut self, _: &LanePasses, _: &[u64], _: usize) {}
}

/// Ends of all passes in a step, with a record of each pass.
struct Recorder<'a> {
    ends: PassEnds<'a>,
    passes: Vec<LanePass>,
}

impl StepNodes for Recorder<'_> {
    /// End time, nanoseconds.
    type Node = u64;

    fn start(&self) -> u64 {
        self.ends.start()
    }

    fn later(&mut self, passes: &LanePasses, lane: usize, inputs: [u64; 2]) -> u64 {
        self.ends.later(passes, lane, inputs)
    }

    fn send(&mut self, time: usize, previous_ns: &mut u64, output_ns: u64) -> u64 {
        self.ends.send(time, previous_ns, output_ns)
    }

    fn run(&mut self, passes: &LanePasses, lane: usize, previous_ns: u64, input_ns: u64) -> u64 {
        let end_ns = self.ends.run(passes, lane, previous_ns, input_ns);
        let start_ns = previous_ns.max(input_ns);
        let (stage, slot, is_forward) =
            (passes.pass.stage as usize, passes.pass.slot as usize, passes.pass.is_forward);
        self.passes.push(LanePass { stage, slot, lane, is_forward, start_ns, end_ns });
        end_ns
    }

    fn gather(&mut self, passes: &LanePasses, lane: usize, previous_ns: u64) -> u64 {
        self.ends.gather(passes, lane, previous_ns)
    }

    fn announce(&mut self, passes: &LanePasses, outputs: &[u64], messages: usize) {
        self.ends.announce(passes, outputs, messages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_balancer::schedule::{EncoderChain, EncoderChains, ModuleStages, PipelineLayout, ScheduleKind};
    use dflop_balancer::{Communication, StageTimes};
    use proptest::prelude::*;

    const KINDS: [ScheduleKind; 4] = [
        ScheduleKind::OneForwardOneBackward,
        ScheduleKind::GPipe,
        ScheduleKind::EncoderAhead { rounds: 1 },
        ScheduleKind::EncoderAhead { rounds: 3 },
    ];

    /// Builds a chain whose passes use the next of these times.
    fn chain(stages: usize, slots: usize, lanes: usize, times: &mut impl Iterator<Item = u64>) -> ChainTimes {
        let mut take = || times.by_ref().take(slots * lanes).collect::<Vec<u64>>();
        let rows_ns = (0..stages).map(|_| [take(), take()]).collect();
        ChainTimes::new(lanes, ((0..stages).collect(), rows_ns))
    }

    /// Builds a step with the given encoder stages, shared or not, and an LLM.
    fn step(
        kind: ScheduleKind,
        encoders: &[(usize, bool)],
        llm_stages: usize,
        [slots, ranks]: [usize; 2],
        times: &mut impl Iterator<Item = u64>,
    ) -> StepTimes {
        let stages = encoders.iter().map(|(stages, _)| stages).sum::<usize>() + llm_stages;
        let chains =
            encoders.iter().map(|(stages, _)| EncoderChain { stages: *stages as u16, has_backward: true });
        let shape = StepShape { kind, encoders: EncoderChains::new(chains), stages, slots };
        let lanes = |is_shared: bool| if is_shared { 1 } else { ranks };
        let encoders =
            encoders.iter().map(|(stages, is_shared)| chain(*stages, slots, lanes(*is_shared), times));
        let encoders = encoders.collect();
        StepTimes { encoders, llm: chain(llm_stages, slots, ranks, times), ..StepTimes::new(shape, ranks) }
    }

    /// Simulates a step by the executor's action lists: encoder ranks that share every round from all LLM
    /// ranks, or that belong to an LLM rank, and the LLM ranks.
    fn by_events(step: &StepTimes) -> u64 {
        let (kind, slots) = (step.shape.kind, step.shape.slots);
        let last = step.encoders.len();
        let module = |chain: &ChainTimes| ModuleStages::new(chain.stages.len(), chain.lanes).feeds(last);
        let encoder = |chain: &ChainTimes| {
            if chain.lanes == step.ranks && step.ranks > 1 {
                module(chain)
            } else {
                module(chain).share_rounds()
            }
        };
        let mut modules: Vec<ModuleStages> = step.encoders.iter().map(encoder).collect();
        modules.push(ModuleStages::new(step.llm.stages.len(), step.ranks));
        let layout = PipelineLayout::from_modules(&modules, slots).unwrap();
        let mut passes_ns = [Vec::new(), Vec::new()];
        for (way, ns) in passes_ns.iter_mut().enumerate() {
            for chain in step.encoders.iter().chain([&step.llm]) {
                for row in &chain.rows_ns {
                    ns.extend(&row[way]);
                    ns.extend(vec![0; layout.microbatches() - slots * chain.lanes]);
                }
            }
        }
        let [forward, backward] = passes_ns;
        let times = StageTimes::new(layout.stages(), layout.microbatches(), forward, backward).unwrap();
        let free = Communication::free(layout.stages(), layout.microbatches());
        layout.simulate(&layout.schedule(kind).unwrap(), &times, &free).unwrap().makespan_ns
    }

    proptest! {
        #[test]
        fn a_step_takes_what_the_simulator_says(
            kind in prop::sample::select(KINDS.to_vec()), ranks in 1usize..4,
            encoders in prop::collection::vec((1usize..4, any::<bool>()), 0..3),
            llm_stages in 1usize..5, slots in 1usize..9,
            times in prop::collection::vec(0u64..100, 2 * 10 * 3 * 8),
        ) {
            let step = step(kind, &encoders, llm_stages, [slots, ranks], &mut times.into_iter());
            prop_assert_eq!(StepTimeline::default().makespan_ns(&step), by_events(&step));
        }
    }

    proptest! {
        /// Two ranks with equal times take as long as a single rank, messages and sums included.
        #[test]
        fn equal_ranks_take_what_one_takes(
            kind in prop::sample::select(KINDS.to_vec()),
            encoders in prop::collection::vec((1usize..4, any::<bool>()), 0..3),
            llm_stages in 1usize..5, slots in 1usize..9,
            times in prop::collection::vec(0u64..100, 2 * 10 * 8),
            hops in prop::collection::vec(0u64..50, 24), reduce in prop::collection::vec(0u64..300, 10),
        ) {
            let mut one = step(kind, &encoders, llm_stages, [slots, 1], &mut times.into_iter());
            for encoder in &mut one.encoders {
                (encoder.hop_ns, encoder.out_hop_ns) = (hops[..slots].to_vec(), hops[8..8 + slots].to_vec());
            }
            one.llm.hop_ns = hops[16..16 + slots].to_vec();
            one.gather_ns = reduce.iter().rev().copied().collect();
            (one.reduce_ns, one.layers) = (reduce, (1..=10).collect());
            let twice = |row: &Vec<u64>| row.iter().flat_map(|ns| [*ns, *ns]).collect::<Vec<u64>>();
            let doubled = |chain: &ChainTimes| ChainTimes {
                lanes: 2,
                stages: chain.stages.clone(),
                rows_ns: chain.rows_ns.iter().map(|row| [twice(&row[0]), twice(&row[1])]).collect(),
                hop_ns: twice(&chain.hop_ns),
                out_hop_ns: twice(&chain.out_hop_ns),
                weights_ns: Vec::new(),
            };
            let encoder = |(chain, (_, is_shared)): (&ChainTimes, &(usize, bool))| {
                if *is_shared { chain.clone() } else { doubled(chain) }
            };
            let two = StepTimes {
                ranks: 2,
                encoders: one.encoders.iter().zip(&encoders).map(encoder).collect(),
                llm: doubled(&one.llm),
                ..one.clone()
            };
            let mut timeline = StepTimeline::default();
            prop_assert_eq!(timeline.makespan_ns(&one), timeline.makespan_ns(&two));
        }
    }

    #[test]
    fn passes_end_with_the_step() {
        let kind = ScheduleKind::OneForwardOneBackward;
        let mut times = [1, 1, 1, 4, 1, 4].into_iter();
        let step = step(kind, &[(1, true)], 1, [1, 2], &mut times);
        let passes = StepTimeline::default().passes(&step);
        let spans: Vec<[u64; 2]> = passes.iter().map(|pass| [pass.start_ns, pass.end_ns]).collect();
        assert_eq!(spans, [[0, 1], [1, 2], [1, 5], [2, 3], [5, 9], [9, 10]]);
        let places: Vec<[usize; 2]> = passes.iter().map(|pass| [pass.stage, pass.lane]).collect();
        assert_eq!(places, [[0, 0], [1, 0], [1, 1], [1, 0], [1, 1], [0, 0]]);
    }

    /// Two LLM ranks taking 1 and 4 after an encoder taking 1, forward and backward alike: the encoder's
    /// backward waits for the slower rank.
    #[test]
    fn the_encoder_waits_for_the_slowest_rank() {
        let mut times = [1, 1, 1, 4, 1, 4].into_iter();
        let kind = ScheduleKind::OneForwardOneBackward;
        let mut shared = step(kind, &[(1, true)], 1, [1, 2], &mut times);
        assert_eq!(StepTimeline::default().makespan_ns(&shared), 1 + 4 + 4 + 1);
        (shared.encoders[0].out_hop_ns, shared.reduce_ns) = (vec![10], vec![5, 0]);
        assert_eq!(StepTimeline::default().makespan_ns(&shared), 1 + 10 + 4 + 4 + 10 + 1 + 5);
    }

    /// Encoders taking 3 on both ranks, neither of which waits for the other rank.
    #[test]
    fn ranks_with_encoders_of_their_own_do_not_wait_for_each_other() {
        let kind = ScheduleKind::OneForwardOneBackward;
        let llm = [9, 1, 9, 1, 1, 9, 1, 9];
        let run = |is_shared: bool| {
            let encoder = vec![3; if is_shared { 8 } else { 16 }];
            let mut times = encoder.into_iter().chain(llm).chain(llm);
            StepTimeline::default().makespan_ns(&step(kind, &[(1, is_shared)], 1, [4, 2], &mut times))
        };
        assert!(run(false) < run(true), "{} {}", run(false), run(true));
    }

    /// Four layers of 10 backward: with a sum of 5 each, only the last sum is exposed; with 20 each, three
    /// sums of four run after the first layer is done.
    #[test]
    fn sums_of_gradients_run_beside_the_last_backward_pass() {
        let kind = ScheduleKind::OneForwardOneBackward;
        let mut step = step(kind, &[], 1, [1, 1], &mut [20, 40].into_iter());
        (step.reduce_ns, step.layers) = (vec![20], vec![4]);
        assert_eq!(StepTimeline::default().makespan_ns(&step), 20 + 40 + 5);
        step.reduce_ns = vec![80];
        assert_eq!(StepTimeline::default().makespan_ns(&step), 20 + 10 + 80);
    }

    /// Two layers of 10 forward: with a gather of 10 each, only the first gather is exposed; with 30 each,
    /// the second layer waits for the second gather.
    #[test]
    fn weights_are_gathered_beside_the_first_forward_pass() {
        let kind = ScheduleKind::OneForwardOneBackward;
        let mut step = step(kind, &[], 1, [1, 1], &mut [20, 40].into_iter());
        (step.gather_ns, step.layers) = (vec![20], vec![2]);
        assert_eq!(StepTimeline::default().makespan_ns(&step), 10 + 20 + 40);
        step.gather_ns = vec![60];
        assert_eq!(StepTimeline::default().makespan_ns(&step), 60 + 10 + 40);
    }

    /// Passes of 1, messages of 10 forward: the second message waits for the first.
    #[test]
    fn messages_of_a_lane_run_one_after_another() {
        let kind = ScheduleKind::GPipe;
        let mut two = step(kind, &[], 2, [2, 1], &mut [1; 8].into_iter());
        two.llm.hop_ns = vec![10, 10];
        // Forward 1, two messages, a forward and a backward pass, then two messages back and a backward pass.
        assert_eq!(StepTimeline::default().makespan_ns(&two), (1 + 10 + 10 + 1) + 1 + 10 + 10 + 1);
    }

    /// The first rank is slow first, the second rank last: an encoder ahead lets the fast rank go on.
    #[test]
    fn an_encoder_ahead_lets_ranks_drift() {
        let llm = [9, 1, 9, 1, 1, 9, 1, 9];
        let of = |kind| {
            let mut times = [1; 8].into_iter().chain(llm).chain(llm);
            step(kind, &[(1, true)], 1, [4, 2], &mut times)
        };
        let makespan = |kind| StepTimeline::default().makespan_ns(&of(kind));
        let ahead = makespan(ScheduleKind::EncoderAhead { rounds: 2 });
        assert!(ahead < makespan(ScheduleKind::OneForwardOneBackward), "{ahead}");
    }
}
