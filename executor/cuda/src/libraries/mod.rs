//! Finds and opens CUDA libraries at run time.
//!
//! Search order for each library: directories in [`SearchPath`], the system loader (including
//! `LD_LIBRARY_PATH`), wheels in Python environments, `/usr/local/cuda`. A found library stays open for the
//! complete process: functions are called through pointers into it.

#![expect(unsafe_code, reason = "libraries are opened, and their symbols looked up")]

mod function_tables;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use function_tables::{CublasLt, Nvrtc};
pub(crate) use function_tables::{cublas_lt, nvrtc};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::error::{Error, Result};

/// Environment variable with directories that are searched first, separated by `:`.
pub const LIBRARY_PATH: &str = "DFLOP_CUDA_LIBRARY_PATH";

/// Library search directories.
#[derive(Debug, Clone, Default)]
pub struct SearchPath {
    /// Directories that are searched first.
    pub first: Vec<PathBuf>,
    /// Whether only these directories are searched.
    pub is_exclusive: bool,
}

impl SearchPath {
    /// Returns the directories in the environment variable [`LIBRARY_PATH`], then the usual places.
    #[must_use]
    pub fn from_environment() -> Self {
        let first = std::env::var_os(LIBRARY_PATH)
            .map(|list| std::env::split_paths(&list).filter(|path| !path.as_os_str().is_empty()).collect())
            .unwrap_or_default();
        Self { first, is_exclusive: false }
    }

    /// Searches only these directories.
    #[must_use]
    pub fn only(first: Vec<PathBuf>) -> Self {
        Self { first, is_exclusive: true }
    }

    /// Returns the cuDNN directory; none if the system loader has to find it.
    pub(crate) fn cudnn(&self) -> Option<PathBuf> {
        let wheels = site_packages().into_iter().map(|site| site.join("nvidia/cudnn/lib"));
        let usual = wheels.filter(|_| !self.is_exclusive);
        let has_it = |directory: &PathBuf| directory.join("libcudnn.so.9").exists();
        let found = self.first.iter().cloned().chain(usual).find(has_it);
        // an error names this directory
        found.or_else(|| self.first.first().filter(|_| self.is_exclusive).cloned())
    }

    /// Returns candidate paths for the library files, in search order. Names without a directory are looked
    /// up by the system loader.
    fn candidates(&self, library: &Needed) -> Vec<PathBuf> {
        let of = |directory: &Path| library.files.iter().map(|file| directory.join(file)).collect::<Vec<_>>();
        let mut all: Vec<PathBuf> = self.first.iter().flat_map(|directory| of(directory)).collect();
        if self.is_exclusive {
            return all;
        }
        all.extend(library.files.iter().map(PathBuf::from));
        for site in site_packages() {
            all.extend(library.wheel_directories.iter().flat_map(|inside| of(&site.join(inside))));
        }
        all.extend(library.system_directories.iter().flat_map(|directory| of(Path::new(directory))));
        all
    }
}

/// CUDA library that the device needs.
pub(crate) struct Needed {
    /// Name in errors.
    name: &'static str,
    /// File names, newest first.
    files: &'static [&'static str],
    /// Wheel directories, below `site-packages`.
    wheel_directories: &'static [&'static str],
    system_directories: &'static [&'static str],
    /// Name prefix for libraries in the same directory, which this library opens only by name.
    companions: Option<&'static str>,
    /// Functions that are called.
    symbols: &'static [&'static str],
    hint: &'static str,
}

const DRIVER: Needed = Needed {
    name: "the CUDA driver",
    files: &["libcuda.so.1"],
    wheel_directories: &[],
    system_directories: &["/usr/local/nvidia/lib64", "/usr/lib/wsl/lib"],
    companions: None,
    symbols: &[
        "cuInit",
        "cuDriverGetVersion",
        "cuDevicePrimaryCtxRetain",
        "cuDevicePrimaryCtxRelease_v2",
        "cuCtxSetCurrent",
        "cuMemPoolCreate",
        "cuMemAllocFromPoolAsync",
        "cuMemFreeAsync",
        "cuMemHostAlloc",
        "cuModuleLoadData",
        "cuLaunchKernel",
        "cuEventElapsedTime_v2",
    ],
    hint: "install the driver of NVIDIA, version 570 or newer",
};

