//! Simulates a step of a pipeline whose encoder and LLM differ in stages and DP degree.
//!
//! The encoder's ranks share the media of all LLM ranks' microbatches of a *slot* (the k-th microbatch of
//! each LLM rank) and send them on together, so the encoder is one chain with a time for each slot, followed
//! by one chain per LLM rank. A slot's gradient returns to the encoder when the last LLM rank has sent it.
//! Stages are numbered from the encoder's first to the LLM's last; the schedule orders their passes.
//!
//! With one LLM rank this is the pipeline of [`crate::simulate`]; a test compares them.

use crate::schedule::{StepOrder, StepShape};
use std::cmp::Ordering;

/// Times of every pass of one step, nanoseconds.
#[derive(Debug, Clone)]
pub(in crate::planner) struct StepTimes {
    /// Schedule of the stages and slots.
    pub(in crate::planner) shape: StepShape,
    /// LLM ranks.
    pub(in crate::planner) ranks: usize,
    /// Row of [`StepTimes::encoder_ns`] of each encoder stage; empty if the encoder is not a pipeline stage.
    pub(in crate::planner) encoder_stages: Vec<usize>,
    /// Row of [`StepTimes::llm_ns`] of each LLM stage.
    pub(in crate::planner) llm_stages: Vec<usize>,
    /// Forward and backward times by row, `[slots]`.
    pub(in crate::planner) encoder_ns: Vec<[Vec<u64>; 2]>,
    /// Forward and backward times by row, `[slots * ranks]`, slot by slot.
    pub(in crate::planner) llm_ns: Vec<[Vec<u64>; 2]>,
    /// Times of messages between stages of the encoder, `[slots]`, from the encoder to the LLM, `[slots]`,
    /// and between stages of the LLM, `[slots * ranks]`; empty if links are free.
    pub(in crate::planner) encoder_hop_ns: Vec<u64>,
    pub(in crate::planner) between_hop_ns: Vec<u64>,
    pub(in crate::planner) llm_hop_ns: Vec<u64>,
    /// All-reduce of each stage's gradients, the encoder's first; empty if links are free.
    pub(in crate::planner) reduce_ns: Vec<u64>,
    /// Layers of each stage, whose gradients are summed one after another; empty if links are free.
    pub(in crate::planner) layers: Vec<u32>,
}

impl StepTimes {
    /// Starts a step without times.
    pub(in crate::planner) fn new(shape: StepShape, ranks: usize) -> Self {
        Self {
            shape,
            ranks,
            encoder_stages: Vec::new(),
            llm_stages: Vec::new(),
            encoder_ns: Vec::new(),
            llm_ns: Vec::new(),
            encoder_hop_ns: Vec::new(),
            between_hop_ns: Vec::new(),
            llm_hop_ns: Vec::new(),
            reduce_ns: Vec::new(),
            layers: Vec::new(),
        }
    }

    /// Returns the time between the end of a stage's last backward pass, of `backward_ns`, and the end of the
    /// all-reduce of its gradients: each layer's gradient is summed while earlier layers run backward.
    fn exposed_reduce_ns(&self, stage: usize, backward_ns: u64) -> u64 {
        let all_ns = hop(&self.reduce_ns, stage);
        let layers = u64::from(self.layers.get(stage).copied().unwrap_or(1).max(1));
        // The sums end a layer's sum after the last pass, or start with the first layer that is done.
        (all_ns / layers).max(all_ns.saturating_sub(backward_ns - backward_ns / layers))
    }
}

/// Ends of passes; reused between steps to avoid allocation.
#[derive(Debug, Clone, Default)]
pub(in crate::planner) struct StepTimeline {
    /// Ends by stage and rank; the encoder has one rank.
    end_ns: Vec<u64>,
    /// Outputs of each stage's last pass: the next stage's pass of the slot comes before another.
    forward_out_ns: Vec<u64>,
    backward_out_ns: Vec<u64>,
    /// Gradients of all LLM ranks to the encoder, by slot: an encoder that runs ahead takes them later.
    returned_ns: Vec<u64>,
    /// Order of the last step's passes: steps of one plan have the same.
    order: Option<(StepShape, StepOrder)>,
}

impl StepTimeline {
    /// Returns the end of the step.
    pub(in crate::planner) fn makespan_ns(&mut self, step: &StepTimes) -> u64 {
        self.returned_ns.clear();
        self.returned_ns.resize(step.shape.slots, 0);
        let known = self.order.take().filter(|(shape, _)| *shape == step.shape);
        let (shape, order) = known.unwrap_or_else(|| (step.shape, StepOrder::new(&step.shape)));
        let makespan_ns = if step.ranks == 1 { self.chain_ns(step, &order) } else { self.run(step, &order) };
        self.order = Some((shape, order));
        makespan_ns
    }

