//! Device errors.

/// Result with an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Failure to use a device or to run an operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// Memory could not be allocated, or not within the configured limit.
    #[error("out of memory: could not allocate {bytes} bytes for {what} ({used} bytes in use)")]
    OutOfMemory { what: String, bytes: usize, used: u64 },
    /// A setting is invalid.
    #[error("invalid `{setting}`: {reason}")]
    InvalidSetting { setting: &'static str, reason: String },
    /// Threads could not be started.
    #[error("could not start threads")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    /// Queued work failed, and the device computes nothing more: every later read returns this error.
    #[error("the device failed: {reason}")]
    Failed { reason: String },
    /// The job has ended.
    #[error(transparent)]
    Comm(#[from] dflop_comm::Error),
}

impl Error {
    /// Placeholder for an allocation whose purpose the device does not know.
    const UNNAMED: &str = "a buffer";

    /// Creates the error for a failed allocation, whose purpose is added by
    /// [`while_allocating`](Self::while_allocating).
    #[must_use]
    pub fn out_of_memory(bytes: usize, used: u64) -> Self {
        Self::OutOfMemory { what: Self::UNNAMED.to_owned(), bytes, used }
    }

    /// Adds the purpose of the memory to an allocation failure that does not have a purpose yet.
    #[must_use]
    pub fn while_allocating(self, what: impl FnOnce() -> String) -> Self {
        match self {
            Self::OutOfMemory { what: unnamed, bytes, used } if unnamed == Self::UNNAMED => {
                Self::OutOfMemory { what: what(), bytes, used }
            }
            error => error,
        }
    }
}
