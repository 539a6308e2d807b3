//! A context for a test, and kernels from sources.

mod numbers;
pub(crate) mod product;
pub(crate) mod raw;

pub(crate) use numbers::Numbers;
pub(crate) use raw::compile;

use cudarc::{
    driver::{CudaContext, CudaFunction, DriverError, LaunchConfig},
    nvrtc::Ptx,
};
use dflop_cuda_stand_in::StandIn;
use std::{
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard},
};

pub(crate) struct Cuda {
    pub(crate) control: &'static StandIn,
    pub(crate) context: Arc<CudaContext>,
    /// Settings are process-wide, so tests in the same process take turns.
    _turn: MutexGuard<'static, ()>,
}

impl Deref for Cuda {
    type Target = StandIn;

    fn deref(&self) -> &StandIn {
        self.control
    }
}

/// A context without event tracking: tests order streams themselves. `None` without a compiler.
pub(crate) fn cuda() -> Option<Cuda> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let control = StandIn::load()?;
    control.reset();
    let context = CudaContext::new(0).expect("the stand-in has a device");
    raw::without_event_tracking(&context);
    Some(Cuda { control, context, _turn: turn })
}

pub(crate) const OPTIONS: [&str; 2] = ["--gpu-architecture=sm_90a", "--std=c++17"];

/// Compiles and loads a kernel.
pub(crate) fn kernel(cuda: &Cuda, source: &str, name: &str) -> CudaFunction {
    context_kernel(&cuda.context, source, name)
}

/// The same for a context.
pub(crate) fn context_kernel(context: &Arc<CudaContext>, source: &str, name: &str) -> CudaFunction {
    let image = compile(source, &OPTIONS).unwrap_or_else(|log| panic!("{log}"));
    let module = context.load_module(Ptx::from_binary(image)).expect("the image is valid");
    module.load_function(name).expect("the source has the kernel")
}

pub(crate) fn grid(blocks: u32, threads: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 }
}

/// Driver error code.
pub(crate) fn code<T>(result: Result<T, DriverError>) -> u32 {
    result.map_or_else(|error| error.0 as u32, |_| 0)
}

pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const INVALID_IMAGE: u32 = 200;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const ILLEGAL_ADDRESS: u32 = 700;
pub(crate) const MISALIGNED_ADDRESS: u32 = 716;
pub(crate) const LAUNCH_FAILED: u32 = 719;
