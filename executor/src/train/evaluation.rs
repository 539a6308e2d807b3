//! Evaluates a model during training: the mean loss over the target tokens of held-out samples.
//!
//! Every evaluation reads the same samples in the same order and runs forward passes only, on the stages and
//! with the microbatches of the training layout. Losses and target tokens are added up over all global
//! batches and ranks, so the mean does not depend on the layout, except for rounding. Training goes on with
//! the same bits as without evaluations.

use std::time::Instant;

use dflop_device::Device;
use serde::Serialize;

use crate::error::Result;
use crate::inputs::InputReader;
use crate::pipeline::PipelineRank;

/// Starts to read the samples of an evaluation, from the first one.
pub type EvaluationInputs<D> = Box<dyn Fn() -> Result<InputReader<D>> + Send>;

/// Evaluations on a rank; the same on all ranks.
pub struct Evaluation<D: Device> {
    /// Number of steps between evaluations; `None` evaluates after the last step only.
    pub every: Option<u64>,
    /// Maximum number of global batches; `None` for all samples.
    pub batches: Option<u64>,
    /// Inputs, in the same order whenever they are started.
    pub inputs: EvaluationInputs<D>,
}

/// Evaluation result; equal on all ranks, except for the time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct EvaluationReport {
    /// Mean loss over all target tokens; not finite if the loss of a microbatch is not, or there is no target
    /// token.
    pub loss: f64,
    /// Number of target tokens.
    pub target_tokens: u64,
    /// Number of samples.
    pub samples: u64,
    /// Number of samples skipped by all ranks.
    #[serde(rename = "dropped_samples", skip_serializing_if = "is_zero")]
    pub skipped_samples: u64,
    /// Time for the evaluation, which no step contains, in seconds.
    pub seconds: f64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl<D: Device> Evaluation<D> {
    /// Returns whether an evaluation follows a number of steps.
    ///
    /// - `until`: step before which the run ends, if it is known
    pub(super) fn is_due(&self, steps: u64, until: Option<u64>) -> bool {
        until == Some(steps) || self.every.is_some_and(|every| steps.is_multiple_of(every))
    }

    /// Runs the evaluation; all ranks call it together.
    pub(super) fn run(&self, pipeline: &mut PipelineRank<D>) -> Result<EvaluationReport> {
        let begin = Instant::now();
        let mut inputs = (self.inputs)()?;
        let (mut loss, mut target_tokens, mut samples, mut skipped_samples) = (0.0, 0, 0, 0);
        for _ in 0..self.batches.unwrap_or(u64::MAX) {
            let Some(step) = inputs.next(pipeline.comm())? else { break };
            for skipped in step.skipped.iter().filter(|_| pipeline.comm().rank() == 0) {
                // All ranks have the same list, so one of them logs it.
                let row = inputs.planner().row(step.plan.samples[skipped.index as usize]);
                let (key, reason) = (row.key(), &skipped.reason);
                tracing::warn!(key, reason, "a sample is left out of an evaluation");
            }
            loss += pipeline.evaluate(&step.rank_step)?;
            target_tokens += step.rank_step.plan.target_tokens();
            let skipped = step.skipped.len() as u64;
            samples += step.plan.samples.len() as u64 - skipped;
            skipped_samples += skipped;
        }
        let seconds = begin.elapsed().as_secs_f64();
        let loss = loss / target_tokens as f64;
        Ok(EvaluationReport { loss, target_tokens, samples, skipped_samples, seconds })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_device::Cpu;

    #[test]
    fn evaluations_follow_every_interval_and_the_last_step() {
        let due = |every: Option<u64>, until: Option<u64>| {
            let inputs: EvaluationInputs<Cpu> = Box::new(|| unreachable!("nothing is read"));
            let evaluation = Evaluation { every, batches: None, inputs };
            (1..=7).filter(|&steps| evaluation.is_due(steps, until)).collect::<Vec<u64>>()
        };
        assert_eq!(due(Some(3), Some(7)), [3, 6, 7]);
        assert_eq!(due(Some(3), Some(6)), [3, 6]);
        assert_eq!(due(None, Some(7)), [7]);
        assert_eq!(due(Some(4), None), [4]);
    }
}
