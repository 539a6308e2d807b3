//! Settings under the names that users write: in Python, on the command line, in configuration files.
//!
//! Each setting is declared once, in the group that it belongs to, with a type, a default and a sentence. The
//! Python dataclasses, the option `--set GROUP.KEY=VALUE` and the reference page of the settings are made
//! from these declarations: [`Settings`] is read by serde, [`set`] replaces a setting by name, and with the
//! feature
//! `schema` a JSON schema describes it.
//!
//! # Examples
//! ```
//! use dflop_loader::settings::Settings;
//!
//! let settings = Settings::from_pairs(["order.shuffle=blocks:512:64", "plan.tokens_max=8192"])?;
//! assert_eq!(settings.plan.tokens_max, Some(8192));
//! let unknown = Settings::from_pairs(["order.shuffling=none"]).unwrap_err().to_string();
//! assert!(unknown.contains("`shuffle`"), "{unknown}");
//! # Ok::<(), dflop_loader::Error>(())
//! ```

mod data;
#[cfg(feature = "schema")]
mod described;
mod mixture;
mod planning;
#[cfg(feature = "processors")]
mod processor;
mod spelling;
mod store;

use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use data::{AugmentSettings, BudgetSetting, DecodeName, IndexSettings, ReadSettings};
#[cfg(feature = "schema")]
pub use described::{Described, DescribedTable, described_tables};
pub use mixture::{DatasetSettings, MixtureSettings, WeightsFrom, pattern_beside};
pub use planning::{
    CostSettings, OrderSettings, PlanSettings, RecomputationName, StepSchedule, StrategyEffort, TailName,
};
#[cfg(feature = "processors")]
pub use processor::{
    BlankMediaName, BucketSizes, LayoutSetting, LongSampleSetting, PixelTypeName, ProcessorSettings,
    RowLengths, TokenCountsName,
};

pub use data::{EncoderShare, SpaceKinds, SpacePlacement, SpaceSettings};
pub use spelling::Names;
pub use spelling::choice_for;
pub use store::{Allowed, ReadModeName, StoreSettings, machine_device};

use crate::error::{Error, Result};
use crate::store::file;

/// All groups of settings.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Access to local and remote shards.
    pub store: StoreSettings,
    /// Index of a dataset.
    pub index: IndexSettings,
    /// Device and training setup that costs are predicted for.
    pub cost: CostSettings,
    /// Assignment of the samples of a global batch to ranks and microbatches.
    pub plan: PlanSettings,
    /// Order of the samples of a run, and the ends of its epochs.
    pub order: OrderSettings,
    /// Reading and decoding of samples.
    pub read: ReadSettings,
    /// Random augmentation of images.
    pub augment: AugmentSettings,
    /// Kinds of parallelism plans that are searched.
    pub space: SpaceSettings,
    /// Conversion of samples to the tensors that the model takes.
    #[cfg(feature = "processors")]
    pub processor: ProcessorSettings,
}

impl Settings {
    /// Reads settings from texts such as `order.shuffle=none`; the others have their defaults. A value is
    /// JSON, a list separated by commas, or plain text; `@FILE` is the content of a file.
    ///
    /// # Errors
    /// [`Error::Config`] if a text has no such form, names no setting, or has no value of its type.
    pub fn from_pairs<S: AsRef<str>>(pairs: impl IntoIterator<Item = S>) -> Result<Self> {
        Self::default().with_pairs(pairs)
    }

    /// Replaces settings by texts, as [`Self::from_pairs`] reads them.
    ///
    /// # Errors
    /// Those of [`Self::from_pairs`].
    pub fn with_pairs<S: AsRef<str>>(mut self, pairs: impl IntoIterator<Item = S>) -> Result<Self> {
        for pair in pairs {
            self.set_pair(pair.as_ref())?;
        }
        Ok(self)
    }

