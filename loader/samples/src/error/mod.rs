//! Errors of settings and media, samples that are skipped, panics of parsers, and cut quotations.

mod excerpt;
mod guard;
mod skipped;

pub use self::excerpt::{EXCERPT_CHARACTERS, excerpt, excerpt_of};
pub use self::guard::guarded;
pub use self::skipped::{Skipped, reason_of};

/// Cause of an error in user code or in a crate that this one depends on.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Result of the fallible functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reason why a sample processor or an augmentation cannot be made, or cannot take a medium.
///
/// New cases are a breaking change, so that no conversion of them can miss one.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// A setting is invalid; raised when something is built.
    #[error("invalid `{setting}`: {reason}")]
    Config { setting: &'static str, reason: String },
    /// A file cannot be read.
    #[error("could not access `{path}`")]
    File { path: String, source: std::io::Error },
    /// A model cannot take a medium; the sample is bad for this model, the next one may be good.
    #[error("the model cannot take the {medium}")]
    Medium { medium: &'static str, source: BoxError },
}
