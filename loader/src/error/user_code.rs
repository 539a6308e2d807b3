//! Errors from user code.

use serde::Serialize;

use super::BoxError;

/// Failure of user code as a whole, not on a single sample.
#[derive(Debug, Serialize, thiserror::Error)]
#[serde(untagged)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum UserCodeError {
    /// User code that changes fields failed as a whole, not on a single field; ends the stream.
    #[error("the transform of `{fields}` failed")]
    Transform {
        #[serde(rename = "transformed")]
        fields: String,
        #[serde(skip)]
        source: BoxError,
    },
    /// The user's cost function failed, or returned no costs for this global batch; ends the stream.
    #[error("the cost function failed at step {step}")]
    CostFunction {
        step: u64,
        #[serde(skip)]
        source: BoxError,
    },
}

impl UserCodeError {
    /// Returns the error from the user code.
    #[must_use]
    pub fn cause(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        match self {
            Self::Transform { source, .. } | Self::CostFunction { source, .. } => &**source,
        }
    }

    /// Returns the variant name in snake case.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Transform { .. } => "transform",
            Self::CostFunction { .. } => "cost_function",
        }
    }
}
