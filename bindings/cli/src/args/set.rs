//! The option `--set`, which replaces settings by the names that they have everywhere.

use std::marker::PhantomData;

use clap::Args;
use dflop_loader::settings::{Settings, StoreSettings};

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
    /// Returns all settings; those that are not given have their defaults, or the values of environment
    /// variables.
    pub(crate) fn settings(&self) -> Result<Settings, Failure> {
        let machine = Settings { store: StoreSettings::from_environment()?, ..Settings::default() };
        let mut settings = machine.with_pairs(&self.pairs)?;
        if !self.is_given("store.cache_bytes") {
            settings.store.ignore_size_without_cache();
        }
        Ok(settings)
    }

    /// Whether a setting is given.
    pub(crate) fn is_given(&self, name: &str) -> bool {
        self.pairs.iter().any(|pair| is_in(pair, name))
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
            let default =
                setting.shown_default().map_or_else(String::new, |value| format!(" [default: {value}]"));
            text.extend(["\n", &name, ": ", &setting.about, &default]);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    accepted!(SomeAccepted: "order", "plan.schedule");

    #[derive(Debug, Parser)]
    struct Arguments {
        #[command(flatten)]
        set: SetArgs<SomeAccepted>,
    }

    fn parsed(pairs: &[&str]) -> Result<Arguments, String> {
        let words = pairs.iter().flat_map(|pair| ["--set", pair]);
        Arguments::try_parse_from(["dflop"].into_iter().chain(words)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_command_takes_the_settings_that_it_has() {
        let arguments = parsed(&["order.tail=drop", "plan.schedule=gpipe"]).unwrap();
        assert_eq!(arguments.set.settings().unwrap().plan.pipeline_schedule().to_string(), "gpipe");
        assert!(arguments.set.refuse(&["plan"], "is refused").is_err());
        assert!(arguments.set.refuse(&["plan.stages", "store"], "is refused").is_ok());
        let other = parsed(&["plan.stages=1"]).unwrap_err();
        assert!(other.contains("no effect") && other.contains("`order`, `plan.schedule`"), "{other}");
        assert!(
            parsed(&["order.tail=keep"])
                .unwrap_err()
                .contains("expected carry, repeat, drop or short, found `keep`")
        );
    }

    #[test]
    fn help_lists_the_settings_of_a_command_with_their_defaults() {
        let help = long_help::<SomeAccepted>();
        assert!(help.contains("order.tail: ") && help.contains("[default: carry]"), "{help}");
        assert!(help.contains("plan.schedule: ") && !help.contains("plan.stages: "), "{help}");
    }
}
