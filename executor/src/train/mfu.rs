//! Model FLOPs utilization (MFU): the share of peak FLOP/s that the model's own arithmetic reached.
//!
//! # Source
//! Chowdhery et al.: "`PaLM`: Scaling Language Modeling with Pathways", 2022, arXiv:2204.02311, appendix B:
//! FLOPs of forward and backward, with full attention and without recomputation, over time and peak.

use dflop_costmodel::flops::{Attention, Recomputation};
use dflop_costmodel::{CostModel, SampleShape};

use crate::error::{Error, Result};

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
