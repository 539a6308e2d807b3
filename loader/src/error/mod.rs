//! Defines the crate's error type, with variants by what the caller does next.
//!
//! Errors in planned steps.
//!
//! File and store errors, also while shards are written.

mod data;

use serde::Serialize;
use serde_json::{Value, json};
use std::path::Path;

pub use data::{ArchiveFault, BudgetError, DataError, SelectionError, ShardFault, TarFault, UserCodeError};
pub use dflop_samples::{BoxError, EXCERPT_CHARACTERS, Error as ProcessorError, Skipped, excerpt};
pub(crate) use dflop_samples::{error_reason, guarded};

/// Result type for the fallible functions in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reason why a setting, a dataset or a whole stream cannot be used.
///
/// A single bad sample is not an error: it is skipped and accounted for as [`Skipped`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// A setting is invalid; raised when an object is built, never while it streams.
    #[error("invalid `{setting}`: {reason}")]
    Config { setting: &'static str, reason: String },
    /// A model, device or profile is invalid.
    #[error(transparent)]
    Model(dflop_costmodel::Error),
    /// The requested item does not exist in the data: change the request.
    #[error(transparent)]
    Selection(#[from] SelectionError),
    /// A file or a store cannot be read or written: repair it or try again.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// Data that was read cannot be used: replace it.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Shards cannot be created from a source, or at a destination.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// More samples are bad than the error budget tolerates; ends the stream.
    #[error(transparent)]
    ErrorBudget(#[from] BudgetError),
    /// A saved state belongs to a different dataset or order.
    #[error("state does not fit: {reason}")]
    State { reason: String },
    /// A step cannot be planned, or delivered as planned: change the batch, the limits or the layout.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// User code failed as a whole, not on a single sample; ends the stream.
    #[error(transparent)]
    UserCode(#[from] UserCodeError),
    /// Nothing has happened for longer than the limit; ends the stream. A state saved now continues exactly
    /// here.
    #[error("the {stage} stage is stuck{}: nothing has happened for {seconds:.0} s", in_shard(.shard.as_deref()))]
    Stalled { stage: &'static str, shard: Option<String>, seconds: f64 },
    /// A loader stage ended without an error; a defect, or a runtime that was shut down.
    #[error("the {stage} stage ended early")]
    StageEnded { stage: &'static str },
}

impl Error {
    /// Creates the error for a file that cannot be accessed.
    #[must_use]
    pub fn file(path: &Path, source: std::io::Error) -> Self {
        Self::Storage(StorageError::File { path: path.display().to_string(), source })
    }

    /// Returns the variant name in snake case.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Config { .. } => "config",
            Self::Model(_) => "model",
            Self::Selection(error) => error.kind(),
            Self::Storage(error) => error.kind(),
            Self::Data(error) => error.kind(),
            Self::Output(error) => error.kind(),
            Self::ErrorBudget(error) => error.kind(),
            Self::State { .. } => "state",
            Self::Plan(error) => error.kind(),
            Self::UserCode(error) => error.kind(),
            Self::Stalled { .. } => "stalled",
            Self::StageEnded { .. } => "stage_ended",
        }
    }

    /// Returns the variant's fields by name, without causes.
    #[must_use]
    pub fn fields(&self) -> serde_json::Map<String, Value> {
        let fields = match self {
            Self::Config { setting, reason } => Ok(json!({ "setting": setting, "reason": reason })),
            Self::Model(_) => Ok(json!({})),
            Self::Selection(error) => serde_json::to_value(error),
            Self::Storage(error) => serde_json::to_value(error),
            Self::Data(error) => serde_json::to_value(error),
            Self::Output(error) => serde_json::to_value(error),
            Self::ErrorBudget(error) => serde_json::to_value(error),
            Self::State { reason } => Ok(json!({ "reason": reason })),
            Self::Plan(error) => serde_json::to_value(error),
            Self::UserCode(error) => serde_json::to_value(error),
            Self::Stalled { stage, shard, seconds } => {
                Ok(json!({ "stage": stage, "shard": shard, "seconds": seconds }))
            }
            Self::StageEnded { stage } => Ok(json!({ "stage": stage })),
        };
        match fields {
            Ok(Value::Object(mut fields)) => {
                fields.sort_keys();
                fields
            }
            // Every variant has named fields, with types that JSON supports.
            _ => serde_json::Map::new(),
        }
    }
}

impl From<ProcessorError> for Error {
    fn from(error: ProcessorError) -> Self {
        match error {
            ProcessorError::Config { setting, reason } => Self::Config { setting, reason },
            ProcessorError::File { path, source } => Self::Storage(StorageError::File { path, source }),
            ProcessorError::Medium { medium, source } => Self::Data(DataError::Medium { medium, source }),
        }
    }
}

fn in_shard(shard: Option<&str>) -> String {
    shard.map_or_else(String::new, |shard| format!(" in shard `{shard}`"))
}

fn as_text<S: serde::Serializer>(fault: &impl std::fmt::Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(fault)
}

/// Rejects a setting over its limit.
pub(crate) fn check_at_most(setting: &'static str, value: u64, most: u64) -> Result<()> {
    if value <= most {
        return Ok(());
    }
    Err(Error::Config { setting, reason: format!("{value} is more than {most}") })
}

/// Subject of an error; matches the exception classes in the Python package.
///
/// New categories are a breaking change, so that no mapping can omit a category.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorCategory {
    /// A setting or a request is invalid.
    Config,
    /// A model, a device or a profile is invalid.
    Model,
    /// A file or a store cannot be read or written.
    Storage,
    /// The data cannot be used.
    Data,
    /// Too many samples are bad.
    ErrorBudget,
    /// A saved state does not fit.
    State,
    /// A step cannot be planned.
    Plan,
    /// User code failed.
    UserCode,
    /// Nothing has happened for longer than the limit.
    Stalled,
    /// A defect, or a runtime that was shut down.
    Internal,
}

impl Error {
    /// Returns the error category.
    #[must_use]
    pub fn category(&self) -> ErrorCategory {
        match self {
            Self::Data(_) | Self::Output(_) | Self::Selection(SelectionError::NoSamples { .. }) => {
                ErrorCategory::Data
            }
            Self::Config { .. } | Self::Selection(_) => ErrorCategory::Config,
            Self::Model(_) => ErrorCategory::Model,
            Self::Storage(_) => ErrorCategory::Storage,
            Self::ErrorBudget(_) => ErrorCategory::ErrorBudget,
            Self::State { .. } => ErrorCategory::State,
            Self::Plan(_) => ErrorCategory::Plan,
            Self::UserCode(_) => ErrorCategory::UserCode,
            Self::Stalled { .. } => ErrorCategory::Stalled,
            Self::StageEnded { .. } => ErrorCategory::Internal,
        }
    }
}

/// Reason why a step cannot be planned, or delivered as planned.
#[derive(Debug, Serialize, thiserror::Error)]
#[serde(untagged)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum PlanError {
    /// A global batch cannot be planned.
    #[error("could not plan step {step}")]
    Unsolved {
        step: u64,
        #[serde(skip)]
        source: dflop_balancer::Error,
    },
    /// Microbatches with a fixed number of tokens have no room for the samples in a step.
    #[error(
        "could not plan step {step}: {tokens} tokens in {microbatches} microbatches of at most {tokens_max}; \
         {reason}; a fixed length (and `tokens_max`, if set) of {tokens_needed} would do for this step, as more \
         microbatches or a smaller global batch might"
    )]
    StepTooLong {
        step: u64,
        tokens: u64,
        microbatches: usize,
        tokens_max: u64,
        tokens_needed: u64,
        reason: String,
    },
    /// The counted tokens in a microbatch exceed the fixed number. Ends the stream.
    #[error(
        "microbatch {microbatch} of DP rank {dp_rank} at step {step} has {tokens} tokens, over the fixed length of \
         {pad_to_tokens}: {planned_tokens} were planned; count texts in the index with the model's tokenizer, so that plans \
         are exact, or set the fixed length to {tokens_needed} at least for this rank's step, or a `tokens_max` below it \
         that leaves room, or cut or drop samples by `long_sample`"
    )]
    MicrobatchTooLong {
        step: u64,
        dp_rank: usize,
        microbatch: usize,
        tokens: u64,
        planned_tokens: u64,
        pad_to_tokens: u64,
        tokens_needed: u64,
    },
    /// A step has no target tokens. Ends the stream.
    #[error(
        "step {step} has no training target in any of its {samples} samples: their texts are empty, or have a layout that \
         is not read{}; a run that only needs inputs sets `require_targets` to false",
        not_used(unused)
    )]
    NoTargets { step: u64, samples: usize, unused: String },
    /// The samples in a microbatch do not fit into memory, estimated from the index shapes. Ends the stream.
    #[error(
        "microbatch {microbatch} of DP rank {dp_rank} at step {step} has {samples} samples, which take about {} decoded \
         and prepared, of {} available; use more microbatches or a smaller global batch",
        readable_bytes(*bytes), readable_bytes(*bytes_max)
    )]
    MicrobatchTooLarge {
        step: u64,
        dp_rank: usize,
        microbatch: usize,
        samples: usize,
        bytes: u64,
        bytes_max: u64,
    },
    /// A medium in a sample that several ranks share cannot be used; only the ranks that encode the medium
    /// know. Ends the stream.
    #[error(
        "step {step}: {reason}, in sample `{key}`, which the DP ranks {first} to {last} share; the other ranks do not read it,          so the sample cannot be skipped: leave it out with a filter, or plan without `context`"
    )]
    SplitSample { step: u64, key: String, first: usize, last: usize, reason: String },
}

