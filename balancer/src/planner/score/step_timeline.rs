//! Simulates a step of a pipeline whose encoder and LLM differ in stages and DP degree.
//!
//! The encoder's ranks share the media of all LLM ranks' microbatches of a *slot* (the k-th microbatch of
//! each LLM rank) and send them on together, so the encoder is one chain with a time for each slot, followed
//! by one chain per LLM rank. A slot's gradient returns to the encoder when the last LLM rank has sent it.
//! Stages are numbered from the encoder's first to the LLM's last and run 1F1B.
//!
//! With one LLM rank this is the pipeline of [`crate::simulate`]; a test compares them.

use std::cmp::Ordering;

/// Times of every pass of one step, nanoseconds.
#[derive(Debug, Clone, Default)]
pub(in crate::planner) struct StepTimes {
    /// LLM ranks.
    pub(in crate::planner) ranks: usize,
    /// Microbatches of each LLM rank, which are the encoder's slots.
    pub(in crate::planner) slots: usize,
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
    /// Gradient all-reduce of each stage after its last pass, the encoder's first; empty if links are free.
    pub(in crate::planner) reduce_ns: Vec<u64>,
}

/// Ends of passes; reused between steps to avoid allocation.
#[derive(Debug, Clone, Default)]
#[expect(clippy::struct_field_names, reason = "units end the names")]
pub(in crate::planner) struct StepTimeline {
    /// Ends by stage and rank; the encoder has one rank.
    end_ns: Vec<u64>,
    forward_out_ns: Vec<u64>,
    backward_out_ns: Vec<u64>,
}

impl StepTimeline {
    /// Returns the end of the step.
    ///
    /// In time slots as long as a pass, `F(s, k)` runs in `2k + s` and `B(s, k)` in `2k + 2p - 1 - s`: an
    /// order in which every pass comes after its inputs, with 1F1B's order on each stage. The real times
    /// follow it.
    pub(in crate::planner) fn makespan_ns(&mut self, step: &StepTimes) -> u64 {
        if step.ranks == 1 {
            return self.chain_ns(step);
        }
        let encoder_stages = step.encoder_stages.len();
        let stages = encoder_stages + step.llm_stages.len();
        for cells in [&mut self.end_ns, &mut self.forward_out_ns, &mut self.backward_out_ns] {
            cells.clear();
            cells.resize(stages * step.ranks, 0);
        }
        for time in 0..2 * (step.slots + stages) {
            for stage in 0..stages {
                let is_forward = (time + stage).is_multiple_of(2);
                let begin = if is_forward { stage } else { 2 * stages - 1 - stage };
                let slot = time.wrapping_sub(begin) / 2;
                if time < begin || slot >= step.slots {
                    continue;
                }
                match (is_forward, stage < encoder_stages) {
                    (true, true) => self.encoder_forward(step, stage, slot),
                    (true, false) => self.llm_forward(step, stage, slot),
                    (false, true) => self.encoder_backward(step, stage, slot),
                    (false, false) => self.llm_backward(step, stage, slot),
                }
            }
        }
        let end = |stage: usize| {
            let ends = &self.end_ns[stage * step.ranks..(stage + 1) * step.ranks];
            let last = ends.iter().copied().max().unwrap_or(0);
            last + step.reduce_ns.get(stage).copied().unwrap_or(0)
        };
        (0..stages).map(end).max().unwrap_or(0)
    }

