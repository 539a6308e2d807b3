//! Kernels on the stand-in's threads.

use crate::{
    launch,
    support::{
        Cuda, ILLEGAL_ADDRESS, INVALID_IMAGE, INVALID_VALUE, LAUNCH_FAILED, MISALIGNED_ADDRESS, Numbers,
        OPTIONS, code, compile, cuda, grid, kernel,
    },
};
use cudarc::{
    driver::{LaunchConfig, sys::CUfunction_attribute_enum},
    nvrtc::Ptx,
};

const ADD: &str = r#"
#include "device.cuh"
extern "C" __global__ void add(const float* a, const float* b, float* c, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
"#;

#[test]
#[expect(clippy::float_cmp, reason = "these sums are exact")]
fn vectors_are_added() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.default_stream();
    let add = kernel(&cuda, ADD, "add");
    let a: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let (left, right) = (stream.clone_htod(&a).unwrap(), stream.clone_htod(&a).unwrap());
    let mut sum = stream.alloc_zeros::<f32>(1000).unwrap();
    for order in 0..4 {
        cuda.set_order(order);
        launch!(stream, add, grid(4, 256), &left, &right, &mut sum, &1000_i32).unwrap();
        let sums = stream.clone_dtoh(&sum).unwrap();
        assert!(sums.iter().zip(&a).all(|(sum, a)| *sum == 2.0 * a));
    }
    assert_eq!(cuda.counts().launches, 4);
}

const TOTAL: &str = r#"
#include "device.cuh"
extern "C" __global__ void __launch_bounds__(256) total(const float* a, float* out) {
    __shared__ float parts[256];
    parts[threadIdx.x] = a[blockIdx.x * 256 + threadIdx.x];
    for (int half = 128; half > 0; half /= 2) {
        BARRIER
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    }
    if (threadIdx.x == 0) out[blockIdx.x] = parts[0];
}
"#;

/// Sums four blocks in several thread orders.
fn totals(barrier: &str) -> Option<Vec<Vec<f32>>> {
    let cuda = cuda()?;
    let stream = cuda.context.default_stream();
    let total = kernel(&cuda, &TOTAL.replace("BARRIER", barrier), "total");
    let a = stream.clone_htod(&vec![1_f32; 1024]).unwrap();
    let totals = (0..6)
        .map(|order| {
            cuda.set_order(order);
            let mut out = stream.alloc_zeros::<f32>(4).unwrap();
            launch!(stream, total, grid(4, 256), &a, &mut out).unwrap();
            stream.clone_dtoh(&out).unwrap()
        })
        .collect();
    Some(totals)
}

#[test]
fn a_reduction_with_barriers_is_right_in_every_order() {
    let Some(totals) = totals("__syncthreads();") else { return };
    assert!(totals.iter().all(|totals| *totals == [256.0; 4]), "{totals:?}");
}

#[test]
fn a_reduction_without_barriers_is_wrong_in_some_order() {
    let Some(totals) = totals("") else { return };
    assert!(totals.iter().any(|totals| *totals != [256.0; 4]), "{totals:?}");
}

#[test]
fn threads_at_different_barriers_are_an_error() {
    let Some(cuda) = cuda() else { return };
    let source = r#"
#include "device.cuh"
extern "C" __global__ void diverge(float* x) {
    if (threadIdx.x < 32) {
        __syncthreads();
        x[0] = 1.f;
    } else {
        __syncthreads();
        x[1] = 1.f;
    }
}
"#;
    let stream = cuda.context.default_stream();
    let diverge = kernel(&cuda, source, "diverge");
    let mut x = stream.alloc_zeros::<f32>(2).unwrap();
    launch!(stream, diverge, grid(1, 64), &mut x).unwrap();
    assert_eq!(code(stream.synchronize()), LAUNCH_FAILED);
    assert!(cuda.last_failure().contains("different barriers"), "{}", cuda.last_failure());
}

const PRODUCT: &str = r#"
#include "device.cuh"
// c [16, 8] = a [16, 16] x b [16, 8], all by rows, through shared memory.
extern "C" __global__ void product(const bf16* a, const bf16* b, float* c) {
    DYNAMIC_SHARED(shared);
    bf16* const rows = reinterpret_cast<bf16*>(shared);
    bf16* const columns = rows + 16 * 16;
    const int lane = threadIdx.x;
    copy_async_16(rows + lane * 8, a + lane * 8, true);
    copy_async_16(columns + lane * 8, b + lane * 8, lane < 16);
    copy_commit();
    WAIT
    __syncthreads();
    u32 left[4], right[4];
    load_matrix_x4(left, rows + lane % 16 * 16 + lane / 16 * 8);
    load_matrix_x4_trans(right, columns + lane % 16 * 8);
    float sums[4] = {};
    mma_16816(sums, left, right[0], right[1]);
    for (int i = 0; i < 4; i++) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}