impl PlanError {
    /// Returns the variant name in snake case.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Unsolved { .. } => "plan",
            Self::StepTooLong { .. } => "step_too_long",
            Self::MicrobatchTooLong { .. } => "microbatch_too_long",
            Self::NoTargets { .. } => "no_targets",
            Self::MicrobatchTooLarge { .. } => "microbatch_too_large",
            Self::SplitSample { .. } => "split_sample",
        }
    }
}

fn not_used(unused: &str) -> String {
    if unused.is_empty() { String::new() } else { format!(" (not used: {unused})") }
}

/// Formats a byte count with a decimal unit.
fn readable_bytes(bytes: u64) -> String {
    let (unit, name) = if bytes < 1_000_000_000 { (1e6, "MB") } else { (1e9, "GB") };
    format!("{:.1} {name}", bytes as f64 / unit)
}

/// Reason why a file or a store cannot be read or written.
#[derive(Debug, Serialize, thiserror::Error)]
#[serde(untagged)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum StorageError {
    /// A shard cannot be opened or read; ends the stream.
    #[error("could not read shard `{shard}`")]
    Read {
        shard: String,
        #[serde(skip)]
        source: std::io::Error,
    },
    /// A file next to the shards cannot be written or read.
    #[error("could not access `{path}`")]
    File {
        path: String,
        #[serde(skip)]
        source: std::io::Error,
    },
    /// A remote store permanently rejects an upload.
    #[error("could not upload `{url}`")]
    Upload {
        url: String,
        #[serde(skip)]
        source: std::io::Error,
    },
    /// An index file cannot be read or written.
    #[error("index `{path}`: {reason}")]
    Index { path: String, reason: String },
}

