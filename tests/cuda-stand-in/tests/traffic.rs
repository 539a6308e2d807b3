//! Bytes that kernels load and store.

use crate::{
    launch,
    support::{Cuda, cuda, grid, kernel},
};

const KERNELS: &str = r#"
#include "device.cuh"
extern "C" __global__ void add(const float* x, float* y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] += x[i];
}
extern "C" __global__ void add_four(const float4* x, float4* y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const float4 a = x[i], b = y[i];
    y[i] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
extern "C" __global__ void add_twice(const float* x, float* y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] += x[i];
    __syncthreads();
    y[i] += x[i];
}
extern "C" __global__ void reverse(const float* x, float* y) {
    __shared__ float shared[32];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    shared[threadIdx.x] = x[i];
    __syncthreads();
    y[i] = shared[31 - threadIdx.x];
}
extern "C" __global__ void copy_quarter(const float* x, float* y) {
    DYNAMIC_SHARED(shared);
    copy_async_16(shared + threadIdx.x * 16, x + threadIdx.x * 4, threadIdx.x < 8);
    copy_commit();
    copy_wait<0>();
    if (threadIdx.x == 0) y[0] = reinterpret_cast<float*>(shared)[31];
}
extern "C" __global__ void add_together(const float* x, int* y) {
    atomicAdd(y, static_cast<int>(x[threadIdx.x]));
}
"#;

/// Number of bytes that a kernel with 64 numbers loads and stores.
fn bytes(cuda: &Cuda, name: &str, blocks: u32, threads: u32) -> (u64, u64) {
    let stream = cuda.context.default_stream();
    let function = kernel(cuda, KERNELS, name);
    let (x, mut y) = (stream.alloc_zeros::<f32>(64).unwrap(), stream.alloc_zeros::<f32>(64).unwrap());
    let mut config = grid(blocks, threads);
    config.shared_mem_bytes = 512;
    let before = cuda.counts();
    launch!(stream, function, config, &x, &mut y).unwrap();
    stream.synchronize().unwrap();
    let counts = cuda.counts();
    (counts.bytes_loaded - before.bytes_loaded, counts.bytes_stored - before.bytes_stored)
}

#[test]
fn bytes_of_buffers_count_each_time_and_those_of_shared_memory_do_not() {
    let Some(cuda) = cuda() else { return };
    cuda.set_counts_bytes(true);
    for workers in [1, 3] {
        cuda.set_workers(workers);
        assert_eq!(bytes(&cuda, "add", 2, 32), (2 * 256, 256));
        assert_eq!(bytes(&cuda, "add_four", 1, 16), (2 * 256, 256));
        assert_eq!(bytes(&cuda, "add_twice", 2, 32), (4 * 256, 2 * 256));
        assert_eq!(bytes(&cuda, "reverse", 2, 32), (256, 256));
        assert_eq!(bytes(&cuda, "copy_quarter", 1, 32), (8 * 16, 4));
        assert_eq!(bytes(&cuda, "add_together", 1, 32), (32 * 4 + 32 * 4, 32 * 4));
    }
}

#[test]
fn kernels_count_only_if_they_are_compiled_to() {
    let Some(cuda) = cuda() else { return };
    assert_eq!(bytes(&cuda, "add", 2, 32), (0, 0));
    cuda.set_counts_bytes(true);
    assert_eq!(bytes(&cuda, "add", 2, 32), (512, 256));
    cuda.set_counts_bytes(false);
    assert_eq!(bytes(&cuda, "add", 2, 32), (0, 0));
}
