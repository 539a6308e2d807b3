//! Configuration tables for the data, the optimizer and what a run saves.

use dflop_loader::settings::{MixtureSettings, choice_for};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::path::PathBuf;

/// Model: a directory as downloaded from Hugging Face, or the file contents.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ModelTable {
    /// Directory with `config.json`, `tokenizer.json` and, if present, weights.
    pub directory: Option<PathBuf>,
    /// `config.json` contents. A run needs either `directory` or `config`.
    #[cfg_attr(feature = "schema", schemars(with = "Option<serde_json::Map<String, Value>>"))]
    pub config: Option<Value>,
    /// `preprocessor_config.json` contents, together with `config`.
    #[cfg_attr(feature = "schema", schemars(with = "Option<serde_json::Map<String, Value>>"))]
    pub preprocessor: Option<Value>,
    /// Whether training starts with the weights in `directory`, which is then required, instead of random
    /// weights.
    #[serde(default)]
    pub pretrained: bool,
    /// Modules that are not trained, any of `vision,audio,projector,llm`. Default: all are trained.
    pub freeze: Option<String>,
    /// Whether layer activations are recomputed in the backward pass (activation checkpointing), not stored;
    /// `recompute` in `parallel.llm` and the other modules replaces it for a module.
    #[serde(default)]
    pub recompute_layers: bool,
}

/// Run dataset.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct DataTable {
    /// Dataset shards, directories, shard lists or URLs, as for `dflop stream`. A run needs one of `shards`,
    /// `mixture` and `generate`.
    pub shards: Vec<String>,
    /// Split of `shards` to train on. Default: all samples.
    pub split: Option<String>,
    /// Mixture of datasets, as a [mixture file](formats.md#mixtures) describes it.
    #[cfg_attr(feature = "schema", schemars(with = "Option<serde_json::Map<String, Value>>"))]
    pub mixture: Option<MixtureSettings>,
    /// Synthetic dataset, texts and tiled images, as an alternative to `data.shards`.
    pub generate: Option<GenerateTable>,
    /// `tokenizer.json` or a directory with this file. Default: the model directory; a generated dataset has
    /// a tokenizer.
    pub tokenizer: Option<PathBuf>,
    /// Number of samples in a global batch, over all ranks.
    pub global_batch_size: u64,
}

impl Default for DataTable {
    fn default() -> Self {
        Self {
            shards: Vec::new(),
            split: None,
            mixture: None,
            generate: None,
            tokenizer: None,
            global_batch_size: 32,
        }
    }
}

/// Synthetic mix: texts and tiled images.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct GenerateTable {
    /// Number of samples, at least 1.
    pub samples: usize,
    /// Seed for the generated data only.
    pub seed: u64,
    /// Fraction of samples with an image, 0 to 1.
    pub image_fraction: f64,
    /// Minimum and maximum tiles per image, 1 to 256, including the thumbnail for the whole image.
    pub tiles: [u32; 2],
    /// Tile side, in pixels, 4 to 1024.
    pub tile_pixels: u32,
    /// Median of the lognormal text length, in tokens, at least 1.
    pub text_tokens_median: f64,
    /// Standard deviation of the text length's natural logarithm, at least 0 and below 10.
    pub text_tokens_sigma: f64,
    /// Maximum text length, in tokens, at least 2.
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

/// Evaluation during a run: the mean loss over the target tokens of held-out samples.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct EvaluationTable {
    /// Steps between evaluations, at least 1; an evaluation also follows the last step. Default: only the
    /// last step.
    pub every: Option<u64>,
    /// Shards to evaluate on, as in `data.shards`. Default: `data.shards`, with a `split`.
    pub shards: Vec<String>,
    /// Split to evaluate on. Default: all samples in `evaluation.shards`.
    pub split: Option<String>,
    /// Maximum number of global batches in an evaluation, at least 1: the same samples each time, drawn from
    /// all shards. Default: every sample once.
    pub batches: Option<u64>,
}

