//! CUDA device errors.

use std::path::PathBuf;

/// Result with an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Failure to use a CUDA device, or failed work on it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// A CUDA library was not found.
    #[error("could not find {library}; looked for {}; {hint}", .tried.join(", "))]
    LibraryNotFound { library: &'static str, tried: Vec<String>, hint: &'static str },
    /// A CUDA library was found, but cannot be used.
    #[error("could not use {library} at {}: {reason}", .path.display())]
    LibraryUnusable { library: &'static str, path: PathBuf, reason: String },
    /// There is no such device.
    #[error("no CUDA device {ordinal}: {reason}")]
    NoDevice { ordinal: u32, reason: String },
    /// The device lacks instructions that the kernels use.
    #[error("device {ordinal} ({name}) has compute capability {major}.{minor}, at least 8.0 is needed")]
    DeviceTooOld { ordinal: u32, name: String, major: u32, minor: u32 },
    /// A setting is invalid.
    #[error("invalid `{setting}`: {reason}")]
    InvalidSetting { setting: &'static str, reason: String },
    /// Memory could not be allocated, or not within the configured limit.
    #[error("out of memory: could not allocate {bytes} bytes ({used} bytes in use)")]
    OutOfMemory { bytes: usize, used: u64 },
    /// A driver call failed, or work before it.
    #[error("{call} failed: {code}: {reason}")]
    Driver { call: &'static str, code: String, reason: String },
    /// A kernel could not be compiled.
    #[error("could not compile {file}: {log}")]
    Compile { file: &'static str, log: String },
    /// cuDNN was requested and cannot be used.
    #[error(transparent)]
    Cudnn(#[from] crate::cudnn::Error),
    /// An NCCL call failed, or work before it.
    #[error("{call} failed for {of}: {reason}")]
    Nccl { call: &'static str, of: String, reason: String },
    /// A load occurred that must happen before messages are posted.
    #[error("{what} is loaded while a message of another rank is awaited, which may never end")]
    LateLoad { what: String },
    /// A matrix product was rejected.
    #[error("{call} failed: {status}")]
    Blas { call: &'static str, status: String },
}

impl From<Error> for dflop_device::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::OutOfMemory { bytes, used } => Self::out_of_memory(bytes, used),
            Error::InvalidSetting { setting, reason } => Self::InvalidSetting { setting, reason },
            error => Self::Failed { reason: error.to_string() },
        }
    }
}
