//! Converts length buckets from Python: a multiple, a list, or the ladder name.

use dflop_loader::processors::Buckets;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::error::DflopError;

/// Parses the buckets in a keyword.
///
/// # Errors
/// `TypeError` for an unsupported type, `ConfigError` for an unknown name.
pub(super) fn buckets(given: Option<&Bound<'_, PyAny>>, setting: &'static str) -> PyResult<Option<Buckets>> {
    let Some(given) = given else { return Ok(None) };
    let kind = || given.get_type().name().map_or_else(|_| "this".to_owned(), |name| name.to_string());
    let wrong = |_| {
        let expected = "a number, a list of numbers or \"ladder\"";
        PyTypeError::new_err(format!("expected `{setting}` to be {expected}, found {}", kind()))
    };
    Ok(Some(given.extract::<BucketNames>().map_err(wrong)?.parse(setting)?))
}

/// Buckets as the user wrote them.
#[derive(FromPyObject)]
enum BucketNames {
    Multiple(usize),
    Lengths(Vec<usize>),
    Name(String),
}

impl BucketNames {
    /// # Errors
    /// `ConfigError` for any name other than ``ladder``.
    fn parse(self, setting: &'static str) -> Result<Buckets, DflopError> {
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
