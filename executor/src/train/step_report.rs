//! What is said of a step.

use serde::Serialize;

/// What a step did; equal on all ranks but for `seconds` and what follows from it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepReport {
    /// Number of the step, from 0.
    pub step: u64,
    /// Mean loss over the step's target tokens, before its update.
    pub loss: f64,
    /// Norm of all gradients before clipping.
    pub gradient_norm: f64,
    /// Learning rate of the update.
    pub learning_rate: f64,
    /// Samples that were learned from.
    pub samples: u64,
    /// Samples that no rank learned from, because they are bad.
    #[serde(rename = "dropped_samples")]
    pub skipped_samples: u64,
    /// Tokens of these samples, media included.
    pub tokens: u64,
    /// From the end of the step before to the end of this one.
    pub seconds: f64,
    /// Tokens over seconds, all ranks together.
    pub tokens_per_second: f64,
    /// Model FLOPs of the samples over what all ranks could have done: measured rate of large matrix products.
    pub mfu: f64,
    /// Share of the ranks' time in which they computed no pass: pipeline bubbles, messages, optimizer, waits.
    pub bubble_fraction: f64,
    /// Mean time that a rank waited for data.
    pub data_wait_seconds: f64,
    /// Makespan of the step's passes as the cost model and the simulator have it.
    pub predicted_seconds: f64,
    /// Makespan of the step's passes as it was: from the pipeline's begin to its end.
    pub pipeline_seconds: f64,
}
