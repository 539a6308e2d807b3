//! Decoders: Llama 3, Qwen2, Qwen2.5, Qwen3, Gemma 3 and Llama 4, with or without encoders.

mod batch;
mod config;
mod embedding;
mod head;

use crate::error::Result;
use dflop_device::{Device, Dtype, Tensor};

pub use batch::{IGNORED, TextBatch};
pub use config::{DecoderForm, LlmConfig, LlmExpertNames, LlmExperts, LlmLatent, LlmNames, MatrixNames};
pub use embedding::Embedding;
pub use head::Head;

/// Attention temperature that falls with the position, far from the sample start: the query factor is
/// `1 + scale * ln(1 + floor((position + 1) / floor))`.
///
/// # Source
/// Nakanishi: "Scalable-Softmax Is Superior for Attention", 2025, arXiv:2501.19399, as implemented in
/// `Llama4TextAttention`, transformers 5.24.0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryTemperature {
    /// Factor on the logarithm.
    pub scale: f64,
    /// Number of consecutive positions with the same factor.
    pub floor: u32,
}

impl QueryTemperature {
    /// Computes the factor at a position with `libm` instead of system functions, whose bits differ between
    /// machines.
    fn factor(self, position: u32) -> f32 {
        let steps = (position as f32 + 1.0) / self.floor as f32;
        libm::log1pf(steps.floor()) * self.scale as f32 + 1.0
    }

    /// Returns the factors for all tokens, and as many zeros; `None` if all factors are 1.
    ///
    /// - `positions`: positions within samples, `[tokens]`
    fn scales<D: Device>(self, device: &D, positions: &[u32]) -> Result<Option<(Tensor<D>, Tensor<D>)>> {
        if positions.iter().all(|position| position.saturating_add(1) < self.floor) {
            return Ok(None);
        }
        let factors: Vec<f32> = positions.iter().map(|&position| self.factor(position)).collect();
        let zeros = device.zeros_as(Dtype::F32, factors.len())?;
        Ok(Some((device.upload_as(Dtype::F32, &factors)?, zeros)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_device::{Cpu, Runtime};

    #[test]
    fn factors_rise_by_the_logarithm_of_whole_floors() {
        let (temperature, device) = (QueryTemperature { scale: 0.5, floor: 4 }, Cpu::new(1).unwrap());
        assert!(temperature.scales(&device, &[0, 1, 2]).unwrap().is_none(), "no factor differs from 1");
        let (factors, zeros) = temperature.scales(&device, &[2, 3, 6, 7]).unwrap().unwrap();
        let [one, two] = [2.0_f32, 3.0].map(|steps| 1.0 + 0.5 * steps.ln());
        let found = device.download(&factors).unwrap();
        assert!(found.iter().zip([1.0, one, one, two]).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?}");
        assert_eq!(device.download(&zeros).unwrap(), [0.0; 4]);
    }
}