    fn set_pair(&mut self, pair: &str) -> Result<()> {
        let invalid = |reason: String| Error::Config { setting: "set", reason };
        let parts = pair.split_once('=').and_then(|(name, text)| Some((name.split_once('.')?, text)));
        let Some(((group, key), text)) = parts else {
            return Err(invalid(format!("expected GROUP.KEY=VALUE, found `{pair}`")));
        };
        match group {
            "store" => set_text(&mut self.store, key, text),
            "index" => set_text(&mut self.index, key, text),
            "cost" => set_text(&mut self.cost, key, text),
            "plan" => set_text(&mut self.plan, key, text),
            "order" => set_text(&mut self.order, key, text),
            "read" => set_text(&mut self.read, key, text),
            "augment" => set_text(&mut self.augment, key, text),
            "space" => set_text(&mut self.space, key, text),
            #[cfg(feature = "processors")]
            "processor" => set_text(&mut self.processor, key, text),
            _ => {
                let known = names::<Self>().iter().map(|name| format!("`{name}`")).collect::<Vec<_>>();
                Err(invalid(format!("unknown group `{group}`; the groups are {}", known.join(", "))))
            }
        }
    }
}

/// Settings of earlier versions, and what replaces them in the same group.
const MOVED: [(&str, &str); 16] = [
    ("allow_outside", "allow=outside"),
    ("allow_pipe", "allow=pipe"),
    ("block_samples", "shuffle=blocks:SAMPLES:RUNS"),
    ("crop_ratio", "crop=LEAST,MOST,NARROWEST,WIDEST"),
    ("crop_scale", "crop=LEAST,MOST"),
    ("error_count", "error_budget=FRACTION:SAMPLES"),
    ("open_blocks", "shuffle=blocks:SAMPLES:RUNS"),
    ("pad_to_tokens", "length_buckets=fixed:N"),
    ("repeat_samples", "tail=repeat"),
    ("sample_multiple_of", "layout=packed:N"),
    ("sample_tokens_max", "long_sample=error:N"),
    ("search_effort", "strategy=search:UNITS"),
    ("skip_media_tensors", "dtype=none"),
    ("strict", "decode=strict"),
    ("synchronize", "schedule=step"),
    ("work", "strategy=search:UNITS"),
];

/// Whether a group has the setting of a text `KEY=VALUE`.
fn takes<G: DeserializeOwned>(pair: &str) -> bool {
    pair.split('=').next().is_some_and(|key| names::<G>().contains(&key))
}

/// Replaces a setting in a group by name.
///
/// # Errors
/// [`Error::Config`] with the settings of the group if `key` is none of them, or with the reason why it does
/// not take the value, which starts with `invalid type` for a value of another type.
pub fn set<G: Serialize + DeserializeOwned>(group: &mut G, key: &str, value: Value) -> Result<()> {
    let Some(setting) = names::<G>().iter().copied().find(|name| *name == key) else {
        let known: Vec<String> = names::<G>().iter().map(|name| format!("`{name}`")).collect();
        let reason = match MOVED.iter().find(|(old, new)| *old == key && takes::<G>(new)) {
            Some((_, new)) => format!("unknown setting `{key}`; write `{new}`"),
            None => format!("unknown setting `{key}`; the settings are {}", known.join(", ")),
        };
        return Err(Error::Config { setting: "set", reason });
    };
    let invalid = |error: serde_json::Error| Error::Config { setting, reason: error.to_string() };
    let Value::Object(mut values) = serde_json::to_value(&*group).map_err(invalid)? else {
        unreachable!("a group is written as an object");
    };
    values.insert(key.to_owned(), value);
    *group = serde_json::from_value(Value::Object(values)).map_err(invalid)?;
    Ok(())
}

/// Replaces a setting by the first reading of a text that it takes: JSON, a list, plain text.
fn set_text<G: Serialize + DeserializeOwned>(group: &mut G, key: &str, text: &str) -> Result<()> {
    if let Some(path) = text.strip_prefix('@') {
        let path = Path::new(path);
        let content = file::read_named_text(path).map_err(|source| Error::file(path, source))?;
        return set(group, key, Value::String(content));
    }
    let json: Option<Value> = serde_json::from_str(text).ok();
    let word = |text: &str| serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()));
    let list = Value::Array(text.split(',').map(|part| word(part.trim())).collect());
    let plain = Value::String(text.to_owned());
    // The reading that a user most likely meant has the message.
    let readings = match json {
        Some(json) => vec![json, list, plain],
        None if text.contains(',') => vec![list, plain],
        None => vec![plain, list],
    };
    let mut first_error = None;
    for reading in readings {
        match set(group, key, reading) {
            Ok(()) => return Ok(()),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    first_error.map_or(Ok(()), Err)
}

/// Returns the names of the fields of a struct, in the order of their declaration.
#[must_use]
pub fn names<G: DeserializeOwned>() -> &'static [&'static str] {
    let mut names: &'static [&'static str] = &[];
    // The error is that of a deserializer that only looks at the names.
    let _ = G::deserialize(spelling::FieldNames(&mut names));
    names
}