"#;

#[test]
fn matrix_instructions_multiply() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.default_stream();
    let product = kernel(&cuda, &PRODUCT.replace("WAIT", "copy_wait<0>();"), "product");
    let (a, b) = (Numbers::random(true, 256, 1), Numbers::random(true, 128, 2));
    let (left, right) = (a.upload(&stream), b.upload(&stream));
    let mut c = stream.alloc_zeros::<f32>(128).unwrap();
    for order in 0..4 {
        cuda.set_order(order);
        let mut config = grid(1, 32);
        config.shared_mem_bytes = 1024;
        launch!(stream, product, config, &left, &right, &mut c).unwrap();
        for (at, got) in stream.clone_dtoh(&c).unwrap().into_iter().enumerate() {
            let sum: f64 = (0..16).map(|k| a.at(at / 8 * 16 + k) * b.at(k * 8 + at % 8)).sum();
            assert!((f64::from(got) - sum).abs() < 1e-5, "order {order}, element {at}: {got} for {sum}");
        }
    }
}

#[test]
fn an_asynchronous_copy_without_a_wait_is_an_error() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.default_stream();
    let product = kernel(&cuda, &PRODUCT.replace("WAIT", ""), "product");
    let (left, right) =
        (Numbers::random(true, 256, 1).upload(&stream), Numbers::random(true, 128, 2).upload(&stream));
    let mut c = stream.alloc_zeros::<f32>(128).unwrap();
    let mut config = grid(1, 32);
    config.shared_mem_bytes = 1024;
    launch!(stream, product, config, &left, &right, &mut c).unwrap();
    assert_eq!(code(stream.synchronize()), LAUNCH_FAILED);
    assert!(cuda.last_failure().contains("never waited for"), "{}", cuda.last_failure());
}

/// Runs a single thread block for a kernel whose only parameter is a buffer with 1000 numbers.
fn run_alone(cuda: &Cuda, body: &str, shared_bytes: u32) -> u32 {
    let source =
        format!("#include \"device.cuh\"\nextern \"C\" __global__ void alone(float* x) {{\n{body}\n}}\n");
    let stream = cuda.context.default_stream();
    let alone = kernel(cuda, &source, "alone");
    let mut x = stream.alloc_zeros::<f32>(1000).unwrap();
    let mut config = grid(1, 32);
    config.shared_mem_bytes = shared_bytes;
    launch!(stream, alone, config, &mut x).unwrap();
    code(stream.synchronize())
}

#[test]
fn accesses_that_are_not_aligned_are_errors() {
    for body in [
        "DYNAMIC_SHARED(s); u32 r[4]; load_matrix_x4(r, s + 8); x[0] = r[0];",
        "DYNAMIC_SHARED(s); copy_async_16(s + 4, x, true); copy_commit(); copy_wait<0>();",
        "DYNAMIC_SHARED(s); copy_async_16(s, x + 1, true); copy_commit(); copy_wait<0>();",
        "x[0] = reinterpret_cast<const float4*>(x + threadIdx.x * 4 + 1)->y;",
        "*reinterpret_cast<uint2*>(x + 1) = make_uint2(1, 2);",
    ] {
        let Some(cuda) = cuda() else { return };
        assert_eq!(run_alone(&cuda, body, 1024), MISALIGNED_ADDRESS, "{body}");
    }
}

#[test]
fn accesses_out_of_bounds_are_illegal_addresses() {
    for body in [
        "x[1024 + threadIdx.x] = 1.f;",
        "x[-1024] = 1.f;",
        "x[0] = x[1 << 28];",
        "*reinterpret_cast<float*>(8) = 1.f;",
        "DYNAMIC_SHARED(s); s[1024] = 1;",
        "__shared__ float s[16]; s[threadIdx.x] = 1.f;",
        "float s[16]; for (int i = 0; i < 16; i++) s[i] = x[i]; x[0] = s[int(x[3]) + threadIdx.x];",
        "DYNAMIC_SHARED(s); copy_async_16(x, x, true);",
    ] {
        let Some(cuda) = cuda() else { return };
        assert_eq!(run_alone(&cuda, body, 1024), ILLEGAL_ADDRESS, "{body}");
    }
}

