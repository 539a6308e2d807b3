//! Defines the crate's error type, with variants by what the caller does next.

mod data;
mod plan;
mod selection;
mod storage;
mod user_code;

use std::path::Path;

use serde_json::{Value, json};

pub use self::data::{ArchiveFault, BudgetError, DataError, ShardFault, TarFault};
pub use self::plan::PlanError;
pub use self::selection::SelectionError;
pub use self::storage::{OutputError, StorageError};
pub use self::user_code::UserCodeError;
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
