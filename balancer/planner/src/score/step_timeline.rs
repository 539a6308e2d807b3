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
use super::step_times::time_at as hop;
pub(crate) use super::step_times::{ChainTimes, LanePass, StepTimes};
use dflop_balancer::schedule::{StepOrder, StepShape};

/// Stage in a step.
#[derive(Clone, Copy)]
struct StagePlace<'a> {
    chain: &'a ChainTimes,
    /// Index in the chain, then in the step.
    inner: usize,
    stage: usize,
    is_llm: bool,
}

/// Pass end times; reused between steps to avoid allocation.
#[derive(Debug, Clone, Default)]
pub(crate) struct StepTimeline {
    /// End times by stage and rank; a shared encoder has a single rank.
    end_ns: Vec<u64>,
    /// Output times of each stage's last pass: the next stage runs this slot before the stage runs its next
    /// pass.
    forward_out_ns: Vec<u64>,
    backward_out_ns: Vec<u64>,
    /// Arrival times of the last messages, from each stage to the next and back, indexed by the stage nearer
    /// to the input: messages in a lane run sequentially.
    forward_sent_ns: Vec<u64>,
    backward_sent_ns: Vec<u64>,
    /// Gradient times from the LLM's first stage, by slot and rank: an encoder that runs ahead reads them
    /// later.
    returned_ns: Vec<u64>,
    /// Pass order in the last step, reused because all steps in a plan have the same order.
    order: Option<(StepShape, StepOrder)>,
    /// Schedules with several stages per rank or split backward passes.
    ordered: OrderedTimeline,
}

impl StepTimeline {
    /// Returns the step's end time.
    pub(crate) fn makespan_ns(&mut self, step: &StepTimes) -> u64 {
        if is_ordered(step.shape.kind) {
            return self.ordered.makespan_ns(step);
        }
        let known = self.order.take().filter(|(shape, _)| *shape == step.shape);
        let (shape, order) = known.unwrap_or_else(|| (step.shape, StepOrder::new(&step.shape)));
        let makespan_ns = if step.ranks == 1 && step.encoders.len() < 2 {
            self.chain_ns(step, &order)
        } else {
            self.run(step, &order)
        };
        self.order = Some((shape, order));
        makespan_ns
    }

    /// Returns all passes in a step, in order on every lane.
    pub(crate) fn passes(&mut self, step: &StepTimes) -> Vec<LanePass> {
        if is_ordered(step.shape.kind) {
            return self.ordered.passes(step);
        }
        let (order, places) = (StepOrder::new(&step.shape), places(step));
        self.clear(places.len() * step.ranks, step.shape.slots * step.ranks);
        let mut passes = Vec::with_capacity(order.passes.len() * step.ranks);
        for pass in &order.passes {
            let (place, slot, is_forward) =
                (places[pass.stage as usize], pass.slot as usize, pass.is_forward);
            if is_forward {
                self.forward(step, place, slot);
            } else {
                self.backward(step, place, slot);
            }
            let lanes = place.chain.lanes;
            let passes_ns = place.chain.passes_ns(place.inner, usize::from(!is_forward));
            let times_ns = &passes_ns[slot * lanes..(slot + 1) * lanes];
            let ends_ns = &self.end_ns[place.stage * step.ranks..][..lanes];
            passes.extend(times_ns.iter().zip(ends_ns).enumerate().map(|(lane, (time_ns, end_ns))| {
                let (start_ns, end_ns) = (end_ns - time_ns, *end_ns);
                LanePass { stage: place.stage, slot, lane, is_forward, start_ns, end_ns }
            }));
        }
        passes
    }

    /// Clears the end times for this many cells.
    fn clear(&mut self, cells: usize, returned: usize) {
        for (ends, cells) in [
            (&mut self.end_ns, cells),
            (&mut self.forward_out_ns, cells),
            (&mut self.backward_out_ns, cells),
            (&mut self.forward_sent_ns, cells),
            (&mut self.backward_sent_ns, cells),
            (&mut self.returned_ns, returned),
        ] {
            ends.clear();
            ends.resize(cells, 0);
        }
    }