    /// Returns the end of a step with one LLM rank, where every stage has one time for each slot and one
    /// neighbor on each side.
    fn chain_ns(&mut self, step: &StepTimes) -> u64 {
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
        for time in 0..2 * (step.slots + stages) {
            for (stage, row) in rows.iter().enumerate() {
                let is_forward = (time + stage).is_multiple_of(2);
                let begin = if is_forward { stage } else { 2 * stages - 1 - stage };
                let slot = time.wrapping_sub(begin) / 2;
                if time < begin || slot >= step.slots {
                    continue;
                }
                let cell = stage + 1;
                let (out_ns, input_ns, pass) = if is_forward {
                    let input_ns = self.forward_out_ns[cell - 1] + hop(hops[stage], slot);
                    (&mut self.forward_out_ns, input_ns, 0)
                } else {
                    let hop_ns = hops.get(stage + 1).map_or(0, |hops_ns| hop(hops_ns, slot));
                    let input_ns = self.backward_out_ns[cell + 1] + hop_ns;
                    (&mut self.backward_out_ns, input_ns, 1)
                };
                let end_ns = self.end_ns[cell].max(input_ns) + row[pass][slot];
                self.end_ns[cell] = end_ns;
                out_ns[cell] = end_ns;
            }
        }
        let reduced = |stage: usize| self.end_ns[stage + 1] + hop(&step.reduce_ns, stage);
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
            let sent = &self.backward_out_ns[next..next + step.ranks];
            sent.iter().copied().max().unwrap_or(0) + hop(&step.between_hop_ns, slot)
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
    use crate::schedule::ScheduleKind;
    use crate::simulate::CompiledSchedule;
    use crate::simulate::StageTimes;
    use proptest::prelude::*;

    fn rows(times: &[u64], cells: usize) -> Vec<[Vec<u64>; 2]> {
        let split = |row: &[u64]| [row[..cells].to_vec(), row[cells..].to_vec()];
        times.chunks_exact(2 * cells).map(split).collect()
    }

    proptest! {
        #[test]
        fn one_rank_takes_what_the_simulator_says(
            encoder_stages in 0usize..4, llm_stages in 1usize..5, slots in 1usize..9,
            times in prop::collection::vec(0u64..100, 2 * 7 * 8),
        ) {
            let stages = encoder_stages + llm_stages;
            let all = rows(&times[..2 * stages * slots], slots);
            let step = StepTimes {
                ranks: 1,
                slots,
                encoder_stages: (0..encoder_stages).collect(),
                llm_stages: (0..llm_stages).collect(),
                encoder_ns: all[..encoder_stages].to_vec(),
                llm_ns: all[encoder_stages..].to_vec(),
                ..StepTimes::default()
            };
            let each: Vec<usize> = (0..stages).collect();
            let kind = ScheduleKind::OneForwardOneBackward;
            let mut compiled = CompiledSchedule::new(kind, &each, slots).unwrap();
            let [forward, backward] = [0, 1].map(|pass| {
                all.iter().flat_map(|row| row[pass].iter().copied()).collect::<Vec<u64>>()
            });
            let expected = compiled.makespan_ns(&StageTimes::new(stages, slots, forward, backward).unwrap());
            prop_assert_eq!(StepTimeline::default().makespan_ns(&step), expected);
        }
    }

    proptest! {
        /// Two ranks with equal times take as long as one of them, messages and sums included.
        #[test]
        fn equal_ranks_take_what_one_takes(
            encoder_stages in 0usize..4, llm_stages in 1usize..5, slots in 1usize..9,
            times in prop::collection::vec(0u64..100, 2 * 7 * 8),
            hops in prop::collection::vec(0u64..50, 24), reduce in prop::collection::vec(0u64..300, 7),
        ) {
            let stages = encoder_stages + llm_stages;
            let all = rows(&times[..2 * stages * slots], slots);
            let one = StepTimes {
                ranks: 1,
                slots,
                encoder_stages: (0..encoder_stages).collect(),
                llm_stages: (0..llm_stages).collect(),
                encoder_ns: all[..encoder_stages].to_vec(),
                llm_ns: all[encoder_stages..].to_vec(),
                encoder_hop_ns: hops[..slots].to_vec(),
                between_hop_ns: hops[8..8 + slots].to_vec(),
                llm_hop_ns: hops[16..16 + slots].to_vec(),
                reduce_ns: reduce[..stages].to_vec(),
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
            ranks: 2,
            slots: 1,
            encoder_stages: vec![0],
            llm_stages: vec![0],
            encoder_ns: vec![[vec![1], vec![1]]],
            llm_ns: vec![[vec![1, 4], vec![1, 4]]],
            ..StepTimes::default()
        };
        assert_eq!(StepTimeline::default().makespan_ns(&step), 1 + 4 + 4 + 1);
        (step.between_hop_ns, step.reduce_ns) = (vec![10], vec![5, 0]);
        assert_eq!(StepTimeline::default().makespan_ns(&step), 1 + 10 + 4 + 4 + 10 + 1 + 5);
    }
}
