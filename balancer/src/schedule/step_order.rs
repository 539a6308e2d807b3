//! Stage passes in a step, ordered so that each pass comes after all inputs.
//!
//! All ranks that hold a stage run the stage's passes in the same order, so a single order of `(stage, slot)`
//! serves a step with any number of ranks. Single-walk makespans, search graphs and the microbatches in
//! flight are derived from this order; each schedule file defines the schedule by lags.
//!
//! In time slots as long as a pass, a pass with lag `l`, the `j`-th of `n` kinds, runs in a stage of depth
//! `s` in slot `n (k + l) + j + s` for microbatch `k`. So a forward pass is one slot after the input, and so
//! is a backward pass if a stage has at least one round more lag than the next stage.

use super::action::{Part, Pass, PassKind};
use super::graph::PassGraph;
use super::lagged::Lags;
use super::step_shape::StepShape;
use super::{PipelineLayout, ScheduleKind};
use crate::error::Result;

/// Stage pass, on every rank that holds the stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StagePass {
    /// Stage index.
    pub stage: u32,
    /// Microbatch index on the rank.
    pub slot: u32,
    /// Whether the pass is a forward pass.
    pub is_forward: bool,
}

/// Ordered passes in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StepOrder {
    /// Passes, each after all inputs.
    pub(super) passes: Vec<StagePass>,
}

impl StepOrder {
    /// Orders the passes for a step that [`StepShape::check`] accepts.
    pub(super) fn new(shape: &StepShape) -> Self {
        if let ScheduleKind::Interleaved { chunks } = shape.kind {
            return Self::from_chunks(shape, usize::from(chunks)).unwrap_or_else(|error| panic!("{error}"));
        }
        let lags: Vec<Lags> = (0..shape.stages).map(|stage| shape.lags(stage)).collect();
        let depths: Vec<usize> = (0..shape.stages).map(|stage| shape.depth(stage)).collect();
        let longest = lags.iter().flat_map(|lags| lags.iter()).map(|(_, lag)| *lag).max().unwrap_or(0);
        let kinds = lags.iter().map(|lags| lags.len()).max().unwrap_or(1).max(2);
        let end = kinds * (shape.slots + longest + 1) + shape.stages;
        let mut passes = Vec::with_capacity(2 * shape.stages * shape.slots);
        for time in 0..end {
            for (stage, (lags, depth)) in lags.iter().zip(&depths).enumerate() {
                let Some(since) = time.checked_sub(*depth) else { continue };
                let Some((kind, lag)) = lags.get(since % kinds) else { continue };
                let slot = (since / kinds).checked_sub(*lag).filter(|slot| *slot < shape.slots);
                if let Some(slot) = slot {
                    let is_forward = *kind == PassKind::Forward;
                    passes.push(StagePass { stage: stage as u32, slot: slot as u32, is_forward });
                }
            }
        }
        Self { passes }
    }

    /// Merges the lists for ranks that hold several stages each, by the ticks at which the passes start.
    fn from_chunks(shape: &StepShape, chunks: usize) -> Result<Self> {
        let layout = PipelineLayout::chain(shape.stages / chunks, chunks, shape.slots)?;
        let lists = layout.passes(shape.kind)?;
        let graph = PassGraph::new(&layout, &lists);
        let ticks = graph.ticks()?;
        let mut order: Vec<usize> = (0..graph.passes.len()).collect();
        order.sort_by_key(|&number| (ticks[number], graph.rank(number)));
        let pass = |number: usize| {
            let Pass { kind, part } = graph.passes[number];
            StagePass {
                stage: part.stage.into(),
                slot: part.microbatch,
                is_forward: kind == PassKind::Forward,
            }
        };
        Ok(Self { passes: order.into_iter().map(pass).collect() })
    }
}