    fn run(&mut self, step: &StepTimes, order: &StepOrder) -> u64 {
        let places = places(step);
        self.clear(places.len() * step.ranks, step.shape.slots * step.ranks);
        for pass in &order.passes {
            let (place, slot) = (places[pass.stage as usize], pass.slot as usize);
            if pass.is_forward { self.forward(step, place, slot) } else { self.backward(step, place, slot) }
        }
        let last_slot = step.shape.slots - 1;
        let end = |place: &StagePlace<'_>| {
            let (first, lanes) = (place.stage * step.ranks, place.chain.lanes);
            let passes_ns = &place.chain.passes_ns(place.inner, 1)[last_slot * lanes..];
            let ended = self.end_ns[first..first + lanes].iter().zip(passes_ns);
            ended.map(|(end, last_ns)| end + step.exposed_reduce_ns(place.stage, *last_ns)).max().unwrap_or(0)
        };
        places.iter().map(end).max().unwrap_or(0)
    }

    fn forward(&mut self, step: &StepTimes, place: StagePlace<'_>, slot: usize) {
        let StagePlace { chain, inner, stage, is_llm } = place;
        let cell = stage * step.ranks;
        let cells = slot * chain.lanes..(slot + 1) * chain.lanes;
        let times = &chain.passes_ns(inner, 0)[cells.clone()];
        let (before, here) = self.forward_out_ns.split_at_mut(cell);
        let (ends, outs) = (&mut self.end_ns[cell..cell + chain.lanes], &mut here[..chain.lanes]);
        if slot == 0 {
            let gathered = times.iter().map(|time| step.gathered_ns(stage, *time));
            ends.iter_mut().zip(gathered).for_each(|(end, gathered)| *end = (*end).max(gathered));
        }
        let sent_ns = &mut self.forward_sent_ns;
        if inner > 0 {
            let (made, sent) = (&before[cell - step.ranks..], &mut sent_ns[cell - step.ranks..]);
            pass_all(ends, outs, times, arrivals(made, sent, chain.hop_ns.get(cells)));
        } else if is_llm {
            let ends_of_encoders = || step.encoders.iter().zip(step.shape.encoders.ends());
            let arrival = |rank: usize| {
                let sent = ends_of_encoders().map(|(encoder, end)| {
                    let lane = rank.min(encoder.lanes - 1);
                    let hop_ns = hop(&encoder.out_hop_ns, slot * encoder.lanes + lane);
                    let cell = end * step.ranks;
                    send(&mut sent_ns[cell + rank], before[cell + lane], hop_ns)
                });
                sent.max().unwrap_or(0)
            };
            pass_all(ends, outs, times, arrival);
        } else {
            pass_all(ends, outs, times, |_| 0);
        }
    }

    fn backward(&mut self, step: &StepTimes, place: StagePlace<'_>, slot: usize) {
        let StagePlace { chain, inner, stage, is_llm } = place;
        let cell = stage * step.ranks;
        let cells = slot * chain.lanes..(slot + 1) * chain.lanes;
        let times = &chain.passes_ns(inner, 1)[cells.clone()];
        let (before, after) = self.backward_out_ns.split_at_mut(cell + step.ranks);
        let ends = &mut self.end_ns[cell..cell + chain.lanes];
        let outs = &mut before[cell..cell + chain.lanes];
        let sent_ns = &mut self.backward_sent_ns[cell..cell + step.ranks];
        if inner + 1 < chain.stages.len() {
            pass_all(ends, outs, times, arrivals(after, sent_ns, chain.hop_ns.get(cells)));
        } else if is_llm {
            pass_all(ends, outs, times, |_| 0);
        } else {
            let returned = &self.returned_ns[slot * step.ranks..(slot + 1) * step.ranks];
            let arrival = |lane: usize| {
                let hop_ns = hop(&chain.out_hop_ns, slot * chain.lanes + lane);
                // A shared encoder waits for all ranks.
                let ranks = if chain.lanes == 1 { 0..step.ranks } else { lane..lane + 1 };
                let arrivals = ranks.map(|rank| send(&mut sent_ns[rank], returned[rank], hop_ns));
                arrivals.max().unwrap_or(0)
            };
            pass_all(ends, outs, times, arrival);
        }
        if is_llm && inner == 0 {
            self.returned_ns[slot * step.ranks..(slot + 1) * step.ranks].copy_from_slice(outs);
        }
    }

    /// Returns the end time for a step with one LLM rank and at most one encoder, where every stage has one
    /// time per slot and one neighbor on each side.
    fn chain_ns<'a>(&mut self, step: &'a StepTimes, order: &StepOrder) -> u64 {
        let places = places(step);
        let encoder_stages = places.iter().filter(|place| !place.is_llm).count();
        let rows: Vec<[&[u64]; 2]> =
            places.iter().map(|place| [0, 1].map(|way| place.chain.passes_ns(place.inner, way))).collect();
        // Message between a stage and the previous stage.
        let hop_before = |place: StagePlace<'a>| -> &'a [u64] {
            match (place.inner, step.encoders.first()) {
                (0, Some(encoder)) if place.is_llm => &encoder.out_hop_ns,
                (0, _) => &[],
                _ => &place.chain.hop_ns,
            }
        };
        let hops: Vec<&[u64]> = places.iter().copied().map(hop_before).collect();
        let stages = rows.len();
        // One extra stage on each side, whose end stays 0.
        self.clear(stages + 2, step.shape.slots);
        for pass in &order.passes {
            let (stage, slot) = (pass.stage as usize, pass.slot as usize);
            let cell = stage + 1;
            let (out_ns, input_ns, way) = if pass.is_forward {
                let sent_ns = &mut self.forward_sent_ns[cell - 1];
                let sent_ns = send(sent_ns, self.forward_out_ns[cell - 1], hop(hops[stage], slot));
                let gathered_ns = if slot == 0 { step.gathered_ns(stage, rows[stage][0][0]) } else { 0 };
                (&mut self.forward_out_ns, sent_ns.max(gathered_ns), 0)
            } else {
                let hop_ns = hops.get(stage + 1).map_or(0, |hops_ns| hop(hops_ns, slot));
                let is_border = stage + 1 == encoder_stages;
                let made_ns = if is_border { self.returned_ns[slot] } else { self.backward_out_ns[cell + 1] };
                let input_ns = send(&mut self.backward_sent_ns[cell], made_ns, hop_ns);
                (&mut self.backward_out_ns, input_ns, 1)
            };
            let end_ns = self.end_ns[cell].max(input_ns) + rows[stage][way][slot];
            self.end_ns[cell] = end_ns;
            out_ns[cell] = end_ns;
            if stage == encoder_stages && !pass.is_forward {
                self.returned_ns[slot] = end_ns;
            }
        }
        let reduced = |stage: usize| {
            self.end_ns[stage + 1] + step.exposed_reduce_ns(stage, rows[stage][1][step.shape.slots - 1])
        };
        (0..stages).map(reduced).max().unwrap_or(0)
    }
}

