//! Device that the suite runs on: CUDA, on the stand-in that computes on a CPU.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dflop_comm::Comm;
use dflop_cuda::{Cuda, CudaBuilder, SearchPath};
use dflop_cuda_stand_in::StandIn;
use dflop_device::{DeviceComm, Dtype, Staged};

/// Device of every rank.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) type TestDevice = Cuda;

/// The stand-in; ends the test process, which counts as passed, where there is no C++ compiler to build it.
pub(crate) fn stand_in() -> &'static StandIn {
    StandIn::load().unwrap_or_else(|| std::process::exit(0))
}

/// Lets tests that change the stand-in's settings take turns where they share a process, and resets it.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    stand_in().reset();
    turn
}

/// Directory of compiled kernels, for all tests.
fn kernels() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    test.parent().map_or_else(PathBuf::new, |directory| directory.join("cuda-kernels"))
}

fn builder(ordinal: u32, dtype: Dtype) -> CudaBuilder {
    stand_in();
    let search = SearchPath::only(dflop_cuda_stand_in::library_dir().into_iter().collect());
    Cuda::builder(ordinal).storage(dtype).search_path(search)
}

/// Makes a device that stores numbers of this type.
pub(crate) fn of_type(dtype: Dtype) -> Cuda {
    numbered(0, dtype)
}

/// Makes the device of this number, which stores numbers of this type.
pub(crate) fn numbered(ordinal: u32, dtype: Dtype) -> Cuda {
    builder(ordinal, dtype).kernel_cache(Some(kernels())).build().unwrap()
}

/// Makes a device that stores numbers of this type, with another source of a kernel.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn with_source(dtype: Dtype, file: &str, text: String) -> Cuda {
    builder(0, dtype).kernel_cache(None).replace_source(file, text).build().unwrap()
}

/// Makes a device that stores `f32`.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn device(_threads: usize) -> TestDevice {
    of_type(Dtype::F32)
}

/// Makes a device that stores bf16.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn half_device(_threads: usize) -> TestDevice {
    of_type(Dtype::Bf16)
}

/// Makes another device of the same kind.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn on_same_threads(device: &TestDevice) -> TestDevice {
    of_type(dflop_device::Runtime::storage(device))
}

/// Makes a communicator of tensors.
#[allow(dead_code, clippy::unnecessary_wraps, reason = "each test binary uses its part, and others can fail")]
pub(crate) fn tensors(
    device: &TestDevice,
    comm: Arc<dyn Comm>,
) -> dflop_device::Result<Arc<dyn DeviceComm<TestDevice>>> {
    Ok(Arc::new(Staged::new(device.clone(), comm)))
}
