//! Training run configuration: tables, defaults and checks.
//!
//! [`RunConfig`] is read from TOML or JSON, or built in code. Only the model has no default. An unknown
//! field is an error, reported with its line.

mod data;
mod parallel;
mod rules;

use std::path::{Path, PathBuf};

use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::FrozenParts;
use dflop_loader::settings::{IndexSettings, OrderSettings, ProcessorSettings, ReadSettings, pattern_beside};
use dflop_loader::store::file;
use serde::{Deserialize, Serialize};

pub use data::{
    CheckpointTable, CorrectionTable, DataTable, EvaluationTable, GenerateTable, GroupTable, ModelTable,
    OptimizerTable, PrecisionName,
};
pub use parallel::{ModuleTable, ParallelTable, PlacementName, job_layout, strategy_name};

use crate::{Error, Result};

/// Training run configuration.
///
/// The tables `index`, `order`, `read` and `processor` are groups of loader settings
/// ([`dflop_loader::settings`]). Every rank must use the same configuration, except for paths and machine
/// resources, see [`inputs::check_agreement`](crate::inputs::check_agreement).
#[derive(Debug, Clone, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Number of steps, including those before a restored state, at least 1; the learning rate schedule spans
    /// all steps.
    #[serde(default = "steps")]
    pub steps: u64,
    /// Seed for initial weights and the global order.
    #[serde(default)]
    pub seed: u64,
    /// Model to train.
    pub model: ModelTable,
    /// Dataset and global batch.
    #[serde(default)]
    pub data: DataTable,
    /// Index of the dataset.
    #[serde(default)]
    pub index: IndexSettings,
    /// Order of the samples.
    #[serde(default)]
    pub order: OrderSettings,
    /// Reading and decoding of samples.
    #[serde(default)]
    pub read: ReadSettings,
    /// Conversion of samples to model inputs.
    #[serde(default)]
    pub processor: ProcessorSettings,
    /// Distribution over ranks and devices.
    #[serde(default)]
    pub parallel: ParallelTable,
    /// Optimizer and learning rate.
    #[serde(default)]
    pub optimizer: OptimizerTable,
    /// Evaluation on held-out samples during the run. Default: no evaluation.
    pub evaluation: Option<EvaluationTable>,
    /// Saved states.
    #[serde(default)]
    pub checkpoint: CheckpointTable,
    /// Corrections learned from measured times.
    #[serde(default)]
    pub correction: CorrectionTable,
    /// File that [`RunConfig::read`] read.
    #[serde(skip)]
    pub file: Option<PathBuf>,
}

const fn steps() -> u64 {
    100
}

impl RunConfig {
    /// Creates a configuration with defaults for everything but the model.
    #[must_use]
    pub fn new(model: ModelTable) -> Self {
        Self {
            steps: steps(),
            seed: 0,
            model,
            data: DataTable::default(),
            index: IndexSettings::default(),
            order: OrderSettings::default(),
            read: ReadSettings::default(),
            processor: ProcessorSettings::default(),
            parallel: ParallelTable::default(),
            optimizer: OptimizerTable::default(),
            evaluation: None,
            checkpoint: CheckpointTable::default(),
            correction: CorrectionTable::default(),
            file: None,
        }
    }

    /// Reads a TOML file, or a JSON file if the name ends in `.json`. Paths in it are relative to its
    /// directory.
    ///
    /// # Errors
    /// [`Error::Named`] with the file and the fault position.
    pub fn read(path: &Path) -> Result<Self> {
        let text = file::read_named_text(path).map_err(|error| Error::from(error).in_file(path))?;
        let is_json = path.extension().is_some_and(|extension| extension == "json");
        let parsed = if is_json { Self::from_json(&text) } else { Self::from_toml(&text) };
        let mut config = parsed.map_err(|error| error.in_file(path))?;
        config.resolve(path.parent().unwrap_or(Path::new("")));
        config.file = Some(path.to_owned());
        Ok(config)
    }

