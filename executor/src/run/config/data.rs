//! Configuration tables for the data, the optimizer and what a run saves.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::PathBuf;

/// Model: a directory as downloaded from Hugging Face, or the file contents.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ModelTable {
    /// Directory with `config.json`, `tokenizer.json` and, if present, weights.
    pub directory: Option<PathBuf>,
    /// `config.json` contents, as an alternative to a directory.
    pub config: Option<Value>,
    /// `preprocessor_config.json` contents.
    pub preprocessor: Option<Value>,
    /// Start with the weights in the directory instead of random weights.
    #[serde(default)]
    pub pretrained: bool,
    /// Modules that are not trained, such as `"vision,projector"`.
    pub freeze: Option<String>,
    /// Recompute layer activations in the backward pass (activation checkpointing).
    #[serde(default)]
    pub recompute_layers: bool,
}

/// Run dataset.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataTable {
    /// Dataset shards; see `dflop stream`.
    pub shards: Vec<String>,
    /// Generate a dataset instead.
    pub generate: Option<GenerateTable>,
    /// `tokenizer.json` or its directory [default: the model's directory].
    pub tokenizer: Option<PathBuf>,
    /// Number of samples in a global batch.
    pub global_batch_size: u64,
    /// Decoder threads per rank.
    pub workers: usize,
    /// Maximum sample length, in tokens.
    pub tokens_max: Option<u64>,
}

impl Default for DataTable {
    fn default() -> Self {
        Self {
            shards: Vec::new(),
            generate: None,
            tokenizer: None,
            global_batch_size: 32,
            workers: 1,
            tokens_max: None,
        }
    }
}

/// Synthetic mix: texts and tiled images.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct GenerateTable {
    /// Number of samples.
    pub samples: usize,
    /// Seed for the generated data only.
    pub seed: u64,
    /// Fraction of samples with an image, 0 to 1.
    pub image_fraction: f64,
    /// Minimum and maximum tiles per image, including the thumbnail for the whole image.
    pub tiles: [u32; 2],
    /// Tile side, in pixels.
    pub tile_pixels: u32,
    /// Median of the lognormal text length, in tokens.
    pub text_tokens_median: f64,
    /// Standard deviation of the text length's logarithm.
    pub text_tokens_sigma: f64,
    /// Upper bound on that number.
    pub text_tokens_max: u32,
}

impl Default for GenerateTable {
    fn default() -> Self {
        Self {
            samples: 512,
            seed: 0,
            image_fraction: 0.15,
            tiles: [8, 24],
            tile_pixels: 32,
            text_tokens_median: 60.0,
            text_tokens_sigma: 1.0,
            text_tokens_max: 1024,
        }
    }
}

/// Saved states in a run.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointTable {
    /// Directory for saved states [default: none are saved].
    pub directory: Option<PathBuf>,
    /// Steps between saved states; the last step is always saved.
    pub every: Option<u64>,
    /// Number of states to keep [default: 2].
    pub kept: Option<usize>,
    /// Number of earlier runs whose states are kept when a run starts from step 0 [default: all].
    pub kept_earlier: Option<usize>,
}

/// Corrections that a run learns from measured times.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CorrectionTable {
    /// Whether corrections are learned from measured times, recorded and reported.
    pub enabled: bool,
    /// Number of steps between correction updates.
    pub interval_steps: u64,
    /// File that learned tables are recorded in [default: `corrections.jsonl` in the directory of saved
    /// states].
    pub record: Option<PathBuf>,
}

impl Default for CorrectionTable {
    fn default() -> Self {
        Self { enabled: true, interval_steps: 8, record: None }
    }
}

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