/// Lists the stages in a step, encoder by encoder, then LLM stages.
fn places(step: &StepTimes) -> Vec<StagePlace<'_>> {
    let chains = step.encoders.iter().chain([&step.llm]);
    let inside = chains.enumerate().flat_map(|(index, chain)| {
        let is_llm = index == step.encoders.len();
        (0..chain.stages.len()).map(move |inner| StagePlace { chain, inner, stage: 0, is_llm })
    });
    inside.enumerate().map(|(stage, place)| StagePlace { stage, ..place }).collect()
}

/// Returns each rank's input arrival: when it was produced, or, if links are not free, when the message ends.
///
/// - `sent`: arrival time of the last message in every lane
fn arrivals<'a>(
    made: &'a [u64],
    sent: &'a mut [u64],
    hops_ns: Option<&'a [u64]>,
) -> impl FnMut(usize) -> u64 {
    move |rank| send(&mut sent[rank], made[rank], hops_ns.map_or(0, |hops_ns| hops_ns[rank]))
}

/// Sends a message after the lane's last message, and returns the arrival time; a zero-time message needs no
/// lane.
fn send(lane_ns: &mut u64, made_ns: u64, hop_ns: u64) -> u64 {
    if hop_ns == 0 {
        return made_ns;
    }
    *lane_ns = made_ns.max(*lane_ns) + hop_ns;
    *lane_ns
}

/// Runs a pass on every rank.
fn pass_all(ends: &mut [u64], outs: &mut [u64], times: &[u64], mut arrival: impl FnMut(usize) -> u64) {
    for (rank, ((end, out), time)) in ends.iter_mut().zip(outs).zip(times).enumerate() {
        *end = (*end).max(arrival(rank)) + time;
        *out = *end;
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
                weights_ns: Vec::new(),
                rows_ns: chain.rows_ns.iter().map(|row| [twice(&row[0]), twice(&row[1])]).collect(),
                hop_ns: twice(&chain.hop_ns),
                out_hop_ns: twice(&chain.out_hop_ns),
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
