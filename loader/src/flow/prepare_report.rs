//! Accounts for samples that preparation changed or dropped.

use std::sync::{Mutex, PoisonError};

/// Samples that a report lists; further ones are only counted.
const NAMED_MAX: usize = 1_000;

/// Sample whose text was cut to fit the token limit.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct TruncatedSample {
    /// Shard URL.
    pub shard: String,
    /// Sample key.
    pub key: String,
    /// Tokens before the cut.
    pub tokens: u64,
    /// Tokens that were cut.
    pub cut_tokens: u64,
}

/// Preparation totals so far, over all delivered samples.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct PrepareReport {
    /// Samples prepared.
    pub samples: u64,
    /// Number of tokens in these samples.
    pub tokens: u64,
    /// Number of planned tokens in these samples, from text estimates.
    pub planned_tokens: u64,
    /// Tokens that the loss is computed on.
    pub target_tokens: u64,
    /// Planned tokens that the loss is computed on.
    pub planned_target_tokens: u64,
    /// Number of samples whose text was cut.
    pub truncated_samples: u64,
    /// The first 1,000 samples whose text was cut.
    pub truncated: Vec<TruncatedSample>,
    /// Number of samples dropped for excessive length; each is also listed among the skipped samples.
    pub dropped_samples: u64,
    /// Number of microbatches with more tokens than the planned cap.
    pub microbatches_over_cap: u64,
    /// Number of tokens in the longest microbatch.
    pub microbatch_tokens_max: u64,
}

/// Collects a [`PrepareReport`].
#[derive(Debug, Default)]
pub(crate) struct PrepareLog(Mutex<PrepareReport>);

impl PrepareLog {
    pub(crate) fn report(&self) -> PrepareReport {
        self.change(|report| report.clone())
    }

    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut PrepareReport) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn truncated(&self, truncated: TruncatedSample) {
        self.change(|report| {
            report.truncated_samples += 1;
            if report.truncated.len() < NAMED_MAX {
                report.truncated.push(truncated);
            }
        });
    }
}
