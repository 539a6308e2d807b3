//! Opens NCCL at run time.

use std::ffi::CStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::functions::{Functions, Status, version};
use crate::error::{Error, Result};
use crate::libraries::{NCCL, SearchPath};

/// Minimum version, whose communicator settings are passed.
const OLDEST: NcclVersion = NcclVersion(21_800);

/// NCCL version, as `major * 10000 + minor * 100 + patch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NcclVersion(pub u32);

impl NcclVersion {
    /// First version that lets ranks share a device, if `NCCL_MULTI_RANK_GPU_ENABLE=1` is set.
    pub const SHARED_DEVICE: Self = Self(23_000);
}

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0 / 10_000, self.0 / 100 % 100, self.0 % 100)
    }
}

/// An open NCCL.
#[derive(Clone)]
pub struct Nccl(Arc<Opened>);

struct Opened {
    functions: Functions,
    version: NcclVersion,
    file: PathBuf,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {} ({})", self.version(), self.file().display())
    }
}

/// NCCL library used by the process: the first successful search decides.
static OPEN: Mutex<Option<Nccl>> = Mutex::new(None);

impl Nccl {
    /// Opens NCCL, or returns the library that the process has already opened.
    ///
    /// # Errors
    /// [`Error::LibraryNotFound`]; [`Error::LibraryUnusable`] if it lacks a function or is older than 2.18.
    pub fn open(search: &SearchPath) -> Result<Self> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(nccl) = &*open {
            return Ok(nccl.clone());
        }
        let (file, library) = NCCL.open(search)?;
        let unusable = |reason| Error::LibraryUnusable { library: "NCCL", path: file.clone(), reason };
        let found = version(&library).map(NcclVersion);
        let version = found.ok_or_else(|| unusable("it does not tell its version".to_owned()))?;
        if version < OLDEST {
            return Err(unusable(format!("it has version {version}, at least {OLDEST} is needed")));
        }
        let functions =
            Functions::find(&library).ok_or_else(|| unusable("it lacks a function".to_owned()))?;
        // open until the process ends: its threads must not run in memory that is gone
        std::mem::forget(library);
        let nccl = Self(Arc::new(Opened { functions, version, file }));
        Ok(open.insert(nccl).clone())
    }

    /// Returns the library version.
    #[must_use]
    pub fn version(&self) -> NcclVersion {
        self.0.version
    }

    /// File that was opened.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.0.file
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.0.functions
    }

    /// Describes a status, with the communicator's last error, if any.
    #[expect(unsafe_code, reason = "texts are C strings")]
    pub(super) fn describe(&self, status: Status, handle: super::functions::Handle) -> String {
        // SAFETY: both functions return constants or strings that live until the next error of this thread.
        let text = |pointer: *const std::ffi::c_char| unsafe {
            if pointer.is_null() {
                String::new()
            } else {
                CStr::from_ptr(pointer).to_string_lossy().into_owned()
            }
        };
        // SAFETY: the function takes every number.
        let name = text(unsafe { (self.functions().error_string)(status) });
        // SAFETY: the function takes null.
        let last = text(unsafe { (self.functions().last_error)(handle) });
        let last = last.trim();
        if last.is_empty() { name } else { format!("{name}: {last}") }
    }
}
