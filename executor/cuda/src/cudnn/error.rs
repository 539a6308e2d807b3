//! cuDNN attention errors.

use std::io;
use std::path::PathBuf;

use super::library::Version;
use super::plan_key::PlanKey;

/// Failure to run attention with cuDNN.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// The library could not be opened.
    #[error(
        "could not open cuDNN, tried `{file}`; give the directory of libcudnn.so.9 of cuDNN 9.19 or later"
    )]
    NotFound { file: String, source: libloading::Error },
    /// The library is older than the minimum version that supports attention graphs.
    #[error("found cuDNN {found} in `{file}`, expected {expected} or later")]
    TooOld { file: String, found: Version, expected: Version },
    /// The file is not cuDNN.
    #[error("could not find the function `{symbol}` in `{file}`")]
    MissingSymbol { file: String, symbol: &'static str, source: libloading::Error },
    /// A call failed; `detail` is the last error string in the library, or the name of the error in the
    /// driver.
    #[error("cuDNN or the driver refused `{call}` with status {status}: {detail}")]
    Refused { call: &'static str, status: u32, detail: String },
    /// No engine in this version serves the shape on this device.
    #[error("cuDNN {version} has no plan for {key}: {reason}")]
    NoPlan { version: Version, key: PlanKey, reason: String },
    /// No engine serves a graph form on a device; part of [`Self::NoPlan`].
    #[error("no engine serves the graph on this device")]
    NoEngine,
    /// No graph exists for a key, or arguments do not match the plan.
    #[error("invalid `{setting}` of an attention: {reason}")]
    Shape { setting: &'static str, reason: String },
    /// Device properties are not a JSON object.
    #[error("could not read the properties of a device")]
    Properties { source: serde_json::Error },
    /// The plan directory could not be read or written.
    #[error("could not store an attention plan in `{path}`")]
    Store { path: PathBuf, source: io::Error },
    /// The thread that builds plans could not start.
    #[error("could not start the thread that builds attention plans")]
    Thread { source: io::Error },
}

/// Result of a cuDNN operation.
pub type Result<T> = std::result::Result<T, Error>;
