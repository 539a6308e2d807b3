//! Opens cuDNN at run time.
//!
//! Types and constants come from `cudarc`; functions are resolved from the opened file, because the `cudarc`
//! loader panics if there is none. A status stays an integer: a later cuDNN may return values that the
//! enumeration does not have.
#![expect(unsafe_code, reason = "calls functions of a library that is opened at run time")]

use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use cudarc::cudnn::sys;

use super::error::{Error, Result};

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