const COMPILER: Needed = Needed {
    name: "NVRTC",
    files: &["libnvrtc.so.13", "libnvrtc.so.12"],
    wheel_directories: &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
    system_directories: &["/usr/local/cuda/lib64"],
    companions: Some("libnvrtc-builtins.so."),
    symbols: Nvrtc::NAMES,
    hint: "install the Python package nvidia-cuda-nvrtc",
};

const BLAS: Needed = Needed {
    name: "cuBLASLt",
    files: &["libcublasLt.so.13", "libcublasLt.so.12"],
    wheel_directories: &["nvidia/cu13/lib", "nvidia/cublas/lib"],
    system_directories: &["/usr/local/cuda/lib64"],
    companions: None,
    symbols: CublasLt::NAMES,
    hint: "install the Python package nvidia-cublas",
};

/// NCCL, which only jobs with several devices need.
pub(crate) const NCCL: Needed = Needed {
    name: "NCCL",
    files: &["libnccl.so.2"],
    wheel_directories: &["nvidia/nccl/lib", "nvidia/cu13/lib"],
    system_directories: &["/usr/local/cuda/lib64"],
    companions: None,
    symbols: &[
        "ncclGetVersion",
        "ncclGetUniqueId",
        "ncclCommInitRankConfig",
        "ncclCommSplit",
        "ncclCommFinalize",
        "ncclCommDestroy",
        "ncclCommAbort",
        "ncclCommGetAsyncError",
        "ncclGetErrorString",
        "ncclGetLastError",
        "ncclAllReduce",
        "ncclReduceScatter",
        "ncclAllGather",
        "ncclBroadcast",
        "ncclReduce",
        "ncclSend",
        "ncclRecv",
        "ncclGroupStart",
        "ncclGroupEnd",
    ],
    hint: "install the Python package nvidia-nccl-cu13",
};

/// Library files that this process has opened.
#[derive(Debug, Clone)]
pub struct Libraries {
    /// The CUDA driver.
    pub driver: PathBuf,
    /// NVRTC, the kernel compiler.
    pub compiler: PathBuf,
    /// cuBLASLt, the matrix product library.
    pub blas: PathBuf,
}

/// Process libraries: the first successful search decides.
static OPEN: Mutex<Option<Libraries>> = Mutex::new(None);

impl Libraries {
    /// Opens all libraries, or returns the libraries that the process has opened before.
    ///
    /// # Errors
    /// [`Error::LibraryNotFound`], [`Error::LibraryUnusable`].
    pub fn open(search: &SearchPath) -> Result<Self> {
        let mut open = OPEN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(libraries) = &*open {
            return Ok(libraries.clone());
        }
        let (driver, driver_library) = DRIVER.open(search)?;
        let (compiler, compiler_library) = COMPILER.open(search)?;
        let (blas, blas_library) = BLAS.open(search)?;
        // SAFETY: the bindings open the driver by name, and a driver with that name is open; the remaining
        // functions have these types in all versions whose files are searched.
        let (nvrtc, cublas_lt) = unsafe {
            DRIVER.check_bindings(&driver, &driver_library, cudarc::driver::sys::culib())?;
            (Nvrtc::find(&compiler_library), CublasLt::find(&blas_library))
        };
        let lacking = || "it lacks a function".to_owned();
        function_tables::keep(
            nvrtc.ok_or_else(|| COMPILER.unusable(&compiler, lacking()))?,
            cublas_lt.ok_or_else(|| BLAS.unusable(&blas, lacking()))?,
        );
        // open until the process ends: bindings and tables keep pointers to functions
        for library in [driver_library, compiler_library, blas_library] {
            std::mem::forget(library);
        }
        let libraries = Self { driver, compiler, blas };
        *open = Some(libraries.clone());
        Ok(libraries)
    }
}

