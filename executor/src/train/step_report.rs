//! Training step report, with model FLOPs utilization (MFU).
//!
//! # Source
//! Chowdhery et al.: "`PaLM`: Scaling Language Modeling with Pathways", 2022, arXiv:2204.02311, appendix B:
//! FLOPs of forward and backward, with full attention and without recomputation, over time and peak.

use dflop_costmodel::flops::{Attention, Recomputation};
use dflop_costmodel::{CostModel, SampleShape};
use serde::Serialize;

use super::measured_times::CorrectionReport;
use super::start_times::StartReport;
use super::step_times::IdleTimes;
use crate::error::{Error, Result};

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

/// Returns the model training FLOPs for the samples in a microbatch or step, summed over modules.
///
/// # Errors
/// [`Error::Model`] if the model cannot take a medium.
pub fn model_flops(model: &CostModel, samples: &[SampleShape]) -> Result<u128> {
    let modules = model.training_flops(samples, Attention::Full, Recomputation::None)?;
    Ok(modules.into_iter().map(|(_, flops)| flops.total()).fold(0, u128::saturating_add))
}

/// Returns the fraction of peak FLOP/s that was reached.
///
/// - `peak_flops_per_second`: sum over all ranks. For a CPU use the measured rate of large matrix products on
///   the same threads, as no data sheet lists the clock rate under load.
///
/// # Errors
/// [`Error::InvalidSetting`] if time or peak is not above 0.
pub fn utilization(flops: u128, seconds: f64, peak_flops_per_second: f64) -> Result<f64> {
    let rows = [("seconds", seconds), ("peak_flops_per_second", peak_flops_per_second)];
    for (setting, value) in rows {
        if !(value > 0.0 && value.is_finite()) {
            return Err(Error::InvalidSetting { setting, reason: format!("{value} is not above 0") });
        }
    }
    Ok(flops as f64 / (seconds * peak_flops_per_second))
}

#[cfg(test)]
mod tests {
    use dflop_costmodel::{DeviceRate, ModelSpec};

    use super::*;

    fn model() -> CostModel {
        let spec = ModelSpec::preset("llava-ov-qwen2.5-7b").unwrap();
        CostModel::new(spec, DeviceRate::preset("a100").unwrap())
    }

    /// The layers take 13,251,280,896,000 FLOPs with causal attention over one sample of 1000 tokens, the LM
    /// head 1,089,994,752,000, as the cost model's tests have them from Python; attention once more: 2 * 28 *
    /// 28 * 128 * 1000².
    #[test]
    fn model_flops_are_three_forwards_with_all_of_attention() {
        let samples = [SampleShape { text_tokens: 1000, target_tokens: 1000, ..SampleShape::default() }];
        let causal = 13_251_280_896_000_u128 + 1_089_994_752_000;
        let pairs = 2 * 28 * 28 * 128 * 1_000_000_u128;
        assert_eq!(model_flops(&model(), &samples).unwrap(), 3 * (causal + pairs));
    }

    #[test]
    fn utilization_is_a_share_of_the_peak() {
        assert_eq!(utilization(50, 2.0, 100.0).unwrap(), 0.25);
        let error = utilization(50, 0.0, 100.0).unwrap_err().to_string();
        assert_eq!(error, "invalid `seconds`: 0 is not above 0");
        assert!(utilization(50, 1.0, f64::NAN).is_err());
    }
}
