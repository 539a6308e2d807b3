//! Training step report.

use serde::Serialize;

use super::plan_correction::CorrectionReport;
use super::start_times::StartReport;
use super::step_times::IdleTimes;

/// Step measurements; equal on all ranks, except for times and values computed from them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepReport {
    /// Step number, from 0.
    pub step: u64,
    /// Mean loss over the step's target tokens, before the update.
    pub loss: f64,
    /// Norm of all gradients before clipping.
    pub gradient_norm: f64,
    /// Learning rate for the update.
    pub learning_rate: f64,
    /// Whether the step updated nothing, because a loss or a gradient is not finite
    /// ([`JobOptimizerSettings::skip_nonfinite`](crate::optimizer::JobOptimizerSettings::skip_nonfinite)).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_skipped: bool,
    /// Number of trained samples.
    pub samples: u64,
    /// Number of samples skipped by all ranks.
    #[serde(rename = "dropped_samples")]
    pub skipped_samples: u64,
    /// Number of tokens in trained samples, media included.
    pub tokens: u64,
    /// Time from the previous step's end to this step's end, in seconds.
    pub seconds: f64,
    /// Tokens per second, summed over all ranks.
    pub tokens_per_second: f64,
    /// Model FLOPs utilization: sample model FLOPs divided by `seconds` and the peak FLOP/s summed over all
    /// ranks.
    pub mfu: f64,
    /// Mean device time for passes per rank, in seconds.
    pub pass_seconds: f64,
    /// Fraction of a step that a pipeline stage waits between passes: for messages, or for passes in
    /// different stages. `None` without a pipeline (every rank has all stages).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bubble_fraction: Option<f64>,
    /// Mean time per rank without a pass, by cause.
    #[serde(flatten)]
    pub idle: IdleTimes,
    /// Simulated makespan with predicted pass times, in seconds.
    pub predicted_seconds: f64,
    /// Tokens per microbatch below which launches limit a module, if launches dominate the predicted time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launch_limit_tokens: Option<u64>,
    /// Simulated makespan with the measured CPU time for each pass, in seconds: the step time if every rank
    /// had a dedicated core and messages were free.
    pub replayed_seconds: f64,
    /// Measured makespan, in seconds: from start to end in the slowest rank's action list.
    pub pipeline_seconds: f64,
    /// Mean time per rank for sends and for gradient and weight collectives, in seconds.
    pub communication_seconds: f64,
    /// Mean time per rank that operations waited for communication and for message-producing passes, in
    /// seconds.
    pub exposed_communication_seconds: f64,
    /// Correction learned from measured times in a step interval, reported at the interval's last step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub correction: Option<CorrectionReport>,
    /// Time from the start of the run to the end of this step, by part: in the first report of a run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<StartReport>,
}
