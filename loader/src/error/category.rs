//! Error categories, one for each possible next action by the caller.

use super::{Error, SelectionError};

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