#[test]
fn shared_memory_starts_as_nan() {
    let Some(cuda) = cuda() else { return };
    for body in [
        "__shared__ float s[8]; x[0] = isnan(s[3]) ? 0.f : x[1 << 28]; s[3] = 0.f;",
        "DYNAMIC_SHARED(s); x[0] = s[9] == 255 ? 0.f : x[1 << 28]; s[9] = 0;",
    ] {
        // Blocks do not see the memory contents from an earlier block.
        for _ in 0..2 {
            assert_eq!(run_alone(&cuda, &format!("if (threadIdx.x == 0) {{ {body} }}"), 16), 0, "{body}");
        }
    }
}

#[test]
fn lanes_exchange_values() {
    let Some(cuda) = cuda() else { return };
    let source = r#"
#include "device.cuh"
extern "C" __global__ void exchange(int* x) {
    const int lane = threadIdx.x;
    x[lane] = __shfl_xor_sync(~0u, lane, 5);
    x[32 + lane] = __shfl_sync(~0u, lane, 7, 8);
    x[64 + lane] = __shfl_down_sync(~0u, lane, 3);
    x[96 + lane] = __shfl_up_sync(~0u, lane, 3);
    x[128 + lane] = __ballot_sync(~0u, lane % 3 == 0);
    x[160 + lane] = int(__shfl_sync(~0u, double(lane), 31));
    x[192 + lane] = lane < 16 ? __shfl_xor_sync(0xffffu, lane, 1) : __shfl_xor_sync(0xffff0000u, lane, 2);
}
"#;
    let stream = cuda.context.default_stream();
    let exchange = kernel(&cuda, source, "exchange");
    let mut x = stream.alloc_zeros::<i32>(224).unwrap();
    for order in 0..4 {
        cuda.set_order(order);
        launch!(stream, exchange, grid(1, 32), &mut x).unwrap();
        let x = stream.clone_dtoh(&x).unwrap();
        for lane in 0..32 {
            let at = |row: i32| x[(row * 32 + lane) as usize];
            let votes = (0..32).filter(|lane| lane % 3 == 0).map(|lane| 1_u32 << lane).sum::<u32>() as i32;
            let expected = [
                lane ^ 5,
                lane / 8 * 8 + 7,
                if lane < 29 { lane + 3 } else { lane },
                if lane >= 3 { lane - 3 } else { lane },
                votes,
                31,
                if lane < 16 { lane ^ 1 } else { lane ^ 2 },
            ];
            assert_eq!([0, 1, 2, 3, 4, 5, 6].map(at), expected, "order {order}, lane {lane}");
        }
    }
}

#[test]
fn blocks_have_three_dimensions_and_several_host_threads() {
    let Some(cuda) = cuda() else { return };
    let source = r#"
#include "device.cuh"
extern "C" __global__ void place(int* x) {
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    __shared__ int sum[70];
    sum[thread] = thread;
    __syncthreads();
    x[block * 70 + thread] = block * 1000 + sum[69 - thread];
}
"#;
    let stream = cuda.context.default_stream();
    let place = kernel(&cuda, source, "place");
    let mut x = stream.alloc_zeros::<i32>(60 * 70).unwrap();
    let config = LaunchConfig { grid_dim: (5, 4, 3), block_dim: (7, 5, 2), shared_mem_bytes: 0 };
    for (order, workers) in [(0, 1), (1, 1), (9, 1), (0, 3), (9, 3)] {
        cuda.set_order(order);
        cuda.set_workers(workers);
        launch!(stream, place, config, &mut x).unwrap();
        let x = stream.clone_dtoh(&x).unwrap();
        let is_right = |(i, x): (usize, &i32)| *x as usize == i / 70 * 1000 + 69 - i % 70;
        assert!(x.iter().enumerate().all(is_right), "order {order}, {workers} workers");
    }
}

#[test]
fn launches_beyond_the_limits_are_refused() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.default_stream();
    let source = r#"