    fn run(&mut self, step: &StepTimes, order: &StepOrder) -> u64 {
        let encoder_stages = step.encoder_stages.len();
        let stages = encoder_stages + step.llm_stages.len();
        for cells in [&mut self.end_ns, &mut self.forward_out_ns, &mut self.backward_out_ns] {
            cells.clear();
            cells.resize(stages * step.ranks, 0);
        }
        for pass in &order.passes {
            let (stage, slot) = (pass.stage as usize, pass.slot as usize);
            match (pass.is_forward, stage < encoder_stages) {
                (true, true) => self.encoder_forward(step, stage, slot),
                (true, false) => self.llm_forward(step, stage, slot),
                (false, true) => self.encoder_backward(step, stage, slot),
                (false, false) => self.llm_backward(step, stage, slot),
            }
        }
        let last_slot = step.shape.slots - 1;
        let end = |stage: usize| {
            let ends = &self.end_ns[stage * step.ranks..(stage + 1) * step.ranks];
            if stage < encoder_stages {
                let backward_ns = step.encoder_ns[step.encoder_stages[stage]][1][last_slot];
                return ends[0] + step.exposed_reduce_ns(stage, backward_ns);
            }
            let backward_ns =
                &step.llm_ns[step.llm_stages[stage - encoder_stages]][1][last_slot * step.ranks..];
            let ended = ends.iter().zip(backward_ns);
            ended.map(|(end, last_ns)| end + step.exposed_reduce_ns(stage, *last_ns)).max().unwrap_or(0)
        };
        (0..stages).map(end).max().unwrap_or(0)
    }

