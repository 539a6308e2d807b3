//! The option `--set`, which replaces settings by the names that they have everywhere.

use std::marker::PhantomData;

use clap::Args;
use dflop_loader::settings::Settings;

use crate::failure::Failure;

/// Settings that a command has.
pub(crate) trait Accepted: Clone + Send + Sync + 'static {
    /// Groups, such as `order`, and single settings, such as `plan.schedule`.
    const NAMES: &'static [&'static str];
}

/// Declares a type for the settings that a command has.
macro_rules! accepted {
    ($name:ident: $($setting:literal),+) => {
        #[derive(Debug, Clone)]
        pub(crate) struct $name;

        impl $crate::args::set::Accepted for $name {
            const NAMES: &'static [&'static str] = &[$($setting),+];
        }
    };
}

pub(crate) use accepted;

/// Settings by name.
#[derive(Debug, Args)]
pub(crate) struct SetArgs<A: Accepted> {
    #[arg(long = "set", value_name = "GROUP.KEY=VALUE", value_parser = parse::<A>)]
    #[arg(help = short_help::<A>(), long_help = long_help::<A>())]
    pairs: Vec<String>,
    #[arg(skip)]
    accepted: PhantomData<A>,
}

impl<A: Accepted> SetArgs<A> {
    /// Returns all settings; those that are not given have their defaults.
    pub(crate) fn settings(&self) -> Result<Settings, Failure> {
        Ok(Settings::from_pairs(&self.pairs)?)
    }

    /// Refuses settings that have no effect beside other arguments.
    ///
    /// - `without_effect`: groups and single settings
    pub(crate) fn refuse(&self, without_effect: &[&str], reason: &str) -> Result<(), Failure> {
        let is_refused = |pair: &&String| without_effect.iter().any(|name| is_in(pair, name));
        match self.pairs.iter().find(is_refused) {
            Some(pair) => Err(Failure::Misuse(format!("`--set {pair}` {reason}"))),
            None => Ok(()),
        }
    }
}

/// Whether a pair sets something in a group, or a single setting.
fn is_in(pair: &str, name: &str) -> bool {
    let given = pair.split('=').next().unwrap_or_default();
    given == name || given.split('.').next() == Some(name)
}

fn parse<A: Accepted>(pair: &str) -> Result<String, String> {
    Settings::from_pairs([pair]).map_err(|error| {
        // The parser of arguments names the option.
        error.to_string().trim_start_matches("invalid `set`: ").to_owned()
    })?;
    if A::NAMES.iter().any(|name| is_in(pair, name)) {
        return Ok(pair.to_owned());
    }
    Err(format!("it has no effect on this command; the settings are those of {}", listed::<A>()))
}

fn listed<A: Accepted>() -> String {
    A::NAMES.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn short_help<A: Accepted>() -> String {
    format!("Replace a setting, such as `{}`; of {}", example::<A>(), listed::<A>())
}

/// Returns an example for the first group that the command has.
fn example<A: Accepted>() -> &'static str {
    let examples = ["order.shuffle=none", "plan.schedule=gpipe", "read.workers=4", "store.cache=DIR"];
    let has = |pair: &&str| A::NAMES.iter().any(|name| is_in(pair, name));
    examples.into_iter().find(has).unwrap_or("cost.recompute=layers")
}

fn long_help<A: Accepted>() -> String {
    let mut text = short_help::<A>();
    text += ".\n\nA value is JSON, a list separated by commas, or plain text; `@FILE` is the content of a file.\n";
    for setting in Settings::described() {
        let name = setting.name();
        if A::NAMES.iter().any(|accepted| is_in(&name, accepted)) {
            text += &format!("\n{name}: {}", setting.about);
            text += &setting.shown_default().map_or_else(String::new, |value| format!(" [default: {value}]"));
        }
    }
    text
}

/// Returns the setting that replaces an option of an earlier version.
pub(crate) fn replacement(option: &str) -> Option<&'static str> {
    let found = REPLACED.iter().find(|(old, _)| option.strip_prefix("--") == Some(*old));
    found.map(|(_, new)| *new)
}

