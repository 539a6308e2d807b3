//! Errors for streams with too many bad samples.

use std::borrow::Cow;

use serde::Serialize;

use super::{EXCERPT_CHARACTERS, Skipped, excerpt};

/// Reason why a stream with bad samples ends: they exceed the error budget.
#[derive(Debug, Serialize, thiserror::Error)]
#[serde(untagged)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum BudgetError {
    /// The fraction of bad samples exceeds the error budget; ends the stream.
    #[error(
        "{skipped} of {samples} samples are bad, over the error budget of {fraction}; the first: shard `{}`, \
         offset {}, key `{}`: {}",
        .first.shard, .first.offset, sample_key(.first), .first.reason
    )]
    Share { skipped: u64, samples: u64, fraction: f64, first: Box<Skipped> },
    /// No sample was found at all, and the bad shards exceed the error budget; ends the stream.
    #[error(
        "no sample was found in {bad} shards that cannot be read; the first: shard `{}`, offset {}: {}",
        .first.shard, .first.offset, .first.reason
    )]
    NoSample { bad: u64, first: Box<Skipped> },
    /// The number of bad samples exceeds the error budget; ends the stream.
    #[error(
        "{skipped} samples are bad, over the error budget of {most}; the first: shard `{}`, offset {}, key `{}`: {}",
        .first.shard, .first.offset, sample_key(.first), .first.reason
    )]
    Count { skipped: u64, most: u64, first: Box<Skipped> },
}

fn sample_key(skipped: &Skipped) -> Cow<'_, str> {
    excerpt(skipped.key.as_deref().unwrap_or("unknown"), EXCERPT_CHARACTERS)
}

impl BudgetError {
    /// Returns the variant name in snake case.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Share { .. } => "error_budget",
            Self::NoSample { .. } => "no_sample",
            Self::Count { .. } => "error_count",
        }
    }
}