    /// Returns the end of a step with one LLM rank, where every stage has one time for each slot and one
    /// neighbor on each side.
    fn chain_ns(&mut self, step: &StepTimes, order: &StepOrder) -> u64 {
        let encoder = step.encoder_stages.iter().map(|row| &step.encoder_ns[*row]);
        let rows: Vec<&[Vec<u64>; 2]> =
            encoder.chain(step.llm_stages.iter().map(|row| &step.llm_ns[*row])).collect();
        let encoder_stages = step.encoder_stages.len();
        // Message between a stage and the previous one.
        let hops: Vec<&[u64]> = (0..rows.len())
            .map(|stage| match stage.cmp(&encoder_stages) {
                _ if stage == 0 => &[][..],
                Ordering::Less => &step.encoder_hop_ns,
                Ordering::Equal => &step.between_hop_ns,
                Ordering::Greater => &step.llm_hop_ns,
            })
            .collect();
        let stages = rows.len();
        // One more stage on each side, whose end stays 0.
        for cells in [&mut self.end_ns, &mut self.forward_out_ns, &mut self.backward_out_ns] {
            cells.clear();
            cells.resize(stages + 2, 0);
        }
        for pass in &order.passes {
            let (stage, slot) = (pass.stage as usize, pass.slot as usize);
            let cell = stage + 1;
            let (out_ns, input_ns, way) = if pass.is_forward {
                let input_ns = self.forward_out_ns[cell - 1] + hop(hops[stage], slot);
                (&mut self.forward_out_ns, input_ns, 0)
            } else {
                let hop_ns = hops.get(stage + 1).map_or(0, |hops_ns| hop(hops_ns, slot));
                let is_border = stage + 1 == encoder_stages;
                let sent_ns = if is_border { self.returned_ns[slot] } else { self.backward_out_ns[cell + 1] };
                (&mut self.backward_out_ns, sent_ns + hop_ns, 1)
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

    fn encoder_forward(&mut self, step: &StepTimes, stage: usize, slot: usize) {
        let cell = stage * step.ranks;
        let input = if stage == 0 {
            0
        } else {
            self.forward_out_ns[cell - step.ranks] + hop(&step.encoder_hop_ns, slot)
        };
        let time = step.encoder_ns[step.encoder_stages[stage]][0][slot];
        let end = self.end_ns[cell].max(input) + time;
        self.end_ns[cell] = end;
        self.forward_out_ns[cell] = end;
    }

    fn encoder_backward(&mut self, step: &StepTimes, stage: usize, slot: usize) {
        let (cell, next) = (stage * step.ranks, (stage + 1) * step.ranks);
        let input = if stage + 1 == step.encoder_stages.len() {
            self.returned_ns[slot] + hop(&step.between_hop_ns, slot)
        } else {
            self.backward_out_ns[next] + hop(&step.encoder_hop_ns, slot)
        };
        let time = step.encoder_ns[step.encoder_stages[stage]][1][slot];
        let end = self.end_ns[cell].max(input) + time;
        self.end_ns[cell] = end;
        self.backward_out_ns[cell] = end;
    }

    fn llm_forward(&mut self, step: &StepTimes, stage: usize, slot: usize) {
        let (ranks, encoder_stages) = (step.ranks, step.encoder_stages.len());
        let (cell, cells) = (stage * ranks, slot * ranks..(slot + 1) * ranks);
        let times = &step.llm_ns[step.llm_stages[stage - encoder_stages]][0][cells.clone()];
        let (before, here) = self.forward_out_ns.split_at_mut(cell);
        let (ends, outs) = (&mut self.end_ns[cell..cell + ranks], &mut here[..ranks]);
        if stage == encoder_stages {
            let sent = if stage == 0 { 0 } else { before[cell - ranks] + hop(&step.between_hop_ns, slot) };
            pass_all(ends, outs, times, |_| sent);
        } else {
            pass_all(ends, outs, times, arrivals(&before[cell - ranks..], step.llm_hop_ns.get(cells)));
        }
    }

    fn llm_backward(&mut self, step: &StepTimes, stage: usize, slot: usize) {
        let (ranks, encoder_stages) = (step.ranks, step.encoder_stages.len());
        let (cell, cells) = (stage * ranks, slot * ranks..(slot + 1) * ranks);
        let times = &step.llm_ns[step.llm_stages[stage - encoder_stages]][1][cells.clone()];
        let (before, after) = self.backward_out_ns.split_at_mut(cell + ranks);
        let (ends, outs) = (&mut self.end_ns[cell..cell + ranks], &mut before[cell..]);
        if stage + 1 == encoder_stages + step.llm_stages.len() {
            pass_all(ends, outs, times, |_| 0);
        } else {
            pass_all(ends, outs, times, arrivals(&after[..ranks], step.llm_hop_ns.get(cells)));
        }
        if stage == encoder_stages {
            self.returned_ns[slot] = outs.iter().copied().max().unwrap_or(0);
        }
    }
}

/// Returns the arrival of each rank's input: the time sent plus the message, if links are not free.
fn arrivals<'a>(sent: &'a [u64], hops_ns: Option<&'a [u64]>) -> impl Fn(usize) -> u64 {
    move |rank| sent[rank] + hops_ns.map_or(0, |hops_ns| hops_ns[rank])
}

/// Runs a pass on every rank.
fn pass_all(ends: &mut [u64], outs: &mut [u64], times: &[u64], arrival: impl Fn(usize) -> u64) {
    for (rank, ((end, out), time)) in ends.iter_mut().zip(outs).zip(times).enumerate() {
        *end = (*end).max(arrival(rank)) + time;
        *out = *end;
    }
}

fn hop(hops_ns: &[u64], at: usize) -> u64 {
    hops_ns.get(at).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{ModuleStages, PipelineLayout, ScheduleKind};
    use crate::simulate::{Communication, StageTimes};
    use proptest::prelude::*;

    const KINDS: [ScheduleKind; 4] = [
        ScheduleKind::OneForwardOneBackward,
        ScheduleKind::GPipe,
        ScheduleKind::EncoderAhead { rounds: 1 },
        ScheduleKind::EncoderAhead { rounds: 3 },
    ];

    fn rows(times: &[u64], cells: usize) -> Vec<[Vec<u64>; 2]> {
        let split = |row: &[u64]| [row[..cells].to_vec(), row[cells..].to_vec()];
        times.chunks_exact(2 * cells).map(split).collect()
    }

    fn step(
        kind: ScheduleKind,
        encoder_stages: usize,
        llm_stages: usize,
        slots: usize,
        ranks: usize,
    ) -> StepTimes {
        let stages = encoder_stages + llm_stages;
        let shape = StepShape { kind, encoder_stages, stages, slots, has_encoder_backward: true };
        StepTimes {
            encoder_stages: (0..encoder_stages).collect(),
            llm_stages: (0..llm_stages).collect(),
            ..StepTimes::new(shape, ranks)
        }
    }

    /// Simulates a step by the executor's lists of actions: an encoder rank that shares every round of all
    /// LLM ranks, and the LLM ranks.
    fn by_events(step: &StepTimes) -> u64 {
        let (kind, slots, ranks) = (step.shape.kind, step.shape.slots, step.ranks);
        let encoder = ModuleStages::new(step.encoder_stages.len(), 1).share_rounds();
        let llm = ModuleStages::new(step.llm_stages.len(), ranks);
        let modules = if step.encoder_stages.is_empty() { vec![llm] } else { vec![encoder, llm] };
        let layout = PipelineLayout::of_modules(&modules, slots).unwrap();
        let mut passes_ns = [Vec::new(), Vec::new()];
        for (way, ns) in passes_ns.iter_mut().enumerate() {
            for row in &step.encoder_ns {
                ns.extend(&row[way]);
                ns.extend(vec![0; layout.microbatches() - slots]);
            }
            step.llm_ns.iter().for_each(|row| ns.extend(&row[way]));
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
            encoder_stages in 0usize..4, llm_stages in 1usize..5, slots in 1usize..9,
            times in prop::collection::vec(0u64..100, 2 * 3 * 8 + 2 * 4 * 3 * 8),
        ) {
            let step = StepTimes {
                encoder_ns: rows(&times[..2 * encoder_stages * slots], slots),
                llm_ns: rows(&times[48..48 + 2 * llm_stages * slots * ranks], slots * ranks),
                ..step(kind, encoder_stages, llm_stages, slots, ranks)
            };
            prop_assert_eq!(StepTimeline::default().makespan_ns(&step), by_events(&step));
        }
    }

    proptest! {
        /// Two ranks with equal times take as long as one of them, messages and sums included.
        #[test]
        fn equal_ranks_take_what_one_takes(
            kind in prop::sample::select(KINDS.to_vec()),
            encoder_stages in 0usize..4, llm_stages in 1usize..5, slots in 1usize..9,
            times in prop::collection::vec(0u64..100, 2 * 7 * 8),
            hops in prop::collection::vec(0u64..50, 24), reduce in prop::collection::vec(0u64..300, 7),
        ) {
            let stages = encoder_stages + llm_stages;
            let all = rows(&times[..2 * stages * slots], slots);
            let one = StepTimes {
                encoder_ns: all[..encoder_stages].to_vec(),
                llm_ns: all[encoder_stages..].to_vec(),
                encoder_hop_ns: hops[..slots].to_vec(),
                between_hop_ns: hops[8..8 + slots].to_vec(),
                llm_hop_ns: hops[16..16 + slots].to_vec(),
                reduce_ns: reduce[..stages].to_vec(),
                layers: (1..=stages as u32).collect(),
                ..step(kind, encoder_stages, llm_stages, slots, 1)
            };
            let twice = |row: &Vec<u64>| row.iter().flat_map(|ns| [*ns, *ns]).collect::<Vec<u64>>();
            let two = StepTimes {
                ranks: 2,
                llm_ns: one.llm_ns.iter().map(|[forward, backward]| [twice(forward), twice(backward)]).collect(),
                llm_hop_ns: twice(&one.llm_hop_ns),
                ..one.clone()
            };
            let mut timeline = StepTimeline::default();
            prop_assert_eq!(timeline.makespan_ns(&one), timeline.makespan_ns(&two));
        }
    }

    /// Two LLM ranks of 1 and 4 after an encoder of 1, forward and backward alike: the encoder's backward
    /// waits for the slower rank.
    #[test]
    fn the_encoder_waits_for_the_slowest_rank() {
        let mut step = StepTimes {
            encoder_ns: vec![[vec![1], vec![1]]],
            llm_ns: vec![[vec![1, 4], vec![1, 4]]],
            ..step(ScheduleKind::OneForwardOneBackward, 1, 1, 1, 2)
        };
        assert_eq!(StepTimeline::default().makespan_ns(&step), 1 + 4 + 4 + 1);
        (step.between_hop_ns, step.reduce_ns) = (vec![10], vec![5, 0]);
        assert_eq!(StepTimeline::default().makespan_ns(&step), 1 + 10 + 4 + 4 + 10 + 1 + 5);
    }

    /// Four layers of 10 backward: a sum of 5 each is hidden but for the last one; of 20 each, three of the
    /// four run after the first layer is done.
    #[test]
    fn sums_of_gradients_run_beside_the_last_backward_pass() {
        let mut step = StepTimes {
            llm_ns: vec![[vec![20], vec![40]]],
            reduce_ns: vec![20],
            layers: vec![4],
            ..step(ScheduleKind::OneForwardOneBackward, 0, 1, 1, 1)
        };
        assert_eq!(StepTimeline::default().makespan_ns(&step), 20 + 40 + 5);
        step.reduce_ns = vec![80];
        assert_eq!(StepTimeline::default().makespan_ns(&step), 20 + 10 + 80);
    }

    /// One rank is slow first, the other last: an encoder ahead lets the fast one go on.
    #[test]
    fn an_encoder_ahead_lets_ranks_drift() {
        let llm_ns = vec![9, 1, 9, 1, 1, 9, 1, 9];
        let of = |kind| StepTimes {
            encoder_ns: vec![[vec![1; 4], vec![1; 4]]],
            llm_ns: vec![[llm_ns.clone(), llm_ns.clone()]],
            ..step(kind, 1, 1, 4, 2)
        };
        let makespan = |kind| StepTimeline::default().makespan_ns(&of(kind));
        let ahead = makespan(ScheduleKind::EncoderAhead { rounds: 2 });
        assert!(ahead < makespan(ScheduleKind::OneForwardOneBackward), "{ahead}");
    }
}
