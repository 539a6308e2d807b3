//! Opens NCCL at run time, and resolves the functions.
//!
//! Types and numbers follow NVIDIA's documentation, "NCCL API". A status stays an integer: a later NCCL may
//! return values that this version does not know.

#![expect(unsafe_code, reason = "functions of a C library")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUstream;
use libloading::os::unix::Library;

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
    pub(super) fn describe(&self, status: Status, handle: Handle) -> String {
        // SAFETY: both functions return constants or strings that live until the next error of this thread.
        let text = |pointer: *const c_char| unsafe {
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

/// Communicator handle.
pub(super) type Handle = *mut c_void;
/// Status that a function returns.
pub(super) type Status = c_int;

pub(super) const SUCCESS: Status = 0;
/// A remote rank failed.
pub(super) const REMOTE_ERROR: Status = 6;
/// The call is in progress; the communicator status shows when it has ended.
pub(super) const IN_PROGRESS: Status = 7;

/// Reduction operation: sum.
pub(super) const SUM: c_int = 0;

/// Size of [`UniqueId`] in bytes.
pub(super) const ID_BYTES: usize = 128;

/// Id for a new communicator, passed by all member ranks.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; ID_BYTES]);

/// Communicator settings, as in version 2.18; later versions use defaults for newer fields.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    ctas_min: c_int,
    ctas_max: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Returns settings for a communicator with nonblocking calls.
    pub(super) const fn nonblocking() -> Self {
        const UNSET: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 0,
            cga_cluster_size: UNSET,
            ctas_min: UNSET,
            ctas_max: UNSET,
            net_name: std::ptr::null(),
            split_share: UNSET,
        }
    }
}

/// Reduction or copy between two buffers: arguments are element count and element type.
type Reduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, CUstream) -> Status;

/// Functions that communicators call.
pub(super) struct Functions {
    pub(super) unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    pub(super) init: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> Status,
    /// Creates a communicator for the ranks with the same color: color, key, new handle.
    pub(super) split: unsafe extern "C" fn(Handle, c_int, c_int, *mut Handle, *mut Config) -> Status,
    pub(super) finalize: unsafe extern "C" fn(Handle) -> Status,
    pub(super) destroy: unsafe extern "C" fn(Handle) -> Status,
    pub(super) abort: unsafe extern "C" fn(Handle) -> Status,
    pub(super) async_error: unsafe extern "C" fn(Handle, *mut Status) -> Status,
    pub(super) error_string: unsafe extern "C" fn(Status) -> *const c_char,
    pub(super) last_error: unsafe extern "C" fn(Handle) -> *const c_char,
    /// Sum over all ranks: operation after the type.
    pub(super) all_reduce: Reduce,
    /// Sum by parts: operation after the type.
    pub(super) reduce_scatter: Reduce,
    pub(super) all_gather:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, CUstream) -> Status,
    /// Copy to all ranks: root after the type.
    pub(super) broadcast: Reduce,
    /// Sum on one rank: operation and root after the type.
    pub(super) reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        c_int,
        Handle,
        CUstream,
    ) -> Status,
    /// Peer after the type.
    pub(super) send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, CUstream) -> Status,
    /// Peer after the type.
    pub(super) recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, CUstream) -> Status,
    pub(super) group_start: unsafe extern "C" fn() -> Status,
    pub(super) group_end: unsafe extern "C" fn() -> Status,
}

impl Functions {
    /// Resolves all functions; `None` if any function is missing.
    pub(super) fn find(library: &Library) -> Option<Self> {
        // SAFETY: the types of the fields are those of the functions in every version from 2.18 on.
        unsafe {
            Some(Self {
                unique_id: find(library, "ncclGetUniqueId")?,
                init: find(library, "ncclCommInitRankConfig")?,
                split: find(library, "ncclCommSplit")?,
                finalize: find(library, "ncclCommFinalize")?,
                destroy: find(library, "ncclCommDestroy")?,
                abort: find(library, "ncclCommAbort")?,
                async_error: find(library, "ncclCommGetAsyncError")?,
                error_string: find(library, "ncclGetErrorString")?,
                last_error: find(library, "ncclGetLastError")?,
                all_reduce: find(library, "ncclAllReduce")?,
                reduce_scatter: find(library, "ncclReduceScatter")?,
                all_gather: find(library, "ncclAllGather")?,
                broadcast: find(library, "ncclBroadcast")?,
                reduce: find(library, "ncclReduce")?,
                send: find(library, "ncclSend")?,
                recv: find(library, "ncclRecv")?,
                group_start: find(library, "ncclGroupStart")?,
                group_end: find(library, "ncclGroupEnd")?,
            })
        }
    }
}

/// Returns the library version as `major * 10000 + minor * 100 + patch`.
pub(super) fn version(library: &Library) -> Option<u32> {
    // SAFETY: the type is that of the function in every version.
    let version: unsafe extern "C" fn(*mut c_int) -> Status = unsafe { find(library, "ncclGetVersion") }?;
    let mut number = 0;
    // SAFETY: the pointer is to a local variable.
    let status = unsafe { version(&raw mut number) };
    (status == SUCCESS).then_some(number as u32)
}

/// Resolves a function.
///
/// # Safety
/// `F` must be the function's type.
unsafe fn find<F: Copy>(library: &Library, symbol: &str) -> Option<F> {
    // SAFETY: the caller gives the function's type.
    unsafe { library.get::<F>(symbol.as_bytes()) }.ok().map(|function| *function)
}
