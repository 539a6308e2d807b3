//! Optimizer settings for a run.

use serde::{Deserialize, Serialize};

/// `AdamW` settings and the learning rate.
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
    /// Decay rates for the first and the second moment.
    pub betas: [f64; 2],
    /// Term added to the root of the second moment.
    pub epsilon: f64,
    /// Maximum norm over all gradients; 0 disables clipping.
    pub gradient_norm_max: f64,
    /// Maximum number of consecutive steps that are skipped because a loss or a gradient is not finite.
    pub skip_nonfinite: u64,
    /// Weight and activation format.
    pub precision: PrecisionName,
    /// `ZeRO` stage: 1 divides the optimizer state over a stage's DP ranks, 0 does not.
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

/// Weight and activation format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PrecisionName {
    /// 32-bit weights and activations.
    F32,
    /// 16-bit weights and activations, with a 32-bit weight copy for the optimizer.
    Bf16,
}
