//! Unsafe CUDA calls: arguments must be valid, or be the subject of a test.
#![expect(unsafe_code, reason = "calls of CUDA")]

use cudarc::{
    driver::{
        CudaContext, CudaSlice, CudaStream, DeviceRepr, DriverError, LaunchArgs, LaunchConfig,
        PinnedHostSlice, result as driver, sys::CUresult,
    },
    nvrtc::{result, sys},
};
use std::{
    ffi::{CStr, CString, c_void},
    sync::Arc,
};

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

/// Turns off the events by which cudarc orders streams: the tests order streams themselves, or deliberately
/// do not.
pub(crate) fn without_event_tracking(context: &CudaContext) {
    // SAFETY: no buffer exists yet.
    unsafe { context.disable_event_tracking() };
}

/// A buffer with the contents of new memory.
pub(crate) fn alloc<T: DeviceRepr>(
    stream: &Arc<CudaStream>,
    length: usize,
) -> Result<CudaSlice<T>, DriverError> {
    // SAFETY: tests read only types for which every bit pattern is a value.
    unsafe { stream.alloc(length) }
}

pub(crate) fn release(address: u64, stream: &CudaStream) {
    // SAFETY: the address belongs to a buffer that its owner has leaked.
    unsafe { driver::free_async(address, stream.cu_stream()) }.expect("the buffer was in use");
}

pub(crate) fn copy_up(address: u64, host: &[u8], stream: &CudaStream) -> Result<(), DriverError> {
    // SAFETY: the test is about this address.
    unsafe { driver::memcpy_htod_async(address, host, stream.cu_stream()) }
}

pub(crate) fn page_locked(context: &Arc<CudaContext>, length: usize) -> PinnedHostSlice<f32> {
    // SAFETY: every pattern of bits is a float.
    unsafe { context.alloc_pinned(length) }.expect("there is memory")
}

/// Writes to page-locked memory regardless of work under way.
pub(crate) fn overwrite(host: *mut f32, value: f32) {
    // SAFETY: the memory is allocated; the test is about the copy under way.
    unsafe { *host = value };
}

pub(crate) fn driver_version() -> i32 {
    let mut version = 0;
    // SAFETY: the function writes one integer.
    unsafe { cudarc::driver::sys::cuDriverGetVersion(&raw mut version) };
    version
}

/// Fills four bytes with ones on a new stream, and reads them on the default stream without an event between.
pub(crate) fn read_beside_a_stream(flags: u32, default: &CudaStream) -> [u8; 4] {
    let mut other = std::ptr::null_mut();
    let mut host = [0; 4];
    // SAFETY: the buffer has four bytes, and the stream is done before both are gone.
    unsafe {
        let created = cudarc::driver::sys::cuStreamCreate(&raw mut other, flags);
        assert_eq!(created, CUresult::CUDA_SUCCESS);
        let x = driver::malloc_sync(4).expect("there is memory");
        driver::memset_d8_async(x, 1, 4, other).expect("the stream works");
        driver::memcpy_dtoh_async(&mut host, x, default.cu_stream()).expect("the stream works");
        driver::stream::synchronize(other).expect("the stream works");
        driver::stream::destroy(other).expect("the stream works");
        driver::free_sync(x).expect("the buffer was in use");
    }
    host
}

/// Releases the primary context of a device once more than it was retained here.
pub(crate) fn end_context(device: usize) {
    // SAFETY: the test uses nothing of the context after this.
    unsafe { driver::primary_ctx::release(device as i32) }.expect("the context was in use");
}

/// Runs a function when the stream comes to it.
pub(crate) fn host_function(stream: &CudaStream, run: impl FnOnce() + Send + 'static) {
    unsafe extern "C" fn call(run: *mut c_void) {
        // SAFETY: the pointer is that of the box below, and the stream runs it once.
        let run = unsafe { Box::from_raw(run.cast::<Box<dyn FnOnce() + Send>>()) };
        run();
    }
    let run: Box<Box<dyn FnOnce() + Send>> = Box::new(Box::new(run));
    // SAFETY: the function owns its argument.
    unsafe { driver::stream::launch_host_function(stream.cu_stream(), call, Box::into_raw(run).cast()) }
        .expect("the stream works");
}

/// Number of stream threads in this process.
pub(crate) fn stream_threads() -> usize {
    let threads = std::fs::read_dir("/proc/self/task").expect("the system lists threads");
    let name = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("comm"));
    threads.flatten().filter_map(|thread| name(thread).ok()).filter(|name| name == "cuda-stream\n").count()
}

/// Runs a launch with the arguments that the test has given.
pub(crate) fn run_launch(launch: &mut LaunchArgs<'_>, config: LaunchConfig) -> Result<(), DriverError> {
    // SAFETY: the test's kernel has these parameters, or the test is about a mismatch.
    unsafe { launch.launch(config) }.map(|_| ())
}

/// Launches a kernel on a stream with the given arguments.
#[macro_export]
macro_rules! launch {
    ($stream:expr, $function:expr, $config:expr, $($argument:expr),* $(,)?) => {{
        use cudarc::driver::PushKernelArg;
        let config = $config;
        let mut builder = $stream.launch_builder(&$function);
        $(builder.arg($argument);)*
        $crate::support::raw::run_launch(&mut builder, config)
    }};
}
