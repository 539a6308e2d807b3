//! Errors about requests for data that does not exist.

use serde::Serialize;

/// Reason why the requested item does not exist in the data.
#[derive(Debug, Serialize, thiserror::Error)]
#[serde(untagged)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum SelectionError {
    /// A shard pattern cannot be expanded.
    #[error("invalid shard list `{pattern}`: {reason}")]
    ShardList { pattern: String, reason: String },
    /// The dataset has no sample at all.
    #[error("dataset `{dataset}` has no samples: {reason}")]
    NoSamples { dataset: String, reason: String },
    /// No sample has a field with any of these names. Known at once with an index; without an index, it ends
    /// the first epoch.
    #[error("invalid `{setting}`: none of {samples} samples has a field `{fields}`{}", they_have(.found))]
    NoField {
        setting: &'static str,
        #[serde(rename = "named")]
        fields: String,
        samples: u64,
        #[serde(serialize_with = "joined")]
        found: Vec<String>,
    },
    /// A step after the end of a run was requested.
    #[error("step {step} does not exist: the run has {steps} steps, counted from 0")]
    RunEnded { step: u64, steps: u64 },
}

impl SelectionError {
    /// Returns the variant name in snake case.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::ShardList { .. } => "shard_list",
            Self::NoSamples { .. } => "no_samples",
            Self::NoField { .. } => "no_field",
            Self::RunEnded { .. } => "run_ended",
        }
    }
}

fn they_have(extensions: &[String]) -> String {
    if extensions.is_empty() { String::new() } else { format!("; they have: {}", extensions.join(", ")) }
}

fn joined<S: serde::Serializer>(names: &[String], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&names.join(", "))
}
