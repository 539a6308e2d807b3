//! What threads and matrix instructions cost here. Run with `--ignored --nocapture`.

use crate::{
    launch,
    support::{cuda, grid, kernel, raw},
};
use std::time::Instant;

const KERNELS: &str = r#"
#include "device.cuh"
extern "C" __global__ void empty(float* x) {}
extern "C" __global__ void scale(float* x) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    x[i] = x[i] * 2.f;
}
extern "C" __global__ void barriers(float* x) {
    for (int i = 0; i < 100; i++) __syncthreads();
}
extern "C" __global__ void shuffles(float* x) {
    float value = 1.f;
    for (int i = 0; i < 100; i++) value += __shfl_xor_sync(0xffffffffu, value, 1);
    if (value == 0.f) x[0] = value;
}
extern "C" __global__ void products(float* x) {
    float c[4] = {};
    u32 a[4] = {};
    for (int i = 0; i < 100; i++) mma_16816(c, a, 0, 0);
    if (c[0] != 0.f) x[0] = c[0];
}
extern "C" __global__ void loads(float* x) {
    DYNAMIC_SHARED(shared);
    u32 r[4];
    for (int i = 0; i < 100; i++) load_matrix_x4(r, shared + threadIdx.x % 32 * 16);
    if (r[0] == 0) x[0] = 0.f;
}
"#;

#[test]
#[ignore = "measures"]
#[expect(clippy::print_stderr, reason = "the result")]
fn costs() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.default_stream();
    let mut x = stream.alloc_zeros::<f32>(1 << 20).unwrap();
    // Kernels, operations of a thread, and threads per operation.
    for (name, operations, unit) in [
        ("empty", 1, 1),
        ("scale", 1, 1),
        ("barriers", 100, 1),
        ("shuffles", 100, 1),
        ("shuffles", 100, 32),
        ("loads", 100, 32),
        ("products", 100, 32),
    ] {
        let function = kernel(&cuda, KERNELS, name);
        let mut config = grid(4096, 256);
        config.shared_mem_bytes = 1024;
        if operations > 1 {
            config.grid_dim.0 = 64;
        }
        // The minimum over several runs: other programs may run at the same time.
        let elapsed = (0..8).map(|_| {
            let start = Instant::now();
            launch!(stream, function, config, &mut x).unwrap();
            stream.synchronize().unwrap();
            start.elapsed()
        });
        let threads = f64::from(config.grid_dim.0) * 256.0;
        let nanoseconds = elapsed.min().unwrap_or_default().as_nanos() as f64 / threads;
        let nanoseconds = nanoseconds / f64::from(operations) * f64::from(unit);
        eprintln!("{name}: {nanoseconds:.1} ns per {}", if unit == 1 { "thread" } else { "warp" });
    }
}

#[test]
#[ignore = "measures"]
#[expect(clippy::print_stderr, reason = "the result")]
fn costs_of_calls() {
    const ROUNDS: u32 = 200;
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.new_stream().unwrap();
    let empty = kernel(&cuda, KERNELS, "empty");
    let mut x = stream.alloc_zeros::<f32>(1).unwrap();
    let print = |what: &str, start: Instant| {
        eprintln!("{what}: {:.1} us", start.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS));
    };
    for bytes in [64, 4096, 65536, 1 << 20] {
        let start = Instant::now();
        for _ in 0..ROUNDS {
            drop(raw::alloc::<u8>(&stream, bytes).unwrap());
            stream.synchronize().unwrap();
        }
        print(&format!("a buffer of {bytes} bytes"), start);
    }
    let start = Instant::now();
    for _ in 0..ROUNDS {
        launch!(stream, empty, grid(1, 32), &mut x).unwrap();
    }
    stream.synchronize().unwrap();
    print("a launch", start);
}