#include "device.cuh"
extern "C" __global__ void __launch_bounds__(64) small(float* x) {}
"#;
    let small = kernel(&cuda, source, "small");
    let mut x = stream.alloc_zeros::<f32>(1).unwrap();
    let with_shared = |bytes| LaunchConfig { shared_mem_bytes: bytes, ..grid(1, 64) };
    let mut run = |config| code(launch!(stream, small, config, &mut x));
    assert_eq!(run(grid(1, 64)), 0);
    assert_eq!(run(grid(1, 65)), INVALID_VALUE);
    assert_eq!(run(grid(0, 64)), INVALID_VALUE);
    assert_eq!(run(with_shared(48 << 10)), 0);
    assert_eq!(run(with_shared((48 << 10) + 16)), INVALID_VALUE);
    let attribute = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    small.set_attribute(attribute, 100 << 10).unwrap();
    assert_eq!(run(with_shared(100 << 10)), 0);
    assert_eq!(code(small.set_attribute(attribute, 232_449)), INVALID_VALUE);
}

#[test]
fn the_launch_that_is_asked_to_fails() {
    let Some(cuda) = cuda() else { return };
    let stream = cuda.context.default_stream();
    let add = kernel(&cuda, ADD, "add");
    let a = stream.clone_htod(&[1_f32; 4]).unwrap();
    let mut sum = stream.alloc_zeros::<f32>(4).unwrap();
    cuda.fail_launch("add", 2);
    for expected in [0, ILLEGAL_ADDRESS] {
        launch!(stream, add, grid(1, 4), &a, &a, &mut sum, &4_i32).unwrap();
        assert_eq!(code(stream.synchronize()), expected);
    }
    assert_eq!(code(stream.alloc_zeros::<f32>(4)), ILLEGAL_ADDRESS, "errors stay");
}

/// Compiler log for a source that the compiler must reject.
fn compiler_log(source: &str, options: &[&str]) -> String {
    match compile(source, options) {
        Ok(_) => panic!("compiled: {source}"),
        Err(log) => log,
    }
}

#[test]
fn compilers_say_what_is_wrong() {
    let Some(cuda) = cuda() else { return };
    let kernel = |body: &str| format!("extern \"C\" __global__ void k(float* x) {{ {body} }}");
    let log = compiler_log(&kernel("undeclared = 1;"), &OPTIONS);
    assert!(log.contains("test.cu:1") && log.contains("undeclared"), "{log}");
    assert!(compiler_log("", &["--no-such-option"]).contains("--no-such-option"));
    cuda.set_compilation_fails(true);
    assert!(compile(ADD, &OPTIONS).is_err());
    cuda.set_compilation_fails(false);
    compiler_log(&kernel("x[0] = WIDTH;"), &OPTIONS);
    let [architecture, standard] = OPTIONS;
    let options = [architecture, standard, "-DWIDTH=64", "-lineinfo"];
    assert!(compile(&kernel("x[0] = WIDTH;"), &options).is_ok());
}

#[test]
fn what_the_runtime_compiler_lacks_is_refused() {
    let Some(_cuda) = cuda() else { return };
    let kernel = |body: &str| format!("extern \"C\" __global__ void k(float* x) {{ {body} }}");
    for (body, reason) in [
        ("uint32_t i = 0; x[i] = 0;", "nvrtc_has_no_uint32_t"),
        ("x[0] = std::abs(x[1]);", "nvrtc_has_no_std"),
        ("x[0] = INFINITY;", "INFINITY"),
    ] {
        let log = compiler_log(&kernel(body), &OPTIONS);
        assert!(log.contains(reason), "{log}");
    }
    let call = kernel("x[0] = half(x[1]);");
    let log = compiler_log(&format!("inline float half(float x) {{ return x / 2; }}\n{call}"), &OPTIONS);
    assert!(log.contains("has no __device__") && log.contains("half(float x)"), "{log}");
    let half = "struct Two { float value = 2.f; int zeros[2] = {0, 0}; };
        enum Kind { FIRST };
        constexpr int ONE[] = {1};
        constexpr int one() { return ONE[0]; }
        template <class X> __device__ X half(X x) {
            const auto f = [&] { return x / (Two{}.value * one()); };
            return f();
        }";
    compile(&format!("{half}\n{call}"), &OPTIONS).unwrap();
}

#[test]
fn images_are_checked() {
    let Some(cuda) = cuda() else { return };
    let mut bytes = compile(ADD, &OPTIONS).unwrap();
    assert!(cuda.context.load_module(Ptx::from_binary(bytes.clone())).is_ok());
    let end = bytes.len() - 1;
    bytes[end] ^= 1;
    assert_eq!(code(cuda.context.load_module(Ptx::from_binary(bytes))), INVALID_IMAGE);
    let other = b"\x7fELF and so on".to_vec();
    assert_eq!(code(cuda.context.load_module(Ptx::from_binary(other))), INVALID_IMAGE);
}
