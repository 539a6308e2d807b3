//! Defines the TOML configuration of a training run, its defaults and its checks.
//!
//! Every table but `model` is optional. Paths are relative to the directory of the file. An unknown field is
//! an error, reported with its line.

use std::path::{Path, PathBuf};

use dflop_balancer::Strategy;
use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::{FrozenParts, ModelSpec};
use dflop_executor::device::Cpu;
use dflop_executor::pipeline::Placement;
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::corrections::CorrectionSource;
use crate::args::compute_device::{AttentionName, ComputeDevice, TransportName};
use crate::args::step_plan::parse_strategy;
use crate::failure::Failure;

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrainConfig {
    /// Steps of the run, including those before a restored state; the learning rate schedule spans them.
    #[serde(default = "steps")]
    pub(crate) steps: u64,
    /// Step to end before, if not the last one.
    #[serde(skip)]
    pub(crate) until: Option<u64>,
    /// Seed of initial weights and of the global order.
    #[serde(default)]
    pub(crate) seed: u64,
    pub(crate) model: ModelTable,
    #[serde(default)]
    pub(crate) data: DataTable,
    #[serde(default)]
    pub(crate) parallel: ParallelTable,
    #[serde(default)]
    pub(crate) optimizer: OptimizerTable,
    #[serde(default)]
    pub(crate) checkpoint: CheckpointTable,
    #[serde(default)]
    pub(crate) correction: CorrectionTable,
}

/// Model: a directory as downloaded from Hugging Face, or the contents of its files.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ModelTable {
    /// Directory with `config.json`, `tokenizer.json` and, if present, weights.
    #[serde(rename = "folder")]
    pub(crate) directory: Option<PathBuf>,
    /// Contents of `config.json`, in place of a directory.
    pub(crate) config: Option<Value>,
    /// Contents of `preprocessor_config.json`.
    pub(crate) preprocessor: Option<Value>,
    /// Start with the weights of the directory instead of random ones.
    #[serde(default)]
    pub(crate) pretrained: bool,
    /// Modules that are not trained, such as `"vision,projector"`.
    pub(crate) freeze: Option<String>,
    /// Recompute activations of layers in the backward pass (activation checkpointing).
    #[serde(default)]
    pub(crate) recompute_layers: bool,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct DataTable {
    /// Shards of the dataset; see `dflop stream`.
    pub(crate) shards: Vec<String>,
    /// Generate a dataset instead.
    pub(crate) generate: Option<GenerateTable>,
    /// `tokenizer.json` or its directory [default: the model's directory].
    pub(crate) tokenizer: Option<PathBuf>,
    /// Samples of a global batch.
    pub(crate) global_batch: u64,
    /// Decoder threads per rank.
    pub(crate) workers: usize,
    /// Maximum length of a sample, in tokens.
    pub(crate) tokens_max: Option<u64>,
}

impl Default for DataTable {
    fn default() -> Self {
        Self {
            shards: Vec::new(),
            generate: None,
            tokenizer: None,
            global_batch: 32,
            workers: 1,
            tokens_max: None,
        }
    }
}