/// Returns the settings of a group that do not have their defaults.
///
/// # Panics
/// Never: all settings can be written.
#[must_use]
pub fn changed<G: Serialize + Default>(group: &G) -> Map<String, Value> {
    let values = |group: &G| match serde_json::to_value(group).expect("settings can be written") {
        Value::Object(values) => values,
        _ => Map::new(),
    };
    let defaults = values(&G::default());
    values(group).into_iter().filter(|(name, value)| defaults.get(name) != Some(value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Shuffle, Tail};

    fn refused(pair: &str) -> String {
        Settings::from_pairs([pair]).unwrap_err().to_string()
    }

    #[test]
    fn a_text_is_read_as_what_its_setting_takes() {
        let settings = Settings::from_pairs([
            "plan.stages=1,3",
            "plan.bytes_max=7",
            "order.shuffle=blocks:8:2",
            "order.tail=short",
            "cost.freeze=vision,audio",
            "read.fields=jpg,txt",
            "read.error_budget=0.5:10",
            "store.cache=/tmp/cache",
            "store.allow=pipe,outside",
            "index.videos=uniform:8",
        ])
        .unwrap();
        assert_eq!(settings.plan.stages, Some(vec![1, 3]));
        assert_eq!(settings.plan.bytes_max, Some(7));
        assert_eq!(settings.order.shuffle, Shuffle::Blocks { block_samples: 8, open_blocks: 2 });
        assert_eq!(<(Tail, bool)>::from(settings.order.tail), (Tail::Short, false));
        assert_eq!(settings.cost.freeze.unwrap().to_string(), "vision,audio");
        assert_eq!(settings.read.error_budget, BudgetSetting { fraction: 0.5, samples: Some(10) });
        assert_eq!(settings.store.cache, Some("/tmp/cache".into()));
        assert_eq!(settings.store.allow, Allowed { pipe: true, outside: true });
    }

    #[test]
    fn the_value_of_a_setting_may_be_in_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fields");
        std::fs::write(&path, "jpg").unwrap();
        let settings = Settings::from_pairs([format!("read.fields=@{}", path.display())]).unwrap();
        assert_eq!(settings.read.fields.unwrap().0, ["jpg"]);
        assert!(refused("read.fields=@/no/such/file").contains("/no/such/file"));
    }

    #[test]
    fn what_no_setting_takes_is_refused_with_what_is_known() {
        assert!(refused("order").contains("GROUP.KEY=VALUE"));
        assert!(refused("orders.tail=drop").contains("`order`"));
        assert!(refused("order.tails=drop").contains("`tail`"));
        assert!(refused("plan.search_effort=5").contains("write `strategy=search:UNITS`"));
        assert!(refused("store.allow_pipe=true").contains("write `allow=pipe`"));
        assert!(refused("order.search_effort=5").contains("the settings are"));
        assert!(refused("store.allow=all").contains("expected pipe or outside, found `all`"));
        let tail = "invalid `tail`: expected carry, repeat, drop or short, found `keep`";
        assert_eq!(refused("order.tail=keep"), tail);
        assert!(refused("space.kinds=most").contains("expected basic or full, found `most`"));
        assert!(refused("order.tail=3").contains("invalid type: integer `3`"));
        assert!(refused("plan.tokens_max=many").contains("invalid type: string"));
        assert!(refused("augment.color_jitter=1,2,3").contains("invalid length 3"));
        assert!(refused("order.shuffle=blocks:0:1").contains("shuffle"));
    }

    #[test]
    fn settings_are_read_back_as_they_are_written() {
        let pairs = ["order.shuffle=blocks:8:2", "read.error_budget=0.05:3", "index.videos=fps:0.5:8"];
        let settings = Settings::from_pairs(pairs).unwrap();
        let text = serde_json::to_string(&settings).unwrap();
        assert_eq!(serde_json::from_str::<Settings>(&text).unwrap(), settings);
        assert_eq!(changed(&settings).keys().collect::<Vec<_>>(), ["index", "order", "read"]);
        assert_eq!(names::<OrderSettings>()[0], "shuffle");
    }
}
