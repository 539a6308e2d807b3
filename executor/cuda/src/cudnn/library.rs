//! cuDNN library, opened at run time, plan keys, and errors.
//!
//! Types and constants come from `cudarc`; functions are resolved from the opened file, because the `cudarc`
//! loader panics if there is none. A status stays an integer: a later cuDNN may return values that the
//! enumeration does not have.

#![expect(unsafe_code, reason = "calls functions of a library that is opened at run time")]

use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, io};

use cudarc::cudnn::sys;
use serde::{Deserialize, Serialize};

/// Name by which the dynamic linker knows cuDNN 9.
const NAME: &str = "libcudnn.so.9";
/// Minimum version, which is the first version that was checked.
const OLDEST: Version = Version(91_900);
/// Maximum error string length in bytes.
const MESSAGE_BYTES: usize = 4096;

/// cuDNN version, as `major * 10000 + minor * 100 + patch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0 / 10_000, self.0 / 100 % 100, self.0 % 100)
    }
}

/// Function status; 0 is success.
pub(super) type Status = u32;
/// Attribute element type.
type Kind = sys::cudnnBackendAttributeType_t;

/// Library functions.
pub(super) struct Functions {
    pub(super) create_descriptor:
        unsafe extern "C" fn(sys::cudnnBackendDescriptorType_t, *mut sys::cudnnBackendDescriptor_t) -> Status,
    pub(super) destroy_descriptor: unsafe extern "C" fn(sys::cudnnBackendDescriptor_t) -> Status,
    pub(super) set_attribute: unsafe extern "C" fn(
        sys::cudnnBackendDescriptor_t,
        sys::cudnnBackendAttributeName_t,
        Kind,
        i64,
        *const c_void,
    ) -> Status,
    pub(super) get_attribute: unsafe extern "C" fn(
        sys::cudnnBackendDescriptor_t,
        sys::cudnnBackendAttributeName_t,
        Kind,
        i64,
        *mut i64,
        *mut c_void,
    ) -> Status,
    pub(super) finalize: unsafe extern "C" fn(sys::cudnnBackendDescriptor_t) -> Status,
    pub(super) execute: unsafe extern "C" fn(
        sys::cudnnHandle_t,
        sys::cudnnBackendDescriptor_t,
        sys::cudnnBackendDescriptor_t,
    ) -> Status,
    pub(super) create_handle: unsafe extern "C" fn(*mut sys::cudnnHandle_t) -> Status,
    pub(super) destroy_handle: unsafe extern "C" fn(sys::cudnnHandle_t) -> Status,
    pub(super) set_stream: unsafe extern "C" fn(sys::cudnnHandle_t, sys::cudaStream_t) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    last_error_string: unsafe extern "C" fn(*mut c_char, usize),
}

/// Opened cuDNN library.
pub struct Library {
    functions: Functions,
    version: Version,
    file: String,
}

