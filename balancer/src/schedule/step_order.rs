//! Passes of a chain of stages in an order in which each pass comes after its inputs.
//!
//! All ranks that hold a stage run its passes in the same order, so one order of `(stage, slot)` serves a
//! step with any number of ranks. Makespans by one walk, the graph of a search and the microbatches in flight
//! are read from it; what a schedule is, its file says by its lags.
//!
//! In time slots as long as a pass, a pass with lag `l`, the `j`-th of `n` kinds, runs in stage `s` in slot
//! `n (k + l) + j + s` for microbatch `k`. A forward pass is so one slot after its input; so is a backward
//! pass if a stage has at least one round more of lag than the next one.

use super::ScheduleKind;
use super::action::PassKind;
use super::lagged::{Lags, StagePlace};
use crate::error::{Error, Result};

/// Pass of a stage, on every rank that holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StagePass {
    pub(crate) stage: u32,
    pub(crate) slot: u32,
    pub(crate) is_forward: bool,
}

/// Passes of a step, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StepOrder {
    pub(crate) passes: Vec<StagePass>,
}

/// Stages of a step and the schedule that runs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StepShape {
    pub(crate) kind: ScheduleKind,
    /// Stages of encoders, the first ones.
    pub(crate) encoder_stages: usize,
    /// Stages in all.
    pub(crate) stages: usize,
    /// Microbatches of each rank.
    pub(crate) slots: usize,
    /// Whether encoders run backward; without trained parameters they do not.
    pub(crate) has_encoder_backward: bool,
}

impl StepShape {
    /// Checks that plans are made for the kind: one stage per rank, one backward pass per microbatch.
    ///
    /// # Errors
    /// [`Error::Config`] otherwise.
    pub(crate) fn check_kind(kind: ScheduleKind) -> Result<()> {
        if matches!(kind, ScheduleKind::Interleaved { .. } | ScheduleKind::ZeroBubble) {
            let reason = format!("plans are made for gpipe, 1f1b and 1f1b-ahead, not for {kind}");
            return Err(Error::Config { setting: "schedule", reason });
        }
        Ok(())
    }

    fn lags(&self, stage: usize) -> Lags {
        let place = StagePlace {
            stages_after: self.stages - stage - 1,
            stages_in_all: self.stages,
            rounds: self.slots,
            is_encoder: stage < self.encoder_stages,
        };
        let lags = self.kind.lags(&place);
        if place.is_encoder && !self.has_encoder_backward { lags.forward_only() } else { lags }
    }

    /// Returns the most microbatches whose activations a stage holds at once.
    pub(crate) fn in_flight(&self, stage: usize) -> usize {
        let last = self.lags(stage).last().map_or(0, |(_, lag)| *lag);
        (last + 1).min(self.slots).max(1)
    }
}

impl StepOrder {
    /// Orders the passes of a step; the kind is one of those that [`StepShape::check_kind`] accepts.
    pub(crate) fn new(shape: &StepShape) -> Self {
        let lags: Vec<Lags> = (0..shape.stages).map(|stage| shape.lags(stage)).collect();
        let longest = lags.iter().flat_map(|lags| lags.iter()).map(|(_, lag)| *lag).max().unwrap_or(0);
        let kinds = lags.iter().map(|lags| lags.len()).max().unwrap_or(1).max(2);
        let end = kinds * (shape.slots + longest + 1) + shape.stages;
        let mut passes = Vec::with_capacity(2 * shape.stages * shape.slots);
        for time in 0..end {
            for (stage, lags) in lags.iter().enumerate() {
                let Some(since) = time.checked_sub(stage) else { continue };
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::schedule;
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
            kind in kinds(), encoder_stages in 0..3_usize, others in 1..4_usize, slots in 1..9_usize,
            has_encoder_backward in any::<bool>(),
        ) {
            let stages = encoder_stages + others;
            let shape = StepShape { kind, encoder_stages, stages, slots, has_encoder_backward };
            let order = StepOrder::new(&shape);
            let forward_only = if has_encoder_backward { 0 } else { encoder_stages };
            prop_assert_eq!(order.passes.len(), slots * (2 * stages - forward_only));
            let mut done = vec![[0; 2]; stages];
            let mut held_max = vec![1; stages];
            for pass in &order.passes {
                let (stage, direction) = (pass.stage as usize, usize::from(!pass.is_forward));
                prop_assert_eq!(done[stage][direction], pass.slot, "passes of a stage in order");
                let input = if pass.is_forward {
                    stage.checked_sub(1).map(|before| done[before][0])
                } else if stage + 1 < stages {
                    Some(done[stage + 1][1])
                } else {
                    Some(done[stage][0])
                };
                prop_assert!(input.is_none_or(|done| done > pass.slot));
                done[stage][direction] += 1;
                if stage >= forward_only {
                    held_max[stage] = held_max[stage].max(done[stage][0] - done[stage][1]);
                }
            }
            for (stage, held) in held_max.iter().enumerate() {
                prop_assert_eq!(shape.in_flight(stage), *held as usize);
            }
        }

        #[test]
        fn a_stage_runs_what_its_rank_is_told_to(
            kind in kinds(), stages in 1..5_usize, slots in 1..9_usize,
        ) {
            let shape =
                StepShape { kind, encoder_stages: 0, stages, slots, has_encoder_backward: true };
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
