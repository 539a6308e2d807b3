//! Report of one training step.

use serde::Serialize;

use super::plan_correction::CorrectionReport;
use super::step_times::IdleTimes;

/// Measurements of a step; equal on all ranks, except for times and values computed from them.
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
    /// Whether the step updated nothing, because a loss or a gradient is not finite
    /// ([`JobOptimizerSettings::skip_nonfinite`](crate::optimizer::JobOptimizerSettings::skip_nonfinite)).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_skipped: bool,
    /// Samples that were trained on.
    pub samples: u64,
    /// Samples that all ranks skipped.
    #[serde(rename = "dropped_samples")]
    pub skipped_samples: u64,
    /// Tokens of the samples trained on, media included.
    pub tokens: u64,
    /// Time from the end of the step before to the end of this one.
    pub seconds: f64,
    /// Tokens per second of all ranks together.
    pub tokens_per_second: f64,
    /// Model FLOPs utilization: model FLOPs of the samples over peak FLOP/s of all ranks and `seconds`.
    pub mfu: f64,
    /// Mean time of a rank's passes on its device.
    pub pass_seconds: f64,
    /// Share of a step that a stage of a pipeline waits between its passes: for messages, for passes of other
    /// stages. `None` if every rank has all stages, so that there is no pipeline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bubble_fraction: Option<f64>,
    /// Mean time of a rank without a pass, by what it is.
    #[serde(flatten)]
    pub idle: IdleTimes,
    /// Makespan of the step's passes as predicted and simulated.
    pub predicted_seconds: f64,
    /// Tokens of a microbatch below which launches limit a module, if they take most of the predicted time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launch_limit_tokens: Option<u64>,
    /// Makespan of the step's passes as simulated with the CPU time that each of them took: the time of the
    /// step if every rank had a core to itself and messages were free.
    pub replayed_seconds: f64,
    /// Makespan of the step's passes as measured: from start to end of the action list of the slowest rank.
    pub pipeline_seconds: f64,
    /// Mean time of a rank's sends and of its collectives of gradients and weights.
    pub communication_seconds: f64,
    /// Mean time that a rank's operations waited for communication, and for the passes that make messages.
    pub exposed_communication_seconds: f64,
    /// What the measured times of an interval of steps taught, at its last step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub correction: Option<CorrectionReport>,
}
