//! Model FLOPs utilization: what share of the machine's peak the model's own arithmetic took.
//!
//! # Source
//! Chowdhery et al.: "`PaLM`: Scaling Language Modeling with Pathways", 2022, arXiv:2204.02311, appendix B: model FLOPs
//! are those of forward and backward, with attention in full and nothing that is computed anew, over time and peak.

use dflop_costmodel::flops::{Attention, Recomputation};
use dflop_costmodel::{CostModel, SampleShape};

use crate::error::{Error, Result};

/// Returns the model's FLOPs of training on the samples of a microbatch or a step, all modules together.
///
/// # Errors
/// [`Error::Model`] if the model cannot take a medium.
pub fn model_flops(model: &CostModel, samples: &[SampleShape]) -> Result<u128> {
    total(model, samples, Attention::Full, Recomputation::None)
}

/// Returns the FLOPs that are executed for it: causal attention over half of the pairs, and what is computed anew.
///
/// # Errors
/// As [`model_flops`].
pub fn executed_flops(
    model: &CostModel,
    samples: &[SampleShape],
    recomputation: Recomputation,
) -> Result<u128> {
    total(model, samples, Attention::Causal, recomputation)
}

fn total(
    model: &CostModel,
    samples: &[SampleShape],
    attention: Attention,
    recomputation: Recomputation,
) -> Result<u128> {
    let modules = model.training_flops(samples, attention, recomputation)?;
    Ok(modules.into_iter().map(|(_, flops)| flops.total()).fold(0, u128::saturating_add))
}

/// Returns FLOPs over what the machine could have done in that time; 1 is all of it.
///
/// - `peak_flops_per_second`: of all ranks together. Of a CPU the measured rate of large matrix products on the
///   threads that are used, as its clock under load is in no data sheet.
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

    /// 13,251,280,896,000 FLOPs of the layers with causal attention over one sample of 1000 tokens, 1,089,994,752,000 of
    /// the LM head, as the cost model's tests have them from Python; attention once more: 2 * 28 * 28 * 128 * 1000².
    #[test]
    fn model_flops_are_three_forwards_with_all_of_attention() {
        let samples = [SampleShape { text_tokens: 1000, target_tokens: 1000, ..SampleShape::default() }];
        let causal = 13_251_280_896_000_u128 + 1_089_994_752_000;
        let pairs = 2 * 28 * 28 * 128 * 1_000_000_u128;
        assert_eq!(model_flops(&model(), &samples).unwrap(), 3 * (causal + pairs));
        let executed = |kind| executed_flops(&model(), &samples, kind).unwrap();
        assert_eq!(executed(Recomputation::None), 3 * causal);
        assert!(executed(Recomputation::Layers) > 3 * causal + 13_251_280_896_000);
    }

    #[test]
    fn utilization_is_a_share_of_the_peak() {
        assert_eq!(utilization(50, 2.0, 100.0).unwrap(), 0.25);
        let error = utilization(50, 0.0, 100.0).unwrap_err().to_string();
        assert_eq!(error, "invalid `seconds`: 0 is not above 0");
        assert!(utilization(50, 1.0, f64::NAN).is_err());
    }
}