    /// Parses TOML; relative paths stay relative.
    ///
    /// # Errors
    /// [`Error::Config`] with the faulty line.
    pub fn from_toml(text: &str) -> Result<Self> {
        toml::from_str(text).map_err(|error| invalid(error.to_string().trim_end()))
    }

    /// Parses JSON; relative paths stay relative.
    ///
    /// # Errors
    /// [`Error::Config`] with the faulty line.
    pub fn from_json(text: &str) -> Result<Self> {
        serde_json::from_str(text).map_err(|error| invalid(&error.to_string()))
    }

    /// Describes all fields, table by table, in the order of declaration.
    #[cfg(feature = "schema")]
    #[must_use]
    pub fn described() -> Vec<dflop_loader::settings::DescribedTable> {
        dflop_loader::settings::described_tables::<Self>()
    }

    /// Resolves relative paths against a directory.
    fn resolve(&mut self, directory: &Path) {
        let resolve = |relative: &mut PathBuf| *relative = directory.join(&*relative);
        let own = [&mut self.model.directory, &mut self.data.tokenizer, &mut self.parallel.profile];
        own.into_iter().flatten().for_each(resolve);
        let index = [&mut self.index.directory, &mut self.index.splits];
        index.into_iter().flatten().for_each(resolve);
        self.checkpoint.directory.iter_mut().for_each(resolve);
        self.correction.record.iter_mut().for_each(resolve);
        if let Some(mixture) = &mut self.data.mixture {
            mixture.resolve(directory);
        }
        let evaluation = self.evaluation.iter_mut().flat_map(|evaluation| &mut evaluation.shards);
        for shard in self.data.shards.iter_mut().chain(evaluation) {
            if shard != "-" {
                *shard = pattern_beside(directory, shard);
            }
        }
    }

    pub(super) fn schedule(&self) -> Result<ScheduleKind> {
        let name = &self.parallel.schedule;
        name.parse().map_err(|error| Error::Config(format!("invalid `parallel.schedule`: {error}")))
    }

    pub(super) fn frozen(&self) -> Result<FrozenParts> {
        let Some(parts) = &self.model.freeze else { return Ok(FrozenParts::default()) };
        parts.parse().map_err(|error| Error::Config(format!("invalid `model.freeze`: {error}")))
    }
}

/// Old and new names for renamed fields.
const RENAMED: [(&str, &str); 6] = [
    ("folder", "directory"),
    ("global_batch", "global_batch_size"),
    ("picture_fraction", "image_fraction"),
    ("tokens_max", "processor.long_sample = \"error:N\""),
    ("work", "search_effort"),
    ("workers", "read.workers"),
];

