//! Stand-in buffers.

use crate::{
    launch,
    support::{ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY, code, cuda, grid, kernel, raw},
};
use cudarc::driver::{CudaContext, result};

const WRITE: &str = r#"
#include "device.cuh"
extern "C" __global__ void write(float* x, int at) { x[at] = 1.f; }
"#;

#[test]
fn a_write_behind_a_buffer_is_an_illegal_address_and_the_error_stays() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.default_stream();
    let write = kernel(&cuda, WRITE, "write");
    let mut x = stream.alloc_zeros::<f32>(64).unwrap();
    launch!(stream, write, grid(1, 1), &mut x, &63_i32).unwrap();
    assert_eq!(code(stream.synchronize()), 0);
    launch!(stream, write, grid(1, 1), &mut x, &64_i32).unwrap();
    assert_eq!(code(stream.synchronize()), ILLEGAL_ADDRESS);
    assert_eq!(code(stream.synchronize()), ILLEGAL_ADDRESS);
    let failure = cuda.last_failure();
    assert!(failure.starts_with("write: illegal address"), "{failure}");
    assert!(failure.contains("0 bytes behind the end of a buffer of 256 bytes"), "{failure}");
    cuda.reset();
    assert_eq!((cuda.last_failure().as_str(), code(stream.synchronize())), ("", 0));
}

#[test]
fn a_write_between_a_buffer_and_its_guard_is_found_at_the_release() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.default_stream();
    let write = kernel(&cuda, WRITE, "write");
    for at in [63_i32, -1] {
        cuda.reset();
        let mut x = stream.alloc_zeros::<f32>(63).unwrap();
        launch!(stream, write, grid(1, 1), &mut x, &at).unwrap();
        assert_eq!(code(stream.synchronize()), 0);
        drop(x);
        assert_eq!(code(stream.synchronize()), ILLEGAL_ADDRESS, "{at}");
    }
}

#[test]
fn a_use_after_the_release_is_an_illegal_address() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.default_stream();
    let write = kernel(&cuda, WRITE, "write");
    let address = stream.alloc_zeros::<f32>(64).unwrap().leak();
    launch!(stream, write, grid(1, 1), &address, &0_i32).unwrap();
    raw::release(address, &stream);
    assert_eq!(code(stream.synchronize()), 0, "the stream releases after the first launch");
    launch!(stream, write, grid(1, 1), &address, &0_i32).unwrap();
    assert_eq!(code(stream.synchronize()), ILLEGAL_ADDRESS);
}

#[test]
fn copies_outside_of_buffers_are_invalid() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.default_stream();
    let address = stream.alloc_zeros::<u8>(100).unwrap().leak();
    let copy = |at: u64, bytes: usize| code(raw::copy_up(at, &vec![0; bytes], &stream));
    assert_eq!(copy(address, 100), 0);
    assert_eq!(copy(address, 101), INVALID_VALUE);
    assert_eq!(copy(address + 50, 51), INVALID_VALUE);
    assert_eq!(copy(0x1000, 1), INVALID_VALUE);
    assert_eq!(copy(address + 99, 1), 0);
    assert_eq!(code(stream.synchronize()), 0);
}

#[test]
fn memory_ends_and_is_counted() {
    let Some(cuda) = cuda() else { return };
    cuda.set_bytes_max(1 << 20);
    let stream = cuda.context.default_stream();
    let before = cuda.counts();
    assert_eq!(cuda.context.mem_get_info().unwrap(), (1 << 20, 1 << 20));
    let half = stream.alloc_zeros::<u8>(1 << 19).unwrap();
    let more = raw::alloc::<u8>(&stream, (1 << 19) + 1);
    assert_eq!(code(more), OUT_OF_MEMORY);
    assert_eq!(cuda.context.mem_get_info().unwrap(), (1 << 19, 1 << 20));
    drop(half);
    let all = raw::alloc::<u8>(&stream, 1 << 20).unwrap();
    let counts = cuda.counts();
    assert_eq!(counts.allocations, before.allocations + 2);
    assert_eq!((counts.buffers_in_use, counts.bytes_in_use), (1, 1 << 20));
    assert_eq!(counts.bytes_highest, 1 << 20);
    assert_eq!(counts.memsets, 1);
    drop(all);
    assert_eq!(cuda.counts().buffers_in_use, 0);
    assert_eq!(code(stream.synchronize()), 0, "an allocation that fails breaks nothing");
}

#[test]
fn new_memory_is_nan() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.default_stream();
    for length in [1, 64, 5000] {
        let x = raw::alloc::<f32>(&stream, length).unwrap();
        assert!(stream.clone_dtoh(&x).unwrap().iter().all(|x| x.is_nan()));
    }
}

#[test]
fn buffers_that_outlive_their_context_are_counted() {
    let Some(cuda) = cuda() else { return };
    cuda.set_devices(2);
    let context = CudaContext::new(1).unwrap();
    let stream = context.default_stream();
    let _ = stream.alloc_zeros::<f32>(5).unwrap().leak();
    let kept = stream.alloc_zeros::<f32>(6).unwrap();
    assert_eq!(cuda.counts().buffers_in_use, 2);
    drop((kept, stream, context));
    assert_eq!((cuda.counts().leaked_buffers, cuda.counts().buffers_in_use), (1, 0));
}

#[test]
fn devices_and_versions_can_be_chosen() {
    let Some(cuda) = cuda() else { return };
    assert!(cuda.context.name().unwrap().contains("stand-in"));
    assert_eq!(cuda.context.compute_capability().unwrap(), (9, 0));
    cuda.set_compute_capability(80);
    assert_eq!(cuda.context.compute_capability().unwrap(), (8, 0));
    cuda.set_driver_version(12080);
    assert_eq!(raw::driver_version(), 12080);
    assert_eq!(CudaContext::device_count().unwrap(), 1);
    cuda.set_devices(0);
    assert_eq!(code(result::init()), 100, "no device");
    // The context is released on a device that is there again.
    cuda.reset();
}
