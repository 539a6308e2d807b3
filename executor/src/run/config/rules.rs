//! Rules that a configuration must follow, and settings that all ranks must share.

use super::RunConfig;
use crate::device::Cpu;
use crate::inputs::Settings;
use crate::run::compute_device::{AttentionName, ComputeDevice, TransportName};
use crate::run::options::{CorrectionSource, RunOptions};
use crate::{Error, Result};
use dflop_loader::settings::{DecodeName, OrderSettings, ProcessorSettings};
use serde_json::Value;

impl RunConfig {
    /// Checks the settings that no other part of a run checks, without reading files.
    ///
    /// # Errors
    /// [`Error::Config`] with the first fault.
    pub fn check(&self) -> Result<()> {
        self.problems(&RunOptions::default())
            .into_iter()
            .next()
            .map_or(Ok(()), |problem| Err(Error::Config(problem)))
    }

    /// Returns all setting faults that no other part of a run checks.
    pub(in crate::run) fn problems(&self, options: &RunOptions) -> Vec<String> {
        let Self { model, data, parallel, .. } = self;
        let rules = [
            (self.steps > 0 && options.until != Some(0), "invalid `steps`: must be at least 1"),
            (
                model.directory.is_some() != model.config.is_some(),
                "`model` needs either `directory` or `config`",
            ),
            (
                [!data.shards.is_empty(), data.mixture.is_some(), data.generate.is_some()]
                    .iter()
                    .filter(|is_set| **is_set)
                    .count()
                    == 1,
                "`data` needs one of `shards`, `mixture` and `generate`",
            ),
            (!model.pretrained || model.directory.is_some(), "`model.pretrained` needs `model.directory`"),
            (
                data.generate.is_some() || data.tokenizer.is_some() || model.directory.is_some(),
                "`data.tokenizer` is missing",
            ),
        ];
        let mut problems = faults(&rules);
        let workers = self.read.workers.unwrap_or(1);
        for (setting, threads) in [("parallel.threads", parallel.threads), ("read.workers", workers)] {
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
                options.corrections != Some(CorrectionSource::Measured) || self.correction.enabled,
                "`--corrections measured` needs `correction.enabled = true`",
            ),
            (self.optimizer.zero_stage <= 1, "invalid `optimizer.zero_stage`: 0 and 1 are supported"),
            (self.checkpoint.every != Some(0), "invalid `checkpoint.every`: must be at least 1"),
        ];
        problems.extend(faults(&rules));
        problems.extend(self.evaluation_problems());
        problems.extend(self.group_problems());
        problems.extend(self.unusable());
        problems
    }

    /// Returns the faults in the evaluation table.
    fn evaluation_problems(&self) -> Vec<String> {
        let Some(evaluation) = &self.evaluation else { return Vec::new() };
        let has_own = !evaluation.shards.is_empty();
        let has_split = evaluation.split.is_some() && !self.data.shards.is_empty();
        faults(&[
            (evaluation.every != Some(0), "invalid `evaluation.every`: must be at least 1"),
            (evaluation.batches != Some(0), "invalid `evaluation.batches`: must be at least 1"),
            (has_own || has_split, "`evaluation` needs `shards`, or a `split` of `data.shards`"),
            (
                has_own || evaluation.split.is_none() || evaluation.split != self.data.split,
                "`evaluation.split` is the split that the run trains on: name another one",
            ),
        ])
    }

    /// Returns the faults in the parameter groups that are visible without a model.
    fn group_problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for (at, group) in self.optimizer.groups.iter().enumerate() {
            let has_rates = group.learning_rate.is_some() || group.weight_decay.is_some();
            let mut add = |problem: &str| problems.push(format!("`optimizer.groups[{at}]`: {problem}"));
            if group.frozen == has_rates {
                add("expected either `frozen = true`, or `learning_rate` or `weight_decay`");
            }
            let rates = [("learning_rate", group.learning_rate), ("weight_decay", group.weight_decay)];
            for (name, _) in rates.iter().filter(|(_, rate)| rate.is_some_and(|rate| !is_rate(rate))) {
                add(&format!("invalid `{name}`: must be a finite number of at least 0"));
            }
            if group.learning_rate.is_some() && self.optimizer.learning_rate == 0.0 {
                add("a `learning_rate` needs an `optimizer.learning_rate` above 0, whose course it follows");
            }
        }
        problems
    }

    /// Returns the faults of loader settings that a run has no use for.
    fn unusable(&self) -> Vec<String> {
        let Self { data, index, order, read, processor, .. } = self;
        let defaults = ProcessorSettings::default();
        let (has_shards, generate) = (!data.shards.is_empty(), "a run with `data.shards` alone has it");
        let in_mixture = "give it to each dataset of `data.mixture`";
        let of_datasets = if data.mixture.is_some() { in_mixture } else { generate };
        let packed = "the executor takes packed rows of any length";
        let evaluated = self.evaluation.as_ref().is_some_and(|evaluation| evaluation.split.is_some());
        let has_split = data.split.is_some() || evaluated;
        let settings = [
            ("data.split", has_shards || data.split.is_none(), of_datasets),
            ("index.directory", has_shards || index.directory.is_none(), of_datasets),
            (
                "index.splits",
                has_split || index.splits.is_none(),
                "it needs `data.split` or `evaluation.split`",
            ),
            ("order.tail", order.tail == OrderSettings::default().tail, "every step has a full global batch"),
            ("read.fields", read.fields.is_none(), "the model's processor reads the fields that it needs"),
            ("read.decode", read.decode != DecodeName::Raw, "the executor needs decoded media"),
            ("processor.layout", processor.layout == defaults.layout, packed),
            ("processor.length_buckets", processor.length_buckets.is_none(), packed),
            ("processor.media_buckets", processor.media_buckets.is_none(), packed),
            (
                "processor.token_counts",
                processor.token_counts == defaults.token_counts,
                "a run counts the tokens of all samples",
            ),
            (
                "processor.dtype",
                processor.dtype == defaults.dtype,
                "the executor converts pixels; see `optimizer.precision`",
            ),
            (
                "processor.blank_media",
                processor.blank_media == defaults.blank_media,
                "the executor runs encoders without blank media",
            ),
        ];
        let unusable = settings.into_iter().filter(|(_, is_usable, _)| !is_usable);
        unusable.map(|(setting, _, reason)| format!("`{setting}` has no effect here: {reason}")).collect()
    }
}