/// Returns the error for a configuration that cannot be parsed; includes the new name for a renamed field.
fn invalid(message: &str) -> Error {
    let is_used = |(old, _): &&(&str, &str)| message.contains(&format!("unknown field `{old}`"));
    let renamed = RENAMED.iter().find(is_used).map(|(old, new)| format!("; `{old}` is now `{new}`"));
    let is_split = message.contains("unknown field `context`");
    let split =
        is_split.then(|| "; every sample is whole on one rank here: `dflop.Plan(context=...)` splits".into());
    Error::Config(format!("{message}{}", renamed.or(split).unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn toml_and_json_give_the_configuration_that_code_builds() {
        let model = ModelTable { directory: Some("m".into()), ..ModelTable::default() };
        let mut built = RunConfig::new(model);
        (built.steps, built.optimizer.learning_rate) = (3, 2e-3);
        let toml = "steps = 3\n[model]\ndirectory = \"m\"\n[optimizer]\nlearning_rate = 2e-3\n";
        let json = r#"{"steps": 3, "model": {"directory": "m"}, "optimizer": {"learning_rate": 2e-3}}"#;
        for parsed in [RunConfig::from_toml(toml).unwrap(), RunConfig::from_json(json).unwrap()] {
            assert_eq!(serde_json::to_value(parsed).unwrap(), serde_json::to_value(&built).unwrap());
        }
    }

    #[test]
    fn paths_of_a_file_are_relative_to_its_directory() {
        let directory = tempfile::tempdir().unwrap();
        let json = r#"{"model": {"directory": "m"}, "data": {"shards": ["a.tar", "s3://b/c.tar"]}}"#;
        for (name, text) in [
            ("run.json", json),
            ("run.toml", "[model]\ndirectory='m'\n[data]\nshards=['a.tar', 's3://b/c.tar']"),
        ] {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            let config = RunConfig::read(&path).unwrap();
            assert_eq!(config.model.directory, Some(directory.path().join("m")), "{name}");
            let shard = directory.path().join("a.tar").display().to_string();
            assert_eq!(config.data.shards, [shard, "s3://b/c.tar".to_owned()], "{name}");
            assert_eq!(config.file, Some(path), "{name}");
        }
    }

    #[test]
    fn a_renamed_field_is_refused_with_its_new_name() {
        for (text, hint) in [
            ("[model]\nfolder = 'm'\n", "; `folder` is now `directory`"),
            ("[model]\n[checkpoint]\nfolder = 'm'\n", "; `folder` is now `directory`"),
            ("[model]\n[data]\nglobal_batch = 5\n", "; `global_batch` is now `global_batch_size`"),
            ("[model]\n[parallel]\nwork = 5\n", "; `work` is now `search_effort`"),
            ("[model]\n[data]\nworkers = 5\n", "; `workers` is now `read.workers`"),
            (
                "[model]\n[parallel]\ncontext = 8\n",
                "; every sample is whole on one rank here: `dflop.Plan(context=...)` splits",
            ),
            (
                "[model]\n[data]\ntokens_max = 5\n",
                "; `tokens_max` is now `processor.long_sample = \"error:N\"`",
            ),
            (
                "[model]\n[data.generate]\npicture_fraction = 0\n",
                "; `picture_fraction` is now `image_fraction`",
            ),
        ] {
            let message = RunConfig::from_toml(text).unwrap_err().to_string();
            assert!(message.ends_with(hint), "{message}");
        }
    }

    #[test]
    fn an_unknown_choice_is_refused_with_the_choices() {
        for (table, setting, reason) in [
            ("optimizer", "precision", "expected f32 or bf16"),
            ("parallel", "placement", "expected disaggregated, colocated or joint"),
            ("parallel", "attention", "expected own or fastest"),
            ("parallel", "transport", "expected tcp or nccl"),
        ] {
            let expected = format!("invalid `{setting}`: {reason}, found `x`");
            let toml = RunConfig::from_toml(&format!("[model]\n[{table}]\n{setting} = 'x'\n"));
            let json =
                RunConfig::from_json(&format!(r#"{{"model": {{}}, "{table}": {{"{setting}": "x"}}}}"#));
            for parsed in [toml, json] {
                let message = parsed.unwrap_err().to_string();
                assert!(message.contains(&expected), "{message}");
            }
        }
    }

    #[test]
    fn choices_are_read_as_they_are_written() {
        use crate::run::{AttentionName, TransportName};
        let mut config = RunConfig::new(ModelTable::default());
        config.optimizer.precision = PrecisionName::Bf16;
        (config.parallel.attention, config.parallel.transport) =
            (AttentionName::Fastest, TransportName::Nccl);
        for placement in [PlacementName::Disaggregated, PlacementName::Colocated, PlacementName::Joint] {
            config.parallel.placement = placement;
            let written = serde_json::to_value(&config).unwrap();
            let read = RunConfig::from_json(&written.to_string()).unwrap();
            assert_eq!(serde_json::to_value(read).unwrap(), written);
        }
    }

    #[test]
    fn an_unknown_field_is_named_with_the_file_and_its_line() {
        let directory = tempfile::tempdir().unwrap();
        for (name, text, line) in [
            ("run.toml", "[model]\nfoldr = 'm'\n", "line 2"),
            ("run.json", "{\"model\":\n {\"foldr\": \"m\"}}", "line 2"),
        ] {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            let message = RunConfig::read(&path).unwrap_err().to_string();
            assert!(
                message.contains(name) && message.contains("foldr") && message.contains(line),
                "{message}"
            );
        }
    }
}
