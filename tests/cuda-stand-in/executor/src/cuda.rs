//! CUDA devices on the stand-in that computes on a CPU; ranks communicate through the host.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dflop_comm::Comm;
use dflop_cuda::{Cuda, CudaBuilder, LateLoads, SearchPath};
use dflop_cuda_stand_in::StandIn;
use dflop_device::{DeviceComm, Dtype, Result, Runtime, Staged};
use dflop_testing::TestBackend;

/// Suite backend: a device that all ranks share, with communication through the host.
#[derive(Debug)]
pub struct OnCuda;

impl TestBackend for OnCuda {
    type Device = Cuda;

    fn open(_threads: usize) -> Cuda {
        with_storage(Dtype::F32)
    }

    fn open_half(_threads: usize) -> Cuda {
        with_storage(Dtype::Bf16)
    }

    fn on_same_threads(device: &Cuda) -> Cuda {
        with_storage(device.storage())
    }

    fn tensors(device: &Cuda, comm: Arc<dyn Comm>) -> Result<Arc<dyn DeviceComm<Cuda>>> {
        Ok(Arc::new(Staged::new(device.clone(), comm)))
    }
}

/// Returns the stand-in; ends the test process if there is no C++ compiler to build it.
#[must_use]
pub fn stand_in() -> &'static StandIn {
    StandIn::load().unwrap_or_else(|| std::process::exit(0))
}

/// Lets tests take turns where they share a process, and resets the stand-in.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    stand_in().reset();
    turn
}

/// Searches for libraries only among the stand-ins.
#[must_use]
pub fn search_path() -> SearchPath {
    let _ = stand_in();
    SearchPath::only(dflop_cuda_stand_in::library_dir().into_iter().collect())
}

/// Directory for compiled kernels, for all tests.
fn kernels() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    test.parent().map_or_else(PathBuf::new, |directory| directory.join("cuda-kernels"))
}

fn builder(ordinal: u32, dtype: Dtype) -> CudaBuilder {
    Cuda::builder(ordinal).storage(dtype).search_path(search_path())
}

/// Opens a device that stores numbers of this type.
///
/// # Panics
/// If there is no such device.
#[must_use]
pub fn with_storage(dtype: Dtype) -> Cuda {
    numbered(0, dtype)
}

/// Opens the device with this number and this number type.
///
/// # Panics
/// If there is no such device.
#[must_use]
pub fn numbered(ordinal: u32, dtype: Dtype) -> Cuda {
    builder(ordinal, dtype).kernel_cache(Some(kernels())).build().expect("the stand-in has a device")
}

/// Opens the device of this number, whose loads wait for messages in flight, as in a release build.
///
/// # Panics
/// If there is no such device.
#[must_use]
pub fn with_late_loads(ordinal: u32, dtype: Dtype) -> Cuda {
    let builder = builder(ordinal, dtype).kernel_cache(Some(kernels())).late_loads(LateLoads::PutOff);
    builder.build().expect("the stand-in has a device")
}

/// Opens a device that stores numbers of this type, with another source of a kernel.
///
/// # Panics
/// If there is no device.
#[must_use]
pub fn with_source(dtype: Dtype, file: &str, text: String) -> Cuda {
    let builder = builder(0, dtype).kernel_cache(None).replace_source(file, text);
    builder.build().expect("the stand-in has a device")
}

/// Opens a device with this number type, and recompiles the kernels.
///
/// # Panics
/// If there is no device.
#[must_use]
pub fn without_cache(dtype: Dtype) -> Cuda {
    builder(0, dtype).kernel_cache(None).build().expect("the stand-in has a device")
}
