//! Bytes that kernels move, as the stand-in counts them, beside the least that an operation needs.

use dflop_cuda::Cuda;
use dflop_cuda_tests::cuda;
use dflop_device::Dtype;
use dflop_device::prelude::*;

/// Rows and columns: widths of small and of large models.
const SHAPES: [(usize, usize); 3] = [(16_384, 1536), (8192, 3584), (4096, 8192)];
/// Most bytes that a backward pass of a norm moves, over the least.
const RATIO_MAX: f64 = 1.15;

/// Runs an operation, and returns the bytes that its kernels load and store.
fn bytes(device: &Cuda, run: impl FnOnce()) -> u64 {
    let figure = device.zeros_as(Dtype::F64, 1).unwrap();
    let total = || {
        // waits for the device
        device.read(&figure).unwrap();
        let counts = cuda::stand_in().counts();
        counts.bytes_loaded + counts.bytes_stored
    };
    let before = total();
    run();
    total() - before
}

/// Checks the bytes of a backward pass that reads `x` and `dy` and adds to `dx`, all of bf16, with f32
/// statistics of rows; it reads a weight of bf16 and adds to f32 gradients of parameters.
fn check(name: &str, (rows, columns): (usize, usize), statistics: usize, parameters: usize, moved: u64) {
    let matrices = rows * columns * 2 * 4;
    let least = matrices + 4 * rows * statistics + 2 * columns + 8 * columns * parameters;
    let ratio = moved as f64 / least as f64;
    println!("{name}, {rows} x {columns}: {moved} bytes, least {least}, ratio {ratio:.3}");
    assert!(ratio >= 1.0, "{name}: {moved} bytes are fewer than the least, {least}");
    assert!(ratio <= RATIO_MAX, "{name}, {rows} x {columns}: {ratio:.3} times the least bytes");
}

/// The least, since gradients accumulate: reads of `x`, `dy`, `dx`, and the write of `dx`.
#[test]
fn backward_passes_of_norms_move_hardly_more_than_the_least_bytes() {
    let _turn = cuda::turn();
    cuda::stand_in().set_counts_bytes(true);
    let device = cuda::without_cache(Dtype::Bf16);
    for (rows, columns) in SHAPES {
        let matrix = || device.zeros(rows * columns).unwrap();
        let (x, dy, mut dx) = (matrix(), matrix(), matrix());
        let weight = device.zeros(columns).unwrap();
        let figures = |len: usize| device.zeros_as(Dtype::F32, len).unwrap();
        let (inverse, statistics) = (figures(rows), figures(2 * rows));
        let (mut d_weight, mut d_bias) = (figures(columns), figures(columns));
        let moved = bytes(&device, || {
            let (dx, d_weight) = (Some(&mut dx), Some(&mut d_weight));
            device.rms_norm_backward(&dy, &x, (&weight, 1.0), &inverse, dx, d_weight).unwrap();
        });
        check("rms norm", (rows, columns), 1, 1, moved);
        let moved = bytes(&device, || {
            let parameters = Some((&mut d_weight, &mut d_bias));
            device.layer_norm_backward(&dy, &x, &weight, &statistics, Some(&mut dx), parameters).unwrap();
        });
        check("layer norm", (rows, columns), 2, 2, moved);
    }
}
