//! Run settings that all ranks must share.

use serde_json::Value;

use super::RunConfig;
use crate::inputs::Settings;

/// Settings that may differ between machines: machine resources, and paths, whose contents are compared
/// instead.
const OF_ONE_MACHINE: [&str; 9] = [
    "checkpoint.directory",
    "correction.record",
    "data.shards",
    "data.tokenizer",
    "data.workers",
    "model.directory",
    "parallel.memory_gib",
    "parallel.profile",
    "parallel.threads",
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
        Value::Object(table) if !["model.config", "model.preprocessor"].contains(&name) => {
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
        let same = "steps = 100\n[model]\ndirectory = \"m\"\n[data]\nworkers = 3\nshards = [\"s\"]\n\
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
