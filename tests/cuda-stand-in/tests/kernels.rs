//! Kernels on the threads of the stand-in.

use crate::{
    launch,
    support::{LAUNCH_FAILED, code, cuda, grid, kernel},
};

const ADD: &str = r#"
#include "device.cuh"
extern "C" __global__ void add(const float* a, const float* b, float* c, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
"#;

#[test]
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

/// Sums four blocks in several orders of threads.
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
