//! Optimizer settings of a run.

use serde::{Deserialize, Serialize};

/// `AdamW` and its learning rate.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerTable {
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Number of steps in which the rate rises linearly to the peak.
    pub warmup_steps: u64,
    /// Learning rate at the last step, after a half cosine [default: the rate is constant].
    pub learning_rate_min: Option<f64>,
    /// Decoupled weight decay, per unit of learning rate.
    pub weight_decay: f64,
    /// Decay rates of the first and the second moment.
    pub betas: [f64; 2],
    /// Term added to the root of the second moment.
    pub epsilon: f64,
    /// Upper bound on the norm of all gradients; 0 disables clipping.
    pub gradient_norm_max: f64,
    /// Maximum number of consecutive steps that are skipped because a loss or a gradient is not finite.
    pub skip_nonfinite: u64,
    /// Format of weights and activations.
    pub precision: PrecisionName,
    /// Stage of `ZeRO`: 1 divides the optimizer state over the DP ranks of a stage, 0 does not.
    pub zero_stage: u8,
}

impl Default for OptimizerTable {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            warmup_steps: 0,
            learning_rate_min: None,
            weight_decay: 0.1,
            betas: [0.9, 0.95],
            epsilon: 1e-8,
            gradient_norm_max: 1.0,
            skip_nonfinite: 0,
            precision: PrecisionName::F32,
            zero_stage: 0,
        }
    }
}

/// Format of weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PrecisionName {
    /// Weights and activations of 32 bits.
    F32,
    /// Weights and activations of 16 bits, with a 32-bit copy of the weights for the optimizer.
    Bf16,
}
