//! Defines the TOML configuration of a training run, its defaults and its checks.
//!
//! Every table but `model` is optional. Paths are relative to the directory of the file. An unknown field is
//! an error, reported with its line.

mod agreed;
mod data;
mod optimizer;
mod parallel;
mod ranks;
mod rules;
mod saved;

use std::path::{Path, PathBuf};

use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::FrozenParts;
use dflop_loader::store::file;
use serde::{Deserialize, Serialize};

pub(crate) use data::{DataTable, GenerateTable, ModelTable};
pub(crate) use optimizer::{OptimizerTable, PrecisionName};
pub(crate) use parallel::{ModuleTable, ParallelTable, PlacementName};
pub(crate) use saved::{CheckpointTable, CorrectionTable};

use crate::failure::Failure;

#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrainConfig {
    /// Steps of the run, including those before a restored state; the learning rate schedule spans them.
    #[serde(default = "steps")]
    pub(crate) steps: u64,
    /// Step to end before, if not the last one.
    #[serde(skip)]
    pub(crate) until: Option<u64>,
    /// File that steps are recorded in [default: `steps.jsonl` in the directory of checkpoints].
    #[serde(skip)]
    pub(crate) record: Option<PathBuf>,
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

const fn steps() -> u64 {
    100
}

impl TrainConfig {
    /// Reads a file and resolves its paths.
    pub(crate) fn read(path: &Path) -> Result<Self, Failure> {
        let text = file::read_named_text(path).map_err(|error| Failure::from(error).in_file(path))?;
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

    pub(crate) fn schedule(&self) -> Result<ScheduleKind, Failure> {
        let name = &self.parallel.schedule;
        name.parse().map_err(|error| Failure::Misuse(format!("invalid `parallel.schedule`: {error}")))
    }

    pub(crate) fn frozen(&self) -> Result<FrozenParts, Failure> {
        let Some(parts) = &self.model.freeze else { return Ok(FrozenParts::default()) };
        parts.parse().map_err(|error| Failure::Misuse(format!("invalid `model.freeze`: {error}")))
    }
}
