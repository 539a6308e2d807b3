//! Run model and run data.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

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