impl Needed {
    /// Opens the first file that exists, and checks that it has all functions.
    pub(crate) fn open(&self, search: &SearchPath) -> Result<(PathBuf, Library)> {
        let candidates = search.candidates(self);
        for path in &candidates {
            let is_name = path.parent().is_some_and(|parent| parent.as_os_str().is_empty());
            if !is_name && !path.exists() {
                continue;
            }
            // SAFETY: CUDA libraries run no harmful code when they are loaded.
            match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) } {
                Ok(library) => {
                    self.check_symbols(path, &library)?;
                    self.open_companions(path);
                    return Ok((path.clone(), library));
                }
                // only by name: missing, or present and broken; the loader's message tells which
                Err(error) if !is_name || !is_missing(&error, path.as_os_str()) => {
                    return Err(self.unusable(path, loader_message(&error)));
                }
                Err(_) => {}
            }
        }
        let tried = candidates.iter().map(|path| path.display().to_string()).collect();
        Err(Error::LibraryNotFound { library: self.name, tried, hint: self.hint })
    }

    /// Opens libraries that this library will look for, so that it finds them outside the loader search path.
    fn open_companions(&self, path: &Path) {
        let (Some(start), Some(directory)) = (self.companions, path.parent()) else { return };
        let Ok(entries) = std::fs::read_dir(directory) else { return };
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with(start) {
                // SAFETY: as for the library itself. A failure comes back when the library looks for it.
                let opened = unsafe { Library::open(Some(entry.path()), RTLD_NOW | RTLD_GLOBAL) };
                std::mem::forget(opened);
            }
        }
    }

    fn check_symbols(&self, path: &Path, library: &Library) -> Result<()> {
        for symbol in self.symbols {
            // SAFETY: the symbol is looked up, not used.
            let found = unsafe { library.get::<*const ()>(symbol.as_bytes()) };
            if found.is_err() {
                return Err(
                    self.unusable(path, format!("it has no function {symbol}; a newer one is needed"))
                );
            }
        }
        Ok(())
    }

    /// Checks that the bindings call the library that was found, not a different library with the same name.
    fn check_bindings(&self, path: &Path, found: &Library, bound: &libloading::Library) -> Result<()> {
        let symbol = self.symbols[0].as_bytes();
        // SAFETY: the addresses are compared, not used.
        let address = |found: Option<*const ()>| found.map(|address| address as usize);
        let own = address(unsafe { found.get::<*const ()>(symbol) }.ok().map(|symbol| *symbol));
        let theirs = address(unsafe { bound.get::<*const ()>(symbol) }.ok().map(|symbol| *symbol));
        if own == theirs {
            return Ok(());
        }
        let reason = format!(
            "a different {} is already loaded in this process or comes first in the search path",
            self.name
        );
        Err(self.unusable(path, reason))
    }

    fn unusable(&self, path: &Path, reason: String) -> Error {
        Error::LibraryUnusable { library: self.name, path: path.to_owned(), reason }
    }
}

/// Returns whether the loader found no file with this name.
fn is_missing(error: &libloading::Error, name: &OsStr) -> bool {
    let start = format!("{}: cannot open shared object file", name.to_string_lossy());
    loader_message(error).contains(&start)
}

/// Returns the loader message; the error itself contains only the call name.
fn loader_message(error: &libloading::Error) -> String {
    let cause = std::error::Error::source(error).map(|cause| format!(": {cause}"));
    format!("{error}{}", cause.unwrap_or_default())
}

/// Returns the package directories in Python environments: active environments, then system environments.
fn site_packages() -> Vec<PathBuf> {
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let roots = active.chain([PathBuf::from("/usr/local"), PathBuf::from("/usr")]);
    let mut found = Vec::new();
    for library in roots.map(|root| root.join("lib")) {
        let Ok(entries) = std::fs::read_dir(&library) else { continue };
        let mut versions: Vec<PathBuf> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3")))
            .collect();
        versions.sort();
        for version in versions.iter().rev() {
            found.extend(["site-packages", "dist-packages"].map(|inside| version.join(inside)));
        }
    }
    found.retain(|path| path.is_dir());
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_the_loader_does_not_know_is_looked_for_elsewhere() {
        let absent = Needed { files: &["libdflop-absent.so.1"], ..DRIVER };
        let Err(error) = absent.open(&SearchPath::default()) else { panic!("there is no such library") };
        let Error::LibraryNotFound { tried, .. } = error else { panic!("expected a search, found {error}") };
        assert_eq!(tried[0], "libdflop-absent.so.1");
        assert!(tried.len() > 1, "{tried:?}");
    }
}
