//! Writes the configuration for a run that takes milliseconds, in a temporary directory.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::command::{Run, command, text};

/// Eight samples a step, one encoder layer, three LLM layers.
const TOML: &str = r#"
steps = 6

[model.config]
model_type = "internvl"
downsample_ratio = 0.5
image_seq_length = 4
image_token_id = 72
projector_hidden_act = "gelu"
tie_word_embeddings = false
vision_feature_layer = -1
vision_feature_select_strategy = "default"

[model.config.vision_config]
model_type = "internvl_vision"
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 2
image_size = [16, 16]
patch_size = [4, 4]
num_channels = 3
attention_bias = true
hidden_act = "gelu"
layer_norm_eps = 1e-6
layer_scale_init_value = 0.1
norm_type = "layer_norm"
use_absolute_position_embeddings = true
use_mask_token = false
use_mean_pooling = true
use_qk_norm = false

[model.config.text_config]
model_type = "qwen2"
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 3
num_attention_heads = 2
num_key_value_heads = 1
hidden_act = "silu"
max_position_embeddings = 256
rms_norm_eps = 1e-6
tie_word_embeddings = false
vocab_size = 80

[model.config.text_config.rope_parameters]
rope_type = "default"
rope_theta = 10000.0

[model.preprocessor]
max_patches = 5
min_patches = 1
crop_to_patches = true
size = { height = 16, width = 16 }

[data]
global_batch_size = 8

[data.generate]
samples = 64
image_fraction = 0.4
tiles = [1, 5]
tile_pixels = 16
text_tokens_median = 10.0
text_tokens_max = 60

[parallel]
microbatches = 2
search_effort = 500
timeout_seconds = 20.0
llm = { stages = 1, dp = 1 }

[optimizer]
learning_rate = 2e-3

[correction]
enabled = false
"#;

/// A configuration and its directory.
pub(crate) struct Job {
    directory: TempDir,
    config: PathBuf,
}

impl Job {
    pub(crate) fn new() -> Self {
        Self::with(&[])
    }

    /// Replaces lines, or line parts; each must occur.
    pub(crate) fn with(replaced: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let config = directory.path().join("train.toml");
        let job = Self { directory, config };
        job.rewrite(replaced);
        job
    }

    /// Writes the configuration again.
    pub(crate) fn rewrite(&self, replaced: &[(&str, &str)]) {
        let replace = |toml: String, (from, to): &(&str, &str)| {
            assert!(toml.contains(from), "the configuration has no `{from}`");
            toml.replacen(from, to, 1)
        };
        let toml = replaced.iter().fold(TOML.to_owned(), replace);
        std::fs::write(&self.config, toml).expect("the directory can be written");
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Directory with the dataset that a run of this job generated, and the model's files.
    pub(crate) fn generated(&self) -> PathBuf {
        let entries = std::fs::read_dir(self.path("dflop/train")).expect("a cache");
        let mut directories = entries.filter_map(Result::ok).map(|entry| entry.path());
        directories.find(|directory| directory.join("shards").is_dir()).expect("a dataset")
    }

    /// The command, not yet started; its private files go into the directory.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = command(&[&["train", text(&self.config), "--json"], args].concat());
        command.env("XDG_CACHE_HOME", self.directory.path());
        command
    }

    /// Runs to the end, successful or not.
    pub(crate) fn run(&self, args: &[&str]) -> Run {
        self.command(args).output().expect("the command starts").into()
    }

    /// Runs to a good end, silent on standard error; returns the lines.
    pub(crate) fn lines(&self, args: &[&str]) -> Vec<Value> {
        let run = self.run(args);
        assert_eq!((run.status, run.stderr.as_str()), (Some(0), ""), "{args:?}");
        run.objects()
    }
}

pub(crate) fn losses(lines: &[Value]) -> Vec<f64> {
    lines.iter().map(|line| line["loss"].as_f64().expect("a loss")).collect()
}

/// Loss bits, by step.
pub(crate) fn loss_bits(lines: &[Value]) -> Vec<(u64, u64)> {
    let steps = lines.iter().map(|line| line["step"].as_u64().expect("a step"));
    steps.zip(losses(lines).into_iter().map(f64::to_bits)).collect()
}

/// Maximum relative difference.
pub(crate) fn difference(these: &[f64], those: &[f64]) -> f64 {
    assert_eq!(these.len(), those.len());
    these.iter().zip(those).map(|(this, that)| ((this - that) / that).abs()).fold(0.0, f64::max)
}
