//! Errors for settings and media, skipped samples, parser panics, and shortened quotations.

mod excerpt;
mod guard;
mod skipped;

pub use self::excerpt::{EXCERPT_CHARACTERS, excerpt, json_excerpt};
pub use self::guard::guarded;
pub use self::skipped::{Skipped, error_reason};

/// Cause of an error in user code or in a dependency.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Result type for fallible functions in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reason why a sample processor or an augmentation cannot be created, or rejects a medium.
///
/// New variants are a breaking change, so that every conversion has to handle them.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// A setting is invalid; returned by constructors and builders.
    #[error("invalid `{setting}`: {reason}")]
    Config { setting: &'static str, reason: String },
    /// A file cannot be read.
    #[error("could not access `{path}`")]
    File { path: String, source: std::io::Error },
    /// A model rejects a medium; the sample is bad for this model, the next sample may be good.
    #[error("the model cannot take the {medium}")]
    Medium { medium: &'static str, source: BoxError },
}