impl StepShape {
    /// Orders the passes on every rank that holds a stage, each after all inputs, with split backward passes
    /// for `zb-h1`. Microbatches are numbered on a rank.
    #[must_use]
    pub fn ordered_passes(&self) -> Vec<Pass> {
        if matches!(self.kind, ScheduleKind::Interleaved { .. }) {
            let passes = StepOrder::new(self).passes.into_iter();
            return passes
                .map(|StagePass { stage, slot, is_forward }| Pass {
                    kind: if is_forward { PassKind::Forward } else { PassKind::Backward },
                    part: Part { microbatch: slot, stage: stage as u16 },
                })
                .collect();
        }
        let lags: Vec<Lags> = (0..self.stages).map(|stage| self.lags(stage)).collect();
        let kinds = lags.iter().map(|lags| lags.len()).max().unwrap_or(1);
        let mut passes = Vec::with_capacity(kinds * self.stages * self.slots);
        for (stage, lags) in lags.iter().enumerate() {
            let depth = self.depth(stage);
            for (turn, (kind, lag)) in lags.iter().enumerate() {
                passes.extend((0..self.slots).map(|slot| {
                    let part = Part { microbatch: slot as u32, stage: stage as u16 };
                    (kinds * (slot + lag) + turn + depth, Pass { kind: *kind, part })
                }));
            }
        }
        passes.sort_by_key(|(time, pass)| (*time, pass.part.stage));
        passes.into_iter().map(|(_, pass)| pass).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::step_shape::{EncoderChain, EncoderChains};
    use crate::schedule::{ScheduleKind, schedule};
    use proptest::prelude::*;

    fn kinds() -> impl Strategy<Value = ScheduleKind> {
        prop::sample::select(vec![
            ScheduleKind::GPipe,
            ScheduleKind::OneForwardOneBackward,
            ScheduleKind::EncoderAhead { rounds: 1 },
            ScheduleKind::EncoderAhead { rounds: 3 },
        ])
    }

    proptest! {
        #[test]
        fn every_pass_comes_after_its_inputs_and_in_flight_is_what_is_held(
            kind in kinds(), encoders in prop::collection::vec((0..4_u16, any::<bool>()), 0..4),
            others in 1..4_usize, slots in 1..9_usize,
        ) {
            let chain = |(stages, has_backward)| EncoderChain { stages, has_backward };
            let encoders = EncoderChains::new(encoders.into_iter().map(chain));
            let shape = StepShape { kind, encoders, stages: encoders.stages() + others, slots };
            let runs_backward = |stage: usize| encoders.each().all(|(first, chain)| {
                chain.has_backward || !(first..first + usize::from(chain.stages)).contains(&stage)
            });
            let order = StepOrder::new(&shape);
            let backward = (0..shape.stages).filter(|stage| runs_backward(*stage)).count();
            prop_assert_eq!(order.passes.len(), slots * (shape.stages + backward));
            let mut done = vec![[0; 2]; shape.stages];
            let mut held_max = vec![1; shape.stages];
            for pass in &order.passes {
                let (stage, direction) = (pass.stage as usize, usize::from(!pass.is_forward));
                prop_assert_eq!(done[stage][direction], pass.slot, "passes of a stage in order");
                let inputs: Vec<u32> = if pass.is_forward {
                    shape.senders(stage).map(|sender| done[sender][0]).collect()
                } else {
                    vec![shape.receiver(stage).map_or(done[stage][0], |receiver| done[receiver][1])]
                };
                prop_assert!(inputs.iter().all(|done| *done > pass.slot));
                done[stage][direction] += 1;
                if runs_backward(stage) {
                    held_max[stage] = held_max[stage].max(done[stage][0] - done[stage][1]);
                }
            }
            for (stage, held) in held_max.iter().enumerate() {
                prop_assert_eq!(shape.in_flight(stage), *held as usize);
            }
        }

        #[test]
        fn ranks_with_several_stages_run_their_lists(
            chunks in 1..4_u16, ranks in 1..5_usize, slots in 1..12_usize,
        ) {
            let (kind, stages) = (ScheduleKind::Interleaved { chunks }, ranks * usize::from(chunks));
            let shape = StepShape { kind, encoders: EncoderChains::default(), stages, slots };
            let order = StepOrder::new(&shape);
            prop_assert_eq!(order.passes.len(), 2 * stages * slots);
            for rank in 0..ranks {
                let own = order.passes.iter().filter(|pass| shape.first_of_rank(pass.stage as usize) == rank);
                let told = schedule(kind, rank, ranks, slots).into_iter().filter_map(crate::schedule::Action::pass);
                for (own, told) in own.zip(told) {
                    prop_assert_eq!((own.stage, own.slot), (u32::from(told.part.stage), told.part.microbatch));
                    prop_assert_eq!(own.is_forward, told.kind == PassKind::Forward);
                }
            }
            let held: usize = (0..usize::from(chunks)).map(|chunk| shape.in_flight(chunk * ranks)).sum();
            let at_once = (2 * (ranks - 1) + (usize::from(chunks) - 1) * ranks + 1).min(slots * usize::from(chunks));
            // A rank's chunks need not reach their maximum at the same time.
            prop_assert!(!slots.is_multiple_of(ranks) || held >= at_once, "{} {}", held, at_once);
        }

        #[test]
        fn split_passes_come_after_their_inputs_in_the_order_of_the_lists(
            encoders in prop::collection::vec((1..4_u16, any::<bool>()), 0..3),
            others in 1..5_usize, slots in 1..9_usize,
        ) {
            let chain = |(stages, has_backward)| EncoderChain { stages, has_backward };
            let encoders = EncoderChains::new(encoders.into_iter().map(chain));
            let stages = encoders.stages() + others;
            let shape = StepShape { kind: ScheduleKind::ZeroBubble, encoders, stages, slots };
            let passes = shape.ordered_passes();
            let place = |kind, stage: usize, microbatch| {
                let part = Part { microbatch, stage: stage as u16 };
                passes.iter().position(|pass| *pass == Pass { kind, part })
            };
            for (at, Pass { kind, part }) in passes.iter().enumerate() {
                let (stage, slot) = (usize::from(part.stage), part.microbatch);
                let inputs: Vec<Option<usize>> = match kind {
                    PassKind::Forward => shape.senders(stage).map(|from| place(*kind, from, slot)).collect(),
                    PassKind::BackwardInput => {
                        let after = shape.receiver(stage).map(|after| place(*kind, after, slot));
                        after.into_iter().chain([place(PassKind::Forward, stage, slot)]).collect()
                    }
                    _ => vec![place(PassKind::BackwardInput, stage, slot)],
                };
                let is_before = |input: &Option<usize>| input.is_some_and(|input| input < at);
                prop_assert!(inputs.iter().all(is_before), "{kind} {part}");
            }
            // In a single chain, ranks are stages.
            if encoders.stages() == 0 {
                for stage in 0..stages {
                    let own: Vec<Pass> =
                        passes.iter().filter(|pass| usize::from(pass.part.stage) == stage).copied().collect();
                    let list = schedule(shape.kind, stage, stages, slots).into_iter();
                    let told: Vec<Pass> = list.filter_map(crate::schedule::Action::pass).collect();
                    prop_assert_eq!(own, told);
                }
            }
        }

        #[test]
        fn a_stage_runs_what_its_rank_is_told_to(
            kind in kinds(), stages in 1..5_usize, slots in 1..9_usize,
        ) {
            let shape = StepShape { kind, encoders: EncoderChains::default(), stages, slots };
            let order = StepOrder::new(&shape);
            for rank in 0..stages {
                let own: Vec<_> = order.passes.iter().filter(|pass| pass.stage as usize == rank).collect();
                let told: Vec<_> =
                    schedule(kind, rank, stages, slots).into_iter().filter_map(crate::schedule::Action::pass).collect();
                prop_assert_eq!(own.len(), told.len());
                for (own, told) in own.iter().zip(told) {
                    prop_assert_eq!(own.slot, told.part.microbatch);
                    prop_assert_eq!(own.is_forward, told.kind == PassKind::Forward);
                }
            }
        }
    }
}