fn is_rate(rate: f64) -> bool {
    rate.is_finite() && rate >= 0.0
}

/// Returns the fault texts for rules that do not hold.
fn faults(rules: &[(bool, &str)]) -> Vec<String> {
    rules.iter().filter(|(holds, _)| !holds).map(|(_, fault)| (*fault).to_owned()).collect()
}

/// Settings that may differ between machines: machine resources, and paths, whose contents are compared
/// instead.
const OF_ONE_MACHINE: [&str; 17] = [
    "checkpoint.directory",
    "correction.record",
    "data.mixture",
    "data.shards",
    "data.tokenizer",
    "evaluation.shards",
    "index.directory",
    "index.splits",
    "model.directory",
    "parallel.memory_gib",
    "parallel.profile",
    "parallel.threads",
    "read.buffered_bytes",
    "read.stall_log_seconds",
    "read.stall_seconds",
    "read.steps_ahead",
    "read.workers",
];

impl RunConfig {
    /// Returns the settings that all ranks must share, defaults included, by their names in the file.
    pub(in crate::run) fn agreed(&self) -> Settings {
        let mut settings = Settings::new();
        let mut config = serde_json::to_value(self).expect("numbers, text and paths can be written");
        config.sort_all_objects();
        add(&mut settings, "", &config);
        settings.retain(|name, _| !OF_ONE_MACHINE.contains(&name.as_str()));
        settings.insert("checkpoint".to_owned(), self.checkpoint.directory.is_some().to_string());
        settings.insert("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
        settings
    }
}

/// Adds table values under dotted names.
fn add(settings: &mut Settings, name: &str, value: &Value) {
    match value {
        // Each model file's contents are a single setting.
        Value::Object(table) if !["data.mixture", "model.config", "model.preprocessor"].contains(&name) => {
            for (key, value) in table {
                let dotted = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                add(settings, &dotted, value);
            }
        }
        value => {
            settings.insert(name.to_owned(), value.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agreed(text: &str) -> Settings {
        RunConfig::from_toml(text).unwrap().agreed()
    }

    #[test]
    fn defaults_are_settings_and_resources_of_a_machine_are_not() {
        let plain = agreed("[model]\n");
        let same = "steps = 100\n[model]\ndirectory = \"m\"\n[data]\nshards = [\"s\"]\n[read]\nworkers = 3\n\
                    [parallel]\nthreads = 2\nstrategy = \"balanced\"\n[optimizer]\nlearning_rate = 1e-3\n";
        assert_eq!(agreed(same), plain);
        assert_eq!(plain["optimizer.learning_rate"], "0.001");
        assert_eq!(plain["parallel.llm.tp"], "1");
    }

    #[test]
    fn every_other_field_is_a_setting() {
        let plain = agreed("[model]\n");
        for (text, name) in [
            ("seed = 1\n[model]\n", "seed"),
            ("[model]\npretrained = true\n", "model.pretrained"),
            ("[model]\nconfig = {hidden_size = 8}\n", "model.config"),
            ("[model]\n[optimizer]\nlearning_rate = 2e-3\n", "optimizer.learning_rate"),
            ("[model]\n[data]\nglobal_batch_size = 8\n", "data.global_batch_size"),
            ("[model]\n[parallel]\nstrategy = \"data-blind\"\n", "parallel.strategy"),
            ("[model]\n[parallel]\ncompute_device = \"cuda:1\"\n", "parallel.compute_device"),
            ("[model]\n[checkpoint]\nevery = 4\n", "checkpoint.every"),
        ] {
            let other = agreed(text);
            let differing: Vec<_> =
                other.iter().filter(|(name, value)| plain.get(*name) != Some(value)).collect();
            assert_eq!(differing.len(), 1, "{differing:?}");
            assert_eq!(differing[0].0, name);
        }
    }
}