impl StorageError {
    /// Returns the variant name in snake case.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Read { .. } => "read",
            Self::File { .. } => "file",
            Self::Upload { .. } => "upload",
            Self::Index { .. } => "index",
        }
    }
}

/// Reason why shards cannot be created.
#[derive(Debug, Serialize, thiserror::Error)]
#[serde(untagged)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum OutputError {
    /// A sample would read back differently from a shard; nothing was written for it.
    #[error("could not write sample `{key}`: {reason}")]
    Write { key: String, reason: String },
    /// Old shards, or files from a killed writer, occupy the place of new shards.
    #[error("`{path}` is in the way of new shards; remove it or write to another directory")]
    ShardExists { path: String },
    /// A path is not a sample source, or contains no samples.
    #[error("could not pack `{path}`: {reason}")]
    Pack { path: String, reason: String },
    /// A source part was packed differently from the remaining parts; parts are numbered from 0.
    #[error("part {part} cannot be packed or joined: {reason}")]
    PackPart { part: u32, reason: String },
}

impl OutputError {
    /// Returns the variant name in snake case.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Write { .. } => "write",
            Self::ShardExists { .. } => "shard_exists",
            Self::Pack { .. } => "pack",
            Self::PackPart { .. } => "pack_part",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kind, category and field names of an error.
    fn described(error: impl Into<Error>) -> (&'static str, ErrorCategory, String) {
        let error = error.into();
        let names: Vec<String> = error.fields().into_iter().map(|(name, _)| name).collect();
        (error.kind(), error.category(), names.join(" "))
    }

    #[test]
    fn fields_are_those_of_the_case_without_its_causes() {
        let source = || std::io::Error::other("x");
        let skipped = Skipped { shard: "a".into(), offset: 0, key: None, field: None, reason: "bad".into() };
        let found = vec!["txt".to_owned(), "png".to_owned()];
        let no_field = SelectionError::NoField { setting: "fields", fields: "cls".into(), samples: 3, found };
        assert_eq!(Error::from(no_field).fields()["found"], "txt, png");
        let budget = BudgetError::Share { skipped: 1, samples: 2, fraction: 0.5, first: Box::new(skipped) };
        assert_eq!(
            described(budget),
            ("error_budget", ErrorCategory::ErrorBudget, "first fraction samples skipped".into())
        );
        let read = StorageError::Read { shard: "a".into(), source: source() };
        assert_eq!(described(read), ("read", ErrorCategory::Storage, "shard".into()));
        let fault = TarFault::Empty.at(7);
        let shard = DataError::Shard { shard: "a".into(), fault };
        assert_eq!(Error::from(shard).fields()["fault"], "the file is empty at offset 7");
        let transform = UserCodeError::Transform { fields: "png".into(), source: "x".into() };
        assert_eq!(described(transform), ("transform", ErrorCategory::UserCode, "transformed".into()));
        let none = SelectionError::NoSamples { dataset: "d".into(), reason: "r".into() };
        assert_eq!(described(none), ("no_samples", ErrorCategory::Data, "dataset reason".into()));
        let stalled = Error::Stalled { stage: "decode", shard: None, seconds: 1.5 };
        assert!(stalled.fields()["shard"].is_null());
    }
}
