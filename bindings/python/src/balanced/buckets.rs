//! Converts buckets of lengths from Python: a multiple, a list, or the name of the ladder.

use dflop_loader::prepare::Buckets;
use pyo3::prelude::*;

use crate::error::DflopError;

/// Buckets as the user wrote them.
#[derive(FromPyObject)]
pub(super) enum BucketNames {
    Multiple(usize),
    Lengths(Vec<usize>),
    Name(String),
}

impl BucketNames {
    /// # Errors
    /// `ConfigError` for another name than ``ladder``.
    pub(super) fn parse(self, setting: &'static str) -> Result<Buckets, DflopError> {
        match self {
            Self::Multiple(multiple) => Ok(Buckets::Multiple(multiple)),
            Self::Lengths(lengths) => Ok(Buckets::Lengths(lengths)),
            Self::Name(name) if name == "ladder" => Ok(Buckets::Ladder),
            Self::Name(name) => {
                let reason = format!("expected a number, a list of numbers or \"ladder\", found `{name}`");
                Err(DflopError::config(setting, reason))
            }
        }
    }
}
