//! A context for a test, and kernels from sources.

mod numbers;
pub(crate) mod product;

pub(crate) use numbers::Numbers;

use cudarc::{
    driver::{CudaContext, CudaFunction, DriverError, LaunchConfig},
    nvrtc::{Ptx, result, sys},
};
use dflop_cuda_stand_in::StandIn;
use std::{
    ffi::{CStr, CString},
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard},
};

pub(crate) struct Cuda {
    pub(crate) control: &'static StandIn,
    pub(crate) context: Arc<CudaContext>,
    /// Settings hold for the process, so tests of one process take turns.
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
    // SAFETY: the tests order their streams with events, or leave that out on purpose.
    unsafe { context.disable_event_tracking() };
    Some(Cuda { control, context, _turn: turn })
}

const INTRINSICS: &str = "#error the stand-in replaces this header";
const DEVICE: &str = "
#pragma once
#include \"intrinsics.cuh\"
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }
";

/// Compiles a source to an image; an error is the compiler's log.
pub(crate) fn compile(source: &str, options: &[&str]) -> Result<Vec<u8>, String> {
    let source = CString::new(source).expect("sources hold no NUL");
    let names = [c"intrinsics.cuh", c"device.cuh"].map(CStr::as_ptr);
    let texts = [INTRINSICS, DEVICE].map(|text| CString::new(text).expect("headers hold no NUL"));
    let headers = [texts[0].as_ptr(), texts[1].as_ptr()];
    let mut program = std::ptr::null_mut();
    // SAFETY: all texts live through the call, and there are two headers with two names.
    let status = unsafe {
        sys::nvrtcCreateProgram(
            &raw mut program,
            source.as_ptr(),
            c"test.cu".as_ptr(),
            2,
            headers.as_ptr(),
            names.as_ptr(),
        )
    };
    assert_eq!(status, sys::nvrtcResult::NVRTC_SUCCESS);
    // SAFETY: the program is valid until it is destroyed at the end.
    unsafe {
        let output = if result::compile_program(program, options).is_ok() {
            Ok(cubin(program))
        } else {
            let log = result::get_program_log(program).expect("there is a log");
            Err(log.iter().map(|&byte| char::from(byte as u8)).collect())
        };
        result::destroy_program(program).expect("the program is valid");
        output
    }
}

/// # Safety
/// The program is compiled.
unsafe fn cubin(program: sys::nvrtcProgram) -> Vec<u8> {
    let mut bytes = 0;
    // SAFETY: the second call writes as many bytes as the first one tells.
    unsafe {
        assert_eq!(sys::nvrtcGetCUBINSize(program, &raw mut bytes), sys::nvrtcResult::NVRTC_SUCCESS);
        let mut image = vec![0_u8; bytes];
        assert_eq!(sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast()), sys::nvrtcResult::NVRTC_SUCCESS);
        image
    }
}

pub(crate) const OPTIONS: [&str; 2] = ["--gpu-architecture=sm_90a", "--std=c++17"];

/// Compiles and loads one kernel.
pub(crate) fn kernel(cuda: &Cuda, source: &str, name: &str) -> CudaFunction {
    let image = compile(source, &OPTIONS).unwrap_or_else(|log| panic!("{log}"));
    let module = cuda.context.load_module(Ptx::from_binary(image)).expect("the image is valid");
    module.load_function(name).expect("the source has the kernel")
}

pub(crate) fn grid(blocks: u32, threads: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 }
}

/// The code of a driver error.
pub(crate) fn code<T>(result: Result<T, DriverError>) -> u32 {
    result.map_or_else(|error| error.0 as u32, |_| 0)
}

pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const INVALID_IMAGE: u32 = 200;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const ILLEGAL_ADDRESS: u32 = 700;
pub(crate) const MISALIGNED_ADDRESS: u32 = 716;
pub(crate) const LAUNCH_FAILED: u32 = 719;

/// Launches a kernel on a stream with the given arguments.
#[macro_export]
macro_rules! launch {
    ($stream:expr, $function:expr, $config:expr, $($argument:expr),* $(,)?) => {{
        use cudarc::driver::PushKernelArg;
        let config = $config;
        let mut builder = $stream.launch_builder(&$function);
        $(builder.arg($argument);)*
        // SAFETY: the test's kernel takes these arguments.
        unsafe { builder.launch(config) }.map(|_| ())
    }};
}