/// Saved states in a run.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointTable {
    /// Directory for saved states. Default: no states are saved.
    pub directory: Option<PathBuf>,
    /// Steps between saved states, at least 1; the last step is always saved. Default: only the last step is
    /// saved.
    pub every: Option<u64>,
    /// Number of states to keep, at least 1. Default: 2.
    pub kept: Option<usize>,
    /// Number of earlier runs whose states are kept, once a run from step 0 has saved a state. Default: all.
    pub kept_earlier: Option<usize>,
}

/// Corrections that a run learns from measured times.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct CorrectionTable {
    /// Whether corrections are learned from measured times, recorded and reported. Plans use corrections only
    /// with `dflop train --corrections`.
    pub enabled: bool,
    /// Number of steps between correction updates, at least 1.
    pub interval_steps: u64,
    /// File that learned corrections are recorded in. Default: `corrections.jsonl` in `checkpoint.directory`.
    pub record: Option<PathBuf>,
}

impl Default for CorrectionTable {
    fn default() -> Self {
        Self { enabled: true, interval_steps: 8, record: None }
    }
}

/// `AdamW` settings and the learning rate.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerTable {
    /// Peak learning rate, at least 0.
    pub learning_rate: f64,
    /// Number of steps in which the learning rate rises linearly to the peak.
    pub warmup_steps: u64,
    /// Learning rate at the last step, after a half cosine, 0 to `learning_rate`. Default: the rate stays at
    /// the peak.
    pub learning_rate_min: Option<f64>,
    /// Decoupled weight decay for matrices, per unit of learning rate, at least 0.
    pub weight_decay: f64,
    /// Decay rates for the first and the second moment, at least 0 and below 1.
    pub betas: [f64; 2],
    /// Term added to the root of the second moment, above 0.
    pub epsilon: f64,
    /// Maximum norm over all gradients; 0 disables clipping.
    pub gradient_norm_max: f64,
    /// Maximum number of consecutive steps that are skipped because a loss or a gradient is not finite; a
    /// further step ends the run.
    pub skip_nonfinite: u64,
    /// Weight and activation format.
    pub precision: PrecisionName,
    /// ZeRO stage: 1 divides the optimizer state over a module's DP ranks, 0 does not.
    pub zero_stage: u8,
    /// Parameters with other rates, or frozen: tables with `parameters`, and any of `learning_rate`,
    /// `weight_decay` and `frozen = true`. `parameters` is a part, `vision`, `audio`, `projector` or `llm`,
    /// or a pattern for names as in checkpoints, in which `*` stands for any characters and `?` for one. The
    /// last table that names a parameter applies.
    #[cfg_attr(feature = "schema", schemars(with = "Vec<serde_json::Map<String, Value>>"))]
    pub groups: Vec<GroupTable>,
}

/// Parameters whose rates differ from the other optimizer settings, or that are frozen.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct GroupTable {
    /// Part, `vision`, `audio`, `projector` or `llm`, or pattern for parameter names as in checkpoints.
    pub parameters: String,
    /// Peak learning rate, at least 0; warm-up and decay are those of the other parameters. Default: that of
    /// the other parameters.
    pub learning_rate: Option<f64>,
    /// Weight decay for matrices, at least 0. Default: that of the other parameters.
    pub weight_decay: Option<f64>,
    /// Whether the parameters are not trained.
    #[serde(default)]
    pub frozen: bool,
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
            groups: Vec::new(),
        }
    }
}

/// Weight and activation format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum PrecisionName {
    /// 32-bit weights and activations.
    F32,
    /// 16-bit weights and activations, with a 32-bit weight copy for the optimizer.
    Bf16,
}

impl<'de> Deserialize<'de> for PrecisionName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        choice_for("precision", deserializer, &[("f32", Self::F32), ("bf16", Self::Bf16)])
    }
}
