//! What preparing did to samples, beside those that it refused.

use std::sync::{Mutex, PoisonError};

/// Samples that a report names; more are only counted.
const NAMED_MAX: usize = 1_000;

/// A sample whose text was cut to fit the token budget.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Truncated {
    /// URL of the shard.
    pub shard: String,
    /// Key of the sample.
    pub key: String,
    /// Tokens before the cut.
    pub tokens: u64,
    /// Tokens that were cut.
    pub cut_tokens: u64,
}

/// What preparing did so far, over everything that was delivered.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct PrepareReport {
    /// Samples prepared.
    pub samples: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Their tokens as planned, from estimates of the text.
    pub planned_tokens: u64,
    /// Their tokens that the loss is computed on.
    pub target_tokens: u64,
    /// The same as planned.
    pub planned_target_tokens: u64,
    /// Samples whose text was cut.
    pub truncated_samples: u64,
    /// The first 1,000 of them.
    pub truncated: Vec<Truncated>,
    /// Samples that were dropped for their length; each is listed among the skipped.
    pub dropped_samples: u64,
    /// Microbatches with more tokens than the cap that they were planned under.
    pub microbatches_over_cap: u64,
    /// Tokens of the longest microbatch.
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

    pub(crate) fn truncated(&self, truncated: Truncated) {
        self.change(|report| {
            report.truncated_samples += 1;
            if report.truncated.len() < NAMED_MAX {
                report.truncated.push(truncated);
            }
        });
    }
}
