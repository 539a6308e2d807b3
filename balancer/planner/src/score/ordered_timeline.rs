//! Simulates a step for ranks that hold several stages or split backward passes: interleaved 1F1B and ZB-H1.
//!
//! A rank runs passes in schedule order, each when the rank is free and the input has arrived. A message
//! leaves when the sending pass ends; messages from a rank to the next, and back, run sequentially. Lanes and
//! shared encoders are those of the [`step_timeline`](super::step_timeline).
//!
//! Gradient sums in the chunks of a rank run one after another, as do weight gathers.

use super::step_times::{ChainTimes, LanePass, StepTimes, time_at};
use dflop_balancer::schedule::{Pass, PassKind, ScheduleKind, StepShape};

/// Whether a schedule is simulated here.
pub(super) fn is_ordered(kind: ScheduleKind) -> bool {
    matches!(kind, ScheduleKind::Interleaved { .. } | ScheduleKind::ZeroBubble)
}

/// Stage in a step.
#[derive(Clone, Copy)]
struct Place<'a> {
    chain: &'a ChainTimes,
    /// Index in the chain.
    inner: usize,
}

/// Pass on a lane: a stage, a microbatch, and the rank among those with separate times.
#[derive(Clone, Copy)]
struct Cell {
    stage: usize,
    slot: usize,
    lane: usize,
}

/// Times in a step; reused between steps to avoid allocation.
#[derive(Debug, Clone, Default)]
pub(super) struct OrderedTimeline {
    /// Pass order in the last step, reused because all steps in a plan have the same order.
    order: Option<(StepShape, Vec<Pass>)>,
    /// Time at which each rank is free, by first stage of the rank and lane.
    free_ns: Vec<u64>,
    /// End of the last pass, by stage and lane.
    ended_ns: Vec<u64>,
    /// Arrival times of inputs, by stage, slot and lane.
    activations_ns: Vec<u64>,
    gradients_ns: Vec<u64>,
    /// Arrival times of the last messages to the next rank and back, by first stage of the rank nearer to the
    /// input, and lane.
    forward_sent_ns: Vec<u64>,
    backward_sent_ns: Vec<u64>,
    /// Passes in the last step, if they are recorded.
    recorded: Option<Vec<LanePass>>,
}

impl OrderedTimeline {
    /// Returns all passes in a step, in order on every lane; each half of a split backward pass is a backward
    /// pass.
    pub(super) fn passes(&mut self, step: &StepTimes) -> Vec<LanePass> {
        self.recorded = Some(Vec::new());
        self.makespan_ns(step);
        self.recorded.take().unwrap_or_default()
    }

    /// Returns the step's end time.
    pub(super) fn makespan_ns(&mut self, step: &StepTimes) -> u64 {
        let known = self.order.take().filter(|(shape, _)| *shape == step.shape);
        let (shape, passes) = known.unwrap_or_else(|| (step.shape, step.shape.ordered_passes()));
        let cells = shape.stages * step.ranks;
        for (times, cells) in [
            (&mut self.free_ns, cells),
            (&mut self.ended_ns, cells),
            (&mut self.activations_ns, cells * shape.slots),
            (&mut self.gradients_ns, cells * shape.slots),
            (&mut self.forward_sent_ns, cells),
            (&mut self.backward_sent_ns, cells),
        ] {
            times.clear();
            times.resize(cells, 0);
        }
        let places = places(step);
        for pass in &passes {
            self.run(step, &places, *pass);
        }
        self.order = Some((shape, passes));
        self.reduced_ns(step, &places)
    }