/// Synthetic mix of texts and tiled images.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct GenerateTable {
    pub(crate) samples: usize,
    /// Seed of the generated data only.
    pub(crate) seed: u64,
    /// Share of samples with an image, 0 to 1.
    #[serde(rename = "picture_fraction")]
    pub(crate) image_fraction: f64,
    /// Minimum and maximum tiles of an image, including the thumbnail of the whole image.
    pub(crate) tiles: [u32; 2],
    /// Side of a tile, in pixels.
    pub(crate) tile_pixels: u32,
    /// Median of the lognormal number of tokens of a text.
    pub(crate) text_tokens_median: f64,
    /// Standard deviation of the logarithm of that number.
    pub(crate) text_tokens_sigma: f64,
    /// Upper bound on that number.
    pub(crate) text_tokens_max: u32,
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

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ParallelTable {
    /// Placement of the encoders: ranks of their own, or those of the LLM.
    pub(crate) placement: PlacementName,
    /// `gpipe`, `1f1b`, `zb-h1`, `1f1b-ahead:R` or `interleaved:N`.
    pub(crate) schedule: String,
    /// Microbatches per DP rank.
    pub(crate) microbatches: usize,
    /// Name of a partition strategy, such as `balanced` or `data-blind`.
    #[serde(deserialize_with = "strategy")]
    pub(crate) strategy: Strategy,
    /// Search effort per step, in work units.
    pub(crate) work: u64,
    /// Compute threads per rank.
    pub(crate) threads: usize,
    pub(crate) vision: ModuleTable,
    pub(crate) audio: ModuleTable,
    pub(crate) llm: ModuleTable,
    /// Device that stages compute on.
    pub(crate) compute_device: ComputeDevice,
    /// Engines of attention on a CUDA device.
    pub(crate) attention: AttentionName,
    /// Means by which tensors go from one rank to another.
    pub(crate) transport: TransportName,
    /// Device preset that predicts times before anything is measured.
    pub(crate) device: String,
    /// Measured profile in place of the device preset.
    pub(crate) profile: Option<PathBuf>,
    /// Maximum wait for another rank that is not busy, in seconds.
    pub(crate) timeout_seconds: f64,
    /// Maximum wait for another rank that is busy, such as with a slow store, in seconds.
    pub(crate) slow_seconds: f64,
    /// Maximum memory of a rank's weights, gradients, optimizer state and activations [default: the machine's
    /// memory].
    pub(crate) memory_gib: Option<f64>,
}