/// Options of earlier versions, and what replaces them.
const REPLACED: [(&str, &str); 58] = [
    ("accept-changed-data", "--set order.accept_changed_data=true"),
    ("allow-outside", "--set store.allow_outside=true"),
    ("allow-pipe", "--set store.allow_pipe=true"),
    ("allow-recompute", "--set space.recompute=true"),
    ("block-samples", "--set order.shuffle=blocks:SAMPLES:RUNS"),
    ("buffered-bytes-max", "--set read.buffered_bytes=N"),
    ("bytes-max", "--set plan.bytes_max=N"),
    ("cache", "--set store.cache=DIR"),
    ("cache-bytes", "--set store.cache_bytes=N"),
    ("chat-template", "--set processor.chat_template=@FILE"),
    ("color-jitter", "--set augment.color_jitter=B,C,S,H"),
    ("counted-media", "--set processor.skip_media_tensors=true"),
    ("encoder-ahead", "--set space.encoder_ahead=true"),
    ("encoder-share", "--set space.encoder_share=tile|sample"),
    ("ep", "--set space.expert_parallel=N"),
    ("epoch", "--set order.first_epoch=E"),
    ("error-budget", "--set read.error_budget=FRACTION"),
    ("error-count", "--set read.error_count=N"),
    ("expert-imbalance", "--set space.expert_imbalance=FACTOR"),
    ("fields", "--set read.fields=NAMES"),
    ("flip", "--set augment.flip=0.5"),
    ("freeze", "--set cost.freeze=PARTS"),
    ("global-batch", "--global-batch-size"),
    ("index", "--set index.directory=DIR"),
    ("layout", "--set processor.layout=packed|padded|padded_left"),
    ("long-sample", "--set processor.long_sample=error|truncate|drop"),
    ("memory-margin", "--set space.memory_margin=FACTOR"),
    ("no-profile-check", "--set cost.profile_check=false"),
    ("open-blocks", "--set order.shuffle=blocks:SAMPLES:RUNS"),
    ("pad-to-tokens", "--set processor.pad_to_tokens=N"),
    ("pipeline-stages", "--stages"),
    ("placement", "--set space.placement=NAME"),
    ("profile-tp", "--set cost.profile_tp=N,N"),
    ("question", "--set processor.caption_prompt=TEXT"),
    ("random-crop", "--set augment.crop_scale=0.08,1"),
    ("read", "--set store.read=auto|mmap|pread"),
    ("recompute", "--set cost.recompute=none|scores|layers"),
    ("repeat-samples", "--set order.repeat_samples=true"),
    ("report-previews", "a report shows the 24 most expensive samples"),
    ("requests-max", "--set store.requests_max=N"),
    ("retry-seconds", "--set store.retry_seconds=N"),
    ("schedule", "--set plan.schedule=NAME"),
    ("sequence-parallel", "--set space.sequence_parallel=true"),
    ("shuffle", "--set order.shuffle=global|blocks|none"),
    ("space", "--set space.kinds=basic|full"),
    ("splits", "--set index.splits=FILE"),
    ("stages", "--set plan.stages=N,N"),
    ("stall-error-seconds", "--set read.stall_seconds=N"),
    ("stall-seconds", "--set read.stall_log_seconds=N"),
    ("strategy", "--set plan.strategy=NAME"),
    ("strict", "--set read.strict=true"),
    ("tail", "--set order.tail=carry|drop|short"),
    ("tokens-max", "--set plan.tokens_max=N"),
    ("uneven-layers", "--set space.uneven_layers=true"),
    ("validation", "--set order.shuffle=none --set order.tail=short --epochs 1"),
    ("video-sampling", "--set index.videos=fps:RATE:MAX|uniform:N|keyframes:MAX"),
    ("work", "--set plan.search_effort=N"),
    ("workers", "--set read.workers=N"),
];