    /// Runs a pass on all lanes.
    fn run(&mut self, step: &StepTimes, places: &[Place<'_>], Pass { kind, part }: Pass) {
        let (stage, slot) = (usize::from(part.stage), part.microbatch as usize);
        let place = places[stage];
        let rank = step.shape.first_of_rank(stage);
        for lane in 0..place.chain.lanes {
            let cell = Cell { stage, slot, lane };
            let time_ns = place.pass_ns(kind, slot * place.chain.lanes + lane);
            let arrived_ns = match kind {
                PassKind::Forward if slot == 0 => {
                    self.activations_ns[input(step, cell)].max(gathered_ns(step, stage, time_ns))
                }
                PassKind::Forward => self.activations_ns[input(step, cell)],
                PassKind::Backward | PassKind::BackwardInput => self.gradients_ns[input(step, cell)],
                PassKind::BackwardWeight => 0,
            };
            let free_ns = &mut self.free_ns[rank * step.ranks + lane];
            *free_ns = (*free_ns).max(arrived_ns) + time_ns;
            let end_ns = *free_ns;
            self.ended_ns[stage * step.ranks + lane] = end_ns;
            if let Some(passes) = &mut self.recorded {
                let is_forward = kind == PassKind::Forward;
                passes.push(LanePass { stage, slot, lane, is_forward, start_ns: end_ns - time_ns, end_ns });
            }
            match kind {
                PassKind::Forward => self.send_activations(step, place, cell, end_ns),
                PassKind::Backward | PassKind::BackwardInput => {
                    self.send_gradients(step, places, cell, end_ns);
                }
                PassKind::BackwardWeight => {}
            }
        }
    }

    fn send_activations(&mut self, step: &StepTimes, place: Place<'_>, cell: Cell, end_ns: u64) {
        let Cell { stage, slot, lane } = cell;
        let Some(next) = step.shape.receiver(stage) else { return };
        let (chain, rank) = (place.chain, step.shape.first_of_rank(stage));
        let message = slot * chain.lanes + lane;
        if place.inner + 1 < chain.stages.len() {
            let is_near = step.shape.first_of_rank(next) == rank;
            let hop_ns = if is_near { 0 } else { time_at(&chain.hop_ns, message) };
            let sent_ns = &mut self.forward_sent_ns[rank * step.ranks + lane];
            self.activations_ns[input(step, Cell { stage: next, ..cell })] = send(sent_ns, end_ns, hop_ns);
            return;
        }
        let hop_ns = time_at(&chain.out_hop_ns, message);
        let ranks = if chain.lanes == 1 { 0..step.ranks } else { lane..lane + 1 };
        for lane in ranks {
            let arrived_ns = send(&mut self.forward_sent_ns[rank * step.ranks + lane], end_ns, hop_ns);
            let input_ns = &mut self.activations_ns[input(step, Cell { stage: next, slot, lane })];
            *input_ns = (*input_ns).max(arrived_ns);
        }
    }

    fn send_gradients(&mut self, step: &StepTimes, places: &[Place<'_>], cell: Cell, end_ns: u64) {
        let Cell { stage, slot, lane } = cell;
        for before in step.shape.senders(stage) {
            let chain = places[before].chain;
            let rank = step.shape.first_of_rank(before);
            let sent_ns = &mut self.backward_sent_ns[rank * step.ranks + lane];
            if places[stage].inner > 0 {
                let is_near = step.shape.first_of_rank(stage) == rank;
                let hop_ns = if is_near { 0 } else { time_at(&chain.hop_ns, slot * chain.lanes + lane) };
                self.gradients_ns[input(step, Cell { stage: before, ..cell })] =
                    send(sent_ns, end_ns, hop_ns);
                continue;
            }
            // A shared encoder waits for all ranks.
            let own = if chain.lanes == 1 { 0 } else { lane };
            let arrived_ns = send(sent_ns, end_ns, time_at(&chain.out_hop_ns, slot * chain.lanes + own));
            let input_ns = &mut self.gradients_ns[input(step, Cell { stage: before, slot, lane: own })];
            *input_ns = (*input_ns).max(arrived_ns);
        }
    }

    /// Returns the time when all gradients are summed.
    fn reduced_ns(&self, step: &StepTimes, places: &[Place<'_>]) -> u64 {
        let mut reduced_ns = vec![0; self.free_ns.len()];
        // The last chunk of a rank ends first.
        for (stage, place) in places.iter().enumerate().rev() {
            let rank = step.shape.first_of_rank(stage);
            let last = (step.shape.slots - 1) * place.chain.lanes;
            let is_split = step.shape.kind == ScheduleKind::ZeroBubble;
            let kind = if is_split { PassKind::BackwardWeight } else { PassKind::Backward };
            for lane in 0..place.chain.lanes {
                let exposed_ns = step.exposed_reduce_ns(stage, place.pass_ns(kind, last + lane));
                let own_ns = self.ended_ns[stage * step.ranks + lane] + exposed_ns;
                let before_ns = &mut reduced_ns[rank * step.ranks + lane];
                *before_ns = own_ns.max(*before_ns + time_at(&step.reduce_ns, stage));
            }
        }
        reduced_ns.into_iter().max().unwrap_or(0)
    }
}

impl Place<'_> {
    /// Returns a pass time.
    ///
    /// - `cell`: slot and lane
    fn pass_ns(&self, kind: PassKind, cell: usize) -> u64 {
        let [forward_ns, backward_ns] = [0, 1].map(|way| self.chain.passes_ns(self.inner, way)[cell]);
        let weight_ns = || self.chain.weight_ns(self.inner, cell).min(backward_ns);
        match kind {
            PassKind::Forward => forward_ns,
            PassKind::Backward => backward_ns,
            PassKind::BackwardInput => backward_ns - weight_ns(),
            PassKind::BackwardWeight => weight_ns(),
        }
    }
}

/// Lists the stages in a step, encoder by encoder, then LLM stages.
fn places(step: &StepTimes) -> Vec<Place<'_>> {
    let chains = step.encoders.iter().chain([&step.llm]);
    chains.flat_map(|chain| (0..chain.stages.len()).map(move |inner| Place { chain, inner })).collect()
}

/// Returns the index of a pass's input.
fn input(step: &StepTimes, Cell { stage, slot, lane }: Cell) -> usize {
    (stage * step.shape.slots + slot) * step.ranks + lane
}

/// Returns the earliest start for a stage's first forward pass: after the gathers for the rank's earlier
/// chunks.
fn gathered_ns(step: &StepTimes, stage: usize, forward_ns: u64) -> u64 {
    let rank = step.shape.first_of_rank(stage);
    let chunks = (0..stage).filter(|other| step.shape.first_of_rank(*other) == rank);
    let before_ns: u64 = chunks.map(|chunk| time_at(&step.gather_ns, chunk)).sum();
    before_ns + step.gathered_ns(stage, forward_ns)
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

#[cfg(test)]
mod tests {
    use super::super::step_timeline;
    use super::*;
    use dflop_balancer::schedule::{Action, EncoderChain, EncoderChains, ModuleStages, PipelineLayout};
    use dflop_balancer::{Communication, StageTimes};
    use proptest::prelude::*;

    /// Builds a chain whose passes use the next of these times, a third of them for weights.
    fn chain(stages: usize, slots: usize, lanes: usize, times: &mut impl Iterator<Item = u64>) -> ChainTimes {
        let mut take = || times.by_ref().take(slots * lanes).collect::<Vec<u64>>();
        let rows_ns: Vec<[Vec<u64>; 2]> = (0..stages).map(|_| [take(), take()]).collect();
        let third = |row: &[Vec<u64>; 2]| -> Vec<u64> { row[1].iter().map(|ns| ns / 3).collect() };
        let weights_ns = rows_ns.iter().map(third).collect();
        ChainTimes { weights_ns, ..ChainTimes::new(lanes, ((0..stages).collect(), rows_ns)) }
    }

    fn makespan_ns(step: &StepTimes) -> u64 {
        let mut timeline = OrderedTimeline::default();
        let found = timeline.makespan_ns(step);
        assert_eq!(found, timeline.makespan_ns(step), "buffers are reused");
        if step.reduce_ns.is_empty() {
            let ends_ns = timeline.passes(step).into_iter().map(|pass| pass.end_ns);
            assert_eq!(ends_ns.max(), Some(found), "passes are recorded");
        }
        found
    }

    /// Returns cells by stage and microbatch, 0 where a module has fewer microbatches than the layout.
    fn cells(step: &StepTimes, microbatches: usize, of: impl Fn(&Place<'_>, usize) -> u64) -> Vec<u64> {
        let rows = places(step).into_iter().flat_map(|place| {
            let own = step.shape.slots * place.chain.lanes;
            (0..microbatches).map(|cell| if cell < own { of(&place, cell) } else { 0 }).collect::<Vec<u64>>()
        });
        rows.collect()
    }

    /// Simulates a step by the executor's action lists; a frozen encoder's lists have no backward actions.
    fn by_actions(step: &StepTimes) -> u64 {
        let (kind, slots, last) = (step.shape.kind, step.shape.slots, step.encoders.len());
        let encoder = |chain: &ChainTimes| {
            let module = ModuleStages::new(chain.stages.len(), chain.lanes).feeds(last);
            let is_own = chain.lanes == step.ranks && step.ranks > 1;
            if is_own { module } else { module.share_rounds() }
        };
        let mut modules: Vec<ModuleStages> = step.encoders.iter().map(encoder).collect();
        modules.push(ModuleStages::new(step.llm.stages.len(), step.ranks));
        let layout = PipelineLayout::from_modules(&modules, slots).unwrap();
        let count = layout.microbatches();
        let [forward, backward, weight] = [PassKind::Forward, PassKind::Backward, PassKind::BackwardWeight]
            .map(|kind| cells(step, count, |place, cell| place.pass_ns(kind, cell)));
        let times = StageTimes::new(layout.stages(), count, forward, backward).unwrap();
        let times = times.weight_ns(weight).unwrap();
        let is_frozen = |stage: u16| {
            step.shape.encoders.each().any(|(first, chain)| {
                let own = first..first + usize::from(chain.stages);
                !chain.has_backward && own.contains(&usize::from(stage))
            })
        };
        let frozen_ranks: Vec<usize> = (0..layout.stages())
            .filter(|stage| is_frozen(*stage as u16))
            .flat_map(|stage| layout.holders(stage))
            .collect();
        let is_run = |action: &Action| match action {
            Action::RecvGrad(message) => !is_frozen(message.stage),
            Action::SendGrad(message) => {
                !is_frozen(message.stage) && !frozen_ranks.contains(&usize::from(message.peer))
            }
            Action::ReduceGrads(stage) => !is_frozen(*stage),
            other => {
                other.pass().is_none_or(|pass| pass.kind == PassKind::Forward || !is_frozen(pass.part.stage))
            }
        };
        let mut lists = layout.schedule(kind).unwrap();
        for list in &mut lists {
            list.retain(is_run);
        }
        let free = Communication::free(layout.stages(), count);
        layout.simulate(&lists, &times, &free).unwrap().makespan_ns
    }

    /// Simulates every rank's interleaved pipeline by action lists, with messages.
    fn pipelines_by_actions(step: &StepTimes, chunks: u16) -> u64 {
        let (stages, slots) = (step.shape.stages, step.shape.slots);
        let ranks = stages / usize::from(chunks);
        let of_rank = |rank: usize| {
            let own = |row: &dyn Fn(usize) -> Vec<u64>| -> Vec<u64> {
                (0..stages).flat_map(|stage| row(stage).into_iter().skip(rank).step_by(step.ranks)).collect()
            };
            let way = |way: usize| own(&|stage| step.llm.passes_ns(stage, way).to_vec());
            let times = StageTimes::new(stages, slots, way(0), way(1)).unwrap();
            let layout = PipelineLayout::chain(ranks, usize::from(chunks), slots).unwrap();
            let mut links = Communication::free(stages, slots);
            if !step.llm.hop_ns.is_empty() {
                let hops = own(&|_| step.llm.hop_ns.clone());
                links = links.messages(&hops, &hops).unwrap();
            }
            let lists = layout.schedule(step.shape.kind).unwrap();
            layout.simulate(&lists, &times, &links).unwrap().makespan_ns
        };
        (0..step.ranks).map(of_rank).max().unwrap()
    }

    proptest! {
        #[test]
        fn a_split_step_takes_what_the_action_lists_say(
            ranks in 1usize..4,
            encoders in prop::collection::vec((1usize..4, any::<bool>(), any::<bool>()), 0..3),
            llm in 1usize..5, slots in 1usize..8, times in prop::collection::vec(0u64..1000, 600),
        ) {
            let mut times = times.into_iter().cycle();
            let described = encoders.iter().map(|(stages, _, has_backward)| EncoderChain {
                stages: *stages as u16,
                has_backward: *has_backward,
            });
            let encoder_stages: usize = encoders.iter().map(|encoder| encoder.0).sum();
            let shape = StepShape {
                kind: ScheduleKind::ZeroBubble,
                encoders: EncoderChains::new(described),
                stages: encoder_stages + llm,
                slots,
            };
            let chains = encoders.iter().map(|(stages, is_shared, has_backward)| {
                let mut own = chain(*stages, slots, if *is_shared { 1 } else { ranks }, &mut times);
                if !has_backward {
                    own.rows_ns.iter_mut().for_each(|row| row[1].fill(0));
                }
                own
            });
            let chains = chains.collect();
            let llm = chain(llm, slots, ranks, &mut times);
            let step = StepTimes { encoders: chains, llm, ..StepTimes::new(shape, ranks) };
            prop_assert_eq!(makespan_ns(&step), by_actions(&step));
            prop_assert_eq!(step_timeline::makespan_ns(&step), by_actions(&step));
        }

        #[test]
        fn an_interleaved_step_takes_what_the_action_lists_say(
            ranks in 1usize..4, pipeline in 1usize..5, chunks in 1u16..4, slots in 1usize..9,
            has_links in any::<bool>(),
            times in prop::collection::vec(1u64..1000, 600),
        ) {
            let kind = ScheduleKind::Interleaved { chunks };
            let stages = pipeline * usize::from(chunks);
            let shape = StepShape { kind, encoders: EncoderChains::default(), stages, slots };
            let mut times = times.into_iter().cycle();
            let mut llm = chain(stages, slots, ranks, &mut times);
            // Between two ranks, activations to the next chunk and gradients share a lane of the simulator.
            if has_links && pipeline > 2 {
                llm.hop_ns = times.take(slots * ranks).collect();
            }
            let step = StepTimes { llm, ..StepTimes::new(shape, ranks) };
            prop_assert_eq!(makespan_ns(&step), pipelines_by_actions(&step, chunks));
        }
    }

    fn uniform(
        kind: ScheduleKind,
        stages: usize,
        slots: usize,
        [forward, backward, weight]: [u64; 3],
    ) -> StepTimes {
        let shape = StepShape { kind, encoders: EncoderChains::default(), stages, slots };
        let row = [vec![forward; slots], vec![backward; slots]];
        let llm = ChainTimes {
            weights_ns: vec![vec![weight; slots]],
            ..ChainTimes::new(1, (vec![0; stages], vec![row]))
        };
        StepTimes { llm, ..StepTimes::new(shape, 1) }
    }

    /// Four ranks and eight microbatches; a rank computes 8 (6 + 12).
    #[test]
    fn bubbles_are_those_of_the_papers() {
        let split = uniform(ScheduleKind::ZeroBubble, 4, 8, [6, 12, 6]);
        assert_eq!(makespan_ns(&split), 8 * 18 + 3 * 6);
        let interleaved = uniform(ScheduleKind::Interleaved { chunks: 3 }, 12, 8, [2, 4, 0]);
        assert_eq!(makespan_ns(&interleaved), 8 * 18 + 3 * 18 / 3);
        let whole = uniform(ScheduleKind::OneForwardOneBackward, 4, 8, [6, 12, 0]);
        assert_eq!(step_timeline::makespan_ns(&whole), 8 * 18 + 3 * 18);
    }

    /// One rank with two chunks of four layers: the sum of the second chunk, which ends first, is hidden.
    #[test]
    fn sums_of_chunks_run_one_after_another() {
        let mut step = uniform(ScheduleKind::Interleaved { chunks: 2 }, 2, 1, [10, 40, 0]);
        (step.reduce_ns, step.layers) = (vec![20, 20], vec![4, 4]);
        assert_eq!(makespan_ns(&step), 2 * 10 + 2 * 40 + 5);
        // The second sum starts at 10 + 10 + 10 and the first follows it.
        step.reduce_ns = vec![100, 100];
        assert_eq!(makespan_ns(&step), 2 * 10 + 10 + 100 + 100);
        // A gather of 8 for each chunk: the second is done before the first pass ends.
        (step.reduce_ns, step.gather_ns) = (Vec::new(), vec![8, 8]);
        assert_eq!(makespan_ns(&step), 2 + 2 * 10 + 2 * 40);
    }
}