impl Default for ParallelTable {
    fn default() -> Self {
        Self {
            placement: PlacementName::default(),
            schedule: "1f1b".to_owned(),
            microbatches: 8,
            strategy: Strategy::SEARCH,
            work: 20_000,
            threads: 1,
            vision: ModuleTable::default(),
            audio: ModuleTable::default(),
            llm: ModuleTable::default(),
            compute_device: ComputeDevice::default(),
            attention: AttentionName::default(),
            transport: TransportName::default(),
            device: "cpu".to_owned(),
            profile: None,
            timeout_seconds: 120.0,
            slow_seconds: 1800.0,
            memory_gib: None,
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PlacementName {
    /// Every module has ranks of its own.
    #[default]
    Disaggregated,
    /// Encoders run on the LLM's ranks, before and after it.
    Colocated,
    /// Ranks hold layers of all modules, cut from one chain.
    Joint,
}

impl From<PlacementName> for Placement {
    fn from(name: PlacementName) -> Self {
        match name {
            PlacementName::Disaggregated => Self::Disaggregated,
            PlacementName::Colocated => Self::Colocated,
            PlacementName::Joint => Self::Joint,
        }
    }
}

/// Distribution of one module over ranks.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ModuleTable {
    pub(crate) stages: usize,
    /// Layers of every stage [default: as even as possible]. With joint placement one entry for each stage of
    /// the chain, 0 where it has no layer of the module [default of an encoder: all in the first stage].
    pub(crate) layers: Option<Vec<usize>>,
    pub(crate) dp: usize,
    pub(crate) tp: usize,
}

impl Default for ModuleTable {
    fn default() -> Self {
        Self { stages: 1, layers: None, dp: 1, tp: 1 }
    }
}

/// Returns the faults of the rules that do not hold.
fn faults(rules: &[(bool, &str)]) -> Vec<String> {
    rules.iter().filter(|(holds, _)| !holds).map(|(_, fault)| (*fault).to_owned()).collect()
}

/// Reads a strategy by its name or an alias.
fn strategy<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Strategy, D::Error> {
    let name = String::deserialize(deserializer)?;
    parse_strategy(&name).map_err(D::Error::custom)
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct OptimizerTable {
    pub(crate) learning_rate: f64,
    pub(crate) warmup_steps: u64,
    /// Learning rate at the last step, after a half cosine [default: the rate is constant].
    pub(crate) learning_rate_min: Option<f64>,
    pub(crate) weight_decay: f64,
    pub(crate) betas: [f64; 2],
    pub(crate) epsilon: f64,
    /// Upper bound on the norm of all gradients; 0 disables clipping.
    pub(crate) gradient_norm_max: f64,
    pub(crate) precision: PrecisionName,
    /// Stage of `ZeRO`: 1 divides the optimizer state over the DP ranks of a stage, 0 does not.
    pub(crate) zero_stage: u8,
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
            precision: PrecisionName::F32,
            zero_stage: 0,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PrecisionName {
    /// Weights and activations of 32 bits.
    F32,
    /// Weights and activations of 16 bits, with a 32-bit copy of the weights for the optimizer.
    Bf16,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct CheckpointTable {
    /// Directory of saved states [default: none are saved].
    #[serde(rename = "folder")]
    pub(crate) directory: Option<PathBuf>,
    /// Steps between saved states; the last step is always saved.
    pub(crate) every: Option<u64>,
    /// Number of states to keep [default: 2].
    pub(crate) kept: Option<usize>,
    /// Number of earlier runs whose states are kept, after a run started anew [default: all].
    pub(crate) kept_earlier: Option<usize>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct CorrectionTable {
    /// Whether corrections are learned from measured times, recorded and reported.
    pub(crate) enabled: bool,
    /// Steps between updates of the correction.
    pub(crate) interval_steps: u64,
    /// File that learned tables are recorded in [default: `corrections.jsonl` in the directory of saved
    /// states].
    pub(crate) record: Option<PathBuf>,
    /// Corrections that plans use; an argument of the command, no setting.
    #[serde(skip)]
    pub(crate) source: Option<CorrectionSource>,
}

impl Default for CorrectionTable {
    fn default() -> Self {
        Self { enabled: true, interval_steps: 8, record: None, source: None }
    }
}

const fn steps() -> u64 {
    100
}

impl TrainConfig {
    /// Reads a file and resolves its paths.
    pub(crate) fn read(path: &Path) -> Result<Self, Failure> {
        let text = std::fs::read_to_string(path).map_err(|error| Failure::from(error).in_file(path))?;
        let mut config: Self = toml::from_str(&text)
            .map_err(|error| Failure::Misuse(error.to_string().trim_end().to_owned()).in_file(path))?;
        let directory = path.parent().unwrap_or(Path::new("")).to_owned();
        let resolve = |relative: &mut PathBuf| *relative = directory.join(&*relative);
        let own = [&mut config.model.directory, &mut config.data.tokenizer, &mut config.parallel.profile];
        own.into_iter().flatten().for_each(resolve);
        config.checkpoint.directory.iter_mut().for_each(resolve);
        config.correction.record.iter_mut().for_each(resolve);
        for shard in &mut config.data.shards {
            if !shard.contains("://") && !shard.starts_with("pipe:") && shard != "-" {
                *shard = directory.join(&*shard).display().to_string();
            }
        }
        Ok(config)
    }

    /// Checks the settings that no library checks.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        self.problems().into_iter().next().map_or(Ok(()), |problem| Err(Failure::Misuse(problem)))
    }

    /// Returns all faults of settings that no library checks.
    pub(crate) fn problems(&self) -> Vec<String> {
        let Self { model, data, parallel, .. } = self;
        let rules = [
            (self.steps > 0 && self.until != Some(0), "invalid `steps`: must be at least 1"),
            (
                model.directory.is_some() != model.config.is_some(),
                "`model` needs either `folder` or `config`",
            ),
            (data.shards.is_empty() == data.generate.is_some(), "`data` needs either `shards` or `generate`"),
            (!model.pretrained || model.directory.is_some(), "`model.pretrained` needs `model.folder`"),
            (
                data.generate.is_some() || data.tokenizer.is_some() || model.directory.is_some(),
                "`data.tokenizer` is missing",
            ),
        ];
        let mut problems = faults(&rules);
        for (setting, threads) in [("parallel.threads", parallel.threads), ("data.workers", data.workers)] {
            if !(1..=Cpu::THREADS_MAX).contains(&threads) {
                let expected = Cpu::THREADS_MAX;
                problems.push(format!("invalid `{setting}`: expected 1 to {expected}, found {threads}"));
            }
        }
        for (setting, seconds) in [
            ("parallel.timeout_seconds", parallel.timeout_seconds),
            ("parallel.slow_seconds", parallel.slow_seconds),
        ] {
            if !(seconds > 0.0 && seconds < 1e9) {
                problems.push(format!("invalid `{setting}`: must be above 0"));
            }
        }
        let rules = [
            (
                parallel.memory_gib.is_none_or(|memory| memory > 0.0 && memory < 1e9),
                "invalid `parallel.memory_gib`: must be above 0",
            ),
            (
                parallel.attention == AttentionName::Own || parallel.compute_device != ComputeDevice::Cpu,
                "`parallel.attention` needs a CUDA device in `parallel.compute_device`",
            ),
            (
                parallel.transport == TransportName::Tcp || parallel.compute_device != ComputeDevice::Cpu,
                "`parallel.transport = \"nccl\"` needs CUDA devices in `parallel.compute_device`",
            ),
            (
                self.correction.source != Some(CorrectionSource::Measured) || self.correction.enabled,
                "`--corrections measured` needs `correction.enabled = true`",
            ),
            (self.optimizer.zero_stage <= 1, "invalid `optimizer.zero_stage`: 0 and 1 are supported"),
            (self.checkpoint.every != Some(0), "invalid `checkpoint.every`: must be at least 1"),
        ];
        problems.extend(faults(&rules));
        problems
    }

    pub(crate) fn schedule(&self) -> Result<ScheduleKind, Failure> {
        let name = &self.parallel.schedule;
        name.parse().map_err(|error| Failure::Misuse(format!("invalid `parallel.schedule`: {error}")))
    }

    pub(crate) fn frozen(&self) -> Result<FrozenParts, Failure> {
        let Some(parts) = &self.model.freeze else { return Ok(FrozenParts::default()) };
        parts.parse().map_err(|error| Failure::Misuse(format!("invalid `model.freeze`: {error}")))
    }
}

impl TrainConfig {
    /// Returns the number of ranks of the modules that a model has, saturating.
    pub(crate) fn ranks(&self, spec: &ModelSpec) -> u64 {
        let ranks = |table: &ModuleTable| {
            let stages = table.layers.as_ref().map_or(table.stages, Vec::len);
            let degrees = [stages, table.dp, table.tp].into_iter().map(|degree| degree as u64);
            degrees.fold(1, u64::saturating_mul)
        };
        let ParallelTable { vision, audio, llm, placement, .. } = &self.parallel;
        if *placement != PlacementName::Disaggregated {
            return ranks(llm);
        }
        let encoders = [spec.vision.map(|_| ranks(vision)), spec.audio.map(|_| ranks(audio))];
        encoders.into_iter().flatten().fold(ranks(llm), u64::saturating_add)
    }

    /// Gives every module one stage.
    pub(crate) fn one_stage_each(&mut self) {
        let ParallelTable { vision, audio, llm, .. } = &mut self.parallel;
        for table in [vision, audio, llm] {
            (table.stages, table.layers) = (1, None);
        }
    }

    /// Sets the number of pipeline stages of all modules together; encoders of the configuration keep theirs.
    pub(crate) fn pipeline_stages(&mut self, stages: usize) -> Result<(), Failure> {
        if self.parallel.placement != PlacementName::Disaggregated {
            // Encoders are on the LLM's ranks; those of a joint chain move to its first stage.
            let ParallelTable { vision, audio, llm, placement, .. } = &mut self.parallel;
            (llm.stages, llm.layers) = (stages, None);
            if *placement == PlacementName::Joint {
                (vision.layers, audio.layers) = (None, None);
            }
            return Ok(());
        }
        let has = |name: &str| {
            let config = self.model.config.as_ref();
            config.is_none_or(|config| config.get(name).is_some())
        };
        let mut encoders = 0;
        for (table, name) in
            [(&self.parallel.vision, "vision_config"), (&self.parallel.audio, "audio_config")]
        {
            encoders += if has(name) { table.stages } else { 0 };
        }
        let Some(llm) = stages.checked_sub(encoders).filter(|llm| *llm > 0) else {
            let reason =
                format!("`--pipeline-stages {stages}`: encoders have {encoders}, the LLM needs one more");
            return Err(Failure::Misuse(reason));
        };
        (self.parallel.llm.stages, self.parallel.llm.layers) = (llm, None);
        Ok(())
    }
}
