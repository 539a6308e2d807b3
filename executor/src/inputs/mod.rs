//! Prepares the inputs of one rank from the balanced loader: reads samples, counts tokens, builds contexts.
//!
//! Compares the settings of all ranks, before the first step.
//!
//! An [`InputReader`] reads for one rank. An LLM rank reads the texts in the microbatches of its DP rank and
//! no media; an encoder rank reads the samples whose media its replica encodes ([`ReplicaShare`]). Before a
//! step, ranks sum token counts (`token_counts.rs`). Then all ranks know the tokens in every sample,
//! including media and targets, and the step loss is scaled by the actual target tokens. All ranks skip a
//! sample that any rank could not decode, or whose text and media disagree, and report it. Before the first
//! step they compare settings ([`check_agreement`]). A training run prepares the inputs for the next step
//! while a step runs (`inputs_ahead.rs`).
//!
//! A rank with a different learning rate, seed or dataset would train to its end and produce a wrong model.
//! All ranks gather all settings and find the first difference, so all ranks fail with the same message.
//! Ranks that agree exchange two numbers each.

mod input_reader;
mod inputs_ahead;
mod module_reader;
mod predicted_times;
mod role_samples;
mod step_media;

use super::error::{Error, Result};
use dflop_comm::{Comm, StepContext};
use futures::channel::oneshot;
use std::collections::BTreeMap;
use xxhash_rust::xxh3::xxh3_64;

pub use input_reader::{InputReader, StepInputs};
pub(crate) use inputs_ahead::{Ending, InputsAhead, Taken};
pub use module_reader::ReplicaShare;
pub(crate) use predicted_times::costed;
pub use predicted_times::{PredictedTimes, SkippedSample};
pub use role_samples::{RoleInputs, RoleMicrobatch, RoleSamples};

/// Ends a wait for samples.
struct Stop {
    stopped: oneshot::Receiver<()>,
    /// Sender for a stop that never comes.
    _kept: Option<oneshot::Sender<()>>,
}

impl Stop {
    /// Returns a stop that comes when the sender is dropped.
    fn new(stopped: oneshot::Receiver<()>) -> Self {
        Self { stopped, _kept: None }
    }

    /// Returns a stop that never comes.
    fn never() -> Self {
        let (sender, stopped) = oneshot::channel();
        Self { stopped, _kept: Some(sender) }
    }

    /// Waits for the stop.
    async fn stopped(&mut self) {
        // The sender is dropped, never used.
        let _ = (&mut self.stopped).await;
    }
}

/// Maximum length of a value in an error; longer values are cut.
const VALUE_CHARACTERS_MAX: usize = 200;
/// Number of further settings that an error names.
const NAMED_MAX: usize = 4;

/// Settings by name, each value as text.
pub type Settings = BTreeMap<String, String>;

/// Checks that all ranks have the same settings; all ranks call it together.
///
/// - `settings`: settings that all ranks must share; machine-specific settings, such as paths and numbers of
///   threads, are left out
///
/// # Errors
/// [`Error::Disagreement`] on every rank, with the first setting that differs; [`Error::Comm`].
///
/// # Panics
/// Never: text can be written as JSON.
pub fn check_agreement(comm: &dyn Comm, settings: &Settings) -> Result<()> {
    let at = StepContext::step(0, "compare settings");
    let text = serde_json::to_string(settings).expect("text can be written");
    let own = [xxh3_64(text.as_bytes()), text.len() as u64];
    let signs = comm.gather(at, &own)?;
    if signs.chunks(own.len()).all(|sign| sign == own) {
        return Ok(());
    }
    let longest = signs.chunks(own.len()).map(|sign| sign[1]).max().unwrap_or(0);
    let words = comm.gather(at, &words(&text, longest as usize))?;
    let per_rank = words.len() / comm.size();
    let all = words.chunks(per_rank).map(settings_in).collect::<Option<Vec<Settings>>>();
    let difference = all.as_deref().and_then(disagreement);
    let (setting, reason) = difference.unwrap_or_else(|| {
        (
            "version".to_owned(),
            "a rank sent settings that others cannot read, as another version does".to_owned(),
        )
    });
    Err(Error::Disagreement { setting, reason })
}

/// Returns a text as numbers, padded with blanks to `bytes`.
fn words(text: &str, bytes: usize) -> Vec<u64> {
    let mut text = text.as_bytes().to_vec();
    text.resize(bytes.next_multiple_of(size_of::<u64>()), b' ');
    let (words, _) = text.as_chunks();
    words.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

fn settings_in(words: &[u64]) -> Option<Settings> {
    let text: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    serde_json::from_slice(&text).ok()
}

/// Returns the first setting that differs between ranks, and the difference.
fn disagreement(all: &[Settings]) -> Option<(String, String)> {
    let names: std::collections::BTreeSet<&String> = all.iter().flat_map(BTreeMap::keys).collect();
    let mut differing = names.into_iter().filter_map(|name| Some((name, odd_rank(all, name)?)));
    let (first, odd) = differing.next()?;
    let shown = |rank: usize| {
        let value = all[rank].get(first).map_or("none", String::as_str);
        let value: String = value.chars().take(VALUE_CHARACTERS_MAX).collect();
        format!("rank {rank} has {value}")
    };
    let others: Vec<String> = differing.map(|(name, _)| format!("`{name}`")).collect();
    let more = others.len().saturating_sub(NAMED_MAX);
    let more_words = if more == 0 { String::new() } else { format!(" and {more} more settings") };
    let mut reason = format!("{}, {}", shown(0), shown(odd));
    if !others.is_empty() {
        let named = others[..others.len() - more].join(", ");
        reason = format!("{reason}; they differ as well in {named}{more_words}");
    }
    Some((first.clone(), reason))
}

/// Returns the first rank whose value differs from rank 0.
fn odd_rank(all: &[Settings], name: &str) -> Option<usize> {
    all.iter().position(|settings| settings.get(name) != all[0].get(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(entries: &[(&str, &str)]) -> Settings {
        entries.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_first_difference_is_shown_and_the_others_are_named() {
        let base = settings(&[("a", "1"), ("b", "2"), ("c", "3")]);
        assert_eq!(disagreement(&[base.clone(), base.clone()]), None);
        let odd = settings(&[("a", "1"), ("b", "7"), ("d", "x")]);
        let (setting, reason) = disagreement(&[base.clone(), base, odd]).unwrap();
        assert_eq!(setting, "b");
        assert_eq!(reason, "rank 0 has 2, rank 2 has 7; they differ as well in `c`, `d`");
    }

    #[test]
    fn long_values_are_cut_and_many_names_counted() {
        let long = |letter: &str| {
            let entries = (0..9).map(|number| (format!("s{number}"), letter.repeat(100_000)));
            entries.collect::<Settings>()
        };
        let (_, reason) = disagreement(&[long("a"), long("b")]).unwrap();
        assert!(reason.len() < 600, "{}", reason.len());
        assert!(reason.ends_with("`s1`, `s2`, `s3`, `s4` and 4 more settings"), "{reason}");
    }

    #[test]
    fn words_hold_any_text() {
        let text = serde_json::to_string(&settings(&[("naïve", "\u{1F600}")])).unwrap();
        for bytes in [text.len(), text.len() + 1, 100] {
            assert_eq!(settings_in(&words(&text, bytes)), Some(settings(&[("naïve", "\u{1F600}")])));
        }
    }
}
