//! Opens cuDNN on a CUDA driver stand-in; cuDNN requires a driver although it builds plans without a device.
#![expect(unsafe_code, reason = "opens the stand-in")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use dflop_cuda::cudnn::Library;
use libloading::os::unix::{self, RTLD_GLOBAL, RTLD_NOW};

/// Directory with `libcudnn.so.9`, as in the wheel `nvidia-cudnn-cu13`: `nvidia/cudnn/lib`.
const DIRECTORY: &str = "DFLOP_CUDNN_LIBRARY_DIR";

/// Opens cuDNN once; `None` if the directory is not given or there is no compiler.
pub(crate) fn library() -> Option<Arc<Library>> {
    static LIBRARY: OnceLock<Option<Arc<Library>>> = OnceLock::new();
    LIBRARY.get_or_init(open).clone()
}

fn open() -> Option<Arc<Library>> {
    let Some(directory) = std::env::var_os(DIRECTORY) else {
        return skip(&format!("{DIRECTORY} names no directory"));
    };
    let scratch = tempfile::tempdir().expect("a temporary directory");
    let Some(stub) = compile(scratch.path()) else {
        return skip("there is no g++");
    };
    // SAFETY: the stand-in has no initialisers; cuDNN finds it by its name, because it is open.
    let driver = unsafe { unix::Library::open(Some(&stub), RTLD_NOW | RTLD_GLOBAL) };
    std::mem::forget(driver.expect("the stand-in opens"));
    Some(Library::open(Some(Path::new(&directory))).expect("cuDNN opens"))
}

/// Compiles the stand-in; `None` without a compiler.
fn compile(directory: &Path) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cudnn/stub.cpp");
    let library = directory.join("libcuda.so.1");
    let mut compiler = Command::new("g++");
    compiler.args(["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o"]).arg(&library).arg(source);
    let status = compiler.status().ok()?;
    assert!(status.success(), "g++ compiles the stand-in");
    Some(library)
}

#[expect(clippy::print_stderr, reason = "a skipped test must be seen")]
fn skip<T>(reason: &str) -> Option<T> {
    eprintln!("skipped: {reason}");
    None
}