impl Library {
    /// Opens cuDNN: the file in a directory, or the file that the dynamic linker finds.
    ///
    /// cuDNN itself opens its parts, `libcublasLt` and, in older versions, `libnvrtc` when they are needed;
    /// if it does not find them it has no engines, see [`Error::NoPlan`].
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::MissingSymbol`], [`Error::TooOld`].
    pub fn open(directory: Option<&Path>) -> Result<Arc<Self>> {
        let file =
            directory.map_or_else(|| NAME.to_owned(), |directory| directory.join(NAME).display().to_string());
        // SAFETY: the initialisers of cuDNN have no preconditions.
        let library = unsafe { libloading::Library::new(&file) }
            .map_err(|source| Error::NotFound { file: file.clone(), source })?;
        // SAFETY: the type is the same as in `cudnn_version.h` in every version 9.
        let version: unsafe extern "C" fn() -> usize = unsafe { find(&library, &file, "cudnnGetVersion") }?;
        // SAFETY: the function has no preconditions.
        let version = Version(unsafe { version() } as u32);
        if version < OLDEST {
            return Err(Error::TooOld { file, found: version, expected: OLDEST });
        }
        let functions = Functions::find(&library, &file)?;
        // Stays open until the process ends: the CUDA runtime within it must not run its finalisers earlier.
        std::mem::forget(library);
        Ok(Arc::new(Self { functions, version, file }))
    }

    /// Returns the library version.
    #[must_use]
    pub const fn version(&self) -> Version {
        self.version
    }

    /// Returns the path of the opened file.
    #[must_use]
    pub fn file(&self) -> &str {
        &self.file
    }

    pub(super) const fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Turns a status into an error with the last error string of this thread.
    pub(super) fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let mut message = [0_u8; MESSAGE_BYTES];
        // SAFETY: the function writes at most `MESSAGE_BYTES` bytes, a terminating zero included.
        unsafe { (self.functions.last_error_string)(message.as_mut_ptr().cast(), MESSAGE_BYTES) };
        let last = CStr::from_bytes_until_nul(&message).unwrap_or_default().to_string_lossy();
        // SAFETY: the function returns a constant string for every status.
        let name = unsafe { CStr::from_ptr((self.functions.error_string)(status)) }.to_string_lossy();
        let last = last.trim();
        let detail = if last.is_empty() { name.into_owned() } else { format!("{name}: {last}") };
        Err(Error::Refused { call, status, detail })
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library")
            .field("file", &self.file)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl Functions {
    fn find(library: &libloading::Library, file: &str) -> Result<Self> {
        // SAFETY: the field types are the same as the function types in `cudnn_graph.h` and `cudnn_ops.h` in
        // every version 9; enumerations are 32 bits wide.
        unsafe {
            Ok(Self {
                create_descriptor: find(library, file, "cudnnBackendCreateDescriptor")?,
                destroy_descriptor: find(library, file, "cudnnBackendDestroyDescriptor")?,
                set_attribute: find(library, file, "cudnnBackendSetAttribute")?,
                get_attribute: find(library, file, "cudnnBackendGetAttribute")?,
                finalize: find(library, file, "cudnnBackendFinalize")?,
                execute: find(library, file, "cudnnBackendExecute")?,
                create_handle: find(library, file, "cudnnCreate")?,
                destroy_handle: find(library, file, "cudnnDestroy")?,
                set_stream: find(library, file, "cudnnSetStream")?,
                error_string: find(library, file, "cudnnGetErrorString")?,
                last_error_string: find(library, file, "cudnnGetLastErrorString")?,
            })
        }
    }
}

/// Resolves a function.
///
/// # Safety
/// `F` must be the type of the function.
unsafe fn find<F: Copy>(library: &libloading::Library, file: &str, symbol: &'static str) -> Result<F> {
    // SAFETY: the caller passes the function's type.
    let found = unsafe { library.get::<F>(symbol) };
    found.map(|function| *function).map_err(|source| Error::MissingSymbol {
        file: file.to_owned(),
        symbol,
        source,
    })
}

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

/// Minimum numbers that a plan is built for: segments, rows in the longest segment.
const SEGMENTS_MIN: u32 = 8;
const LONGEST_MIN: u32 = 64;
/// Factor between consecutive numbers of segments that plans are built for.
const SEGMENTS_FACTOR: u32 = 4;
/// Maximum head width for which cuDNN has a backward pass on all devices.
const HEAD_DIM_MAX: u32 = 128;
/// Number of elements in 16 bytes: heads start at addresses that are multiples of it.
const HEAD_DIM_MULTIPLE: u32 = 8;

/// Properties that a plan is built for.
///
/// A plan serves every microbatch with at most these numbers: missing segments are empty, shorter segments
/// are padded. The score factor is not part of the key, because it is a call argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PlanKey {
    /// Whether the plan computes gradients.
    pub is_backward: bool,
    /// Whether a token attends only to itself and earlier tokens in the same segment.
    pub is_causal: bool,
    /// Whether a backward pass computes the same bits in every run.
    pub is_deterministic: bool,
    /// Head width.
    pub head_dim: u32,
    /// Number of query heads.
    pub heads: u32,
    /// Number of key and value heads; divides `heads`.
    pub kv_heads: u32,
    /// Maximum number of segments.
    pub segments: u32,
    /// Maximum number of rows in a segment.
    pub longest: u32,
    /// Maximum number of rows in all segments; 0 in forward plans, which do not depend on it.
    pub tokens: u32,
}

/// Attention sizes and mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Number of query heads.
    pub heads: u32,
    /// Number of key and value heads; divides `heads`.
    pub kv_heads: u32,
    /// Head width.
    pub head_dim: u32,
    /// Whether a token attends only to itself and earlier tokens in the same segment.
    pub is_causal: bool,
}

impl PlanKey {
    /// Returns the key for the forward plan that serves segments.
    ///
    /// - `starts`: first row in every segment, then the number of rows; ascending
    #[must_use]
    pub fn forward(heads: Heads, starts: &[u32]) -> Self {
        let lengths = starts.windows(2).map(|pair| pair[1] - pair[0]);
        let Heads { heads, kv_heads, head_dim, is_causal } = heads;
        Self {
            is_backward: false,
            is_causal,
            is_deterministic: false,
            head_dim,
            heads,
            kv_heads,
            segments: segments_bucket(starts.len().saturating_sub(1) as u32),
            longest: lengths.max().unwrap_or(0).max(LONGEST_MIN).next_power_of_two(),
            tokens: 0,
        }
    }

    /// Returns the key for the backward plan that serves segments.
    ///
    /// - `starts`: first row in every segment, then the number of rows; ascending
    /// - `is_deterministic`: whether every run must compute the same bits; costs time, and on Hopper before
    ///   cuDNN 9.25 [memory](super::Form::Direct)
    #[must_use]
    pub fn backward(heads: Heads, starts: &[u32], is_deterministic: bool) -> Self {
        let forward = Self::forward(heads, starts);
        let tokens = starts.last().map_or(0, |&rows| rows).max(forward.longest).next_power_of_two();
        Self { is_backward: true, is_deterministic, tokens, ..forward }
    }

    /// Returns the number of elements in a query-key-value row.
    #[must_use]
    pub const fn row(&self) -> u32 {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Checks that a graph can be created.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn check(&self) -> Result<()> {
        let invalid = |setting, reason: String| Err(Error::Shape { setting, reason });
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return invalid("kv_heads", format!("{} do not divide {} heads", self.kv_heads, self.heads));
        }
        if !(1..=HEAD_DIM_MAX).contains(&self.head_dim) || !self.head_dim.is_multiple_of(HEAD_DIM_MULTIPLE) {
            let reason = format!(
                "expected a multiple of {HEAD_DIM_MULTIPLE} up to {HEAD_DIM_MAX}, found {}",
                self.head_dim
            );
            return invalid("head_dim", reason);
        }
        if self.segments == 0 || self.longest == 0 {
            return invalid("segments", "a plan needs a segment and a row".to_owned());
        }
        if self.is_backward && self.tokens < self.longest {
            return invalid("tokens", format!("{} rows hold no segment of {}", self.tokens, self.longest));
        }
        Ok(())
    }
}

/// Returns the number of segments that a plan for `segments` segments is built for.
fn segments_bucket(segments: u32) -> u32 {
    let mut bucket = SEGMENTS_MIN;
    while bucket < segments {
        bucket *= SEGMENTS_FACTOR;
    }
    bucket
}

impl fmt::Display for PlanKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = if self.is_backward { "backward" } else { "forward" };
        let order = if self.is_deterministic { "-deterministic" } else { "" };
        let mask = if self.is_causal { "causal" } else { "full" };
        let Self { heads, kv_heads, head_dim, segments, longest, tokens, .. } = self;
        write!(
            f,
            "{direction}{order}-{mask}-h{heads}-kv{kv_heads}-d{head_dim}-b{segments}-s{longest}-t{tokens}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: Heads = Heads { heads: 28, kv_heads: 4, head_dim: 128, is_causal: true };

    #[test]
    fn buckets_hold_what_they_are_made_for() {
        for segments in [1, 8, 9, 32, 33, 512, 513] {
            let starts: Vec<u32> = (0..=segments).map(|segment| segment * 70).collect();
            let key = PlanKey::backward(HEADS, &starts, false);
            assert!(key.segments >= segments && key.segments <= (segments * 4).max(8), "{key}");
            assert_eq!(key.longest, 128);
            assert!(key.tokens >= segments * 70 && key.tokens.is_power_of_two());
            key.check().unwrap();
        }
    }

    #[test]
    fn few_buckets_cover_many_microbatches() {
        let keys: std::collections::BTreeSet<PlanKey> =
            (1..4096).map(|first| PlanKey::backward(HEADS, &[0, first, 4096], false)).collect();
        assert_eq!(keys.len(), 2);
    }

    #[test]
    fn forward_keys_do_not_depend_on_the_tokens() {
        let short = PlanKey::forward(HEADS, &[0, 500, 1000]);
        assert_eq!(short, PlanKey::forward(HEADS, &[0, 500, 1000, 1500, 2000]));
        assert_eq!(short.to_string(), "forward-causal-h28-kv4-d128-b8-s512-t0");
    }

    #[test]
    fn no_segments_have_the_smallest_key() {
        let key = PlanKey::backward(HEADS, &[], false);
        assert_eq!((key.segments, key.longest, key.tokens), (8, 64, 64));
    }

    #[test]
    fn shapes_without_a_graph_are_refused() {
        let key = PlanKey::forward(HEADS, &[0, 10]);
        assert!(PlanKey { kv_heads: 5, ..key }.check().is_err());
        assert!(PlanKey { head_dim: 100, ..key }.check().is_err());
        assert!(PlanKey { head_dim: 256, ..key }.check().is_err());
        assert!(PlanKey { is_backward: true, ..key }.check().is_err());
    }
}
