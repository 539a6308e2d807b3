//! Bytes moved by kernels, as counted by the stand-in, compared with the minimum that an operation needs.

use dflop_cuda::Cuda;
use dflop_cuda_tests::cuda;
use dflop_device::Dtype;
use dflop_device::ops::head_norm::HeadColumns;
use dflop_device::prelude::*;

/// Rows and columns: small and large model widths.
const SHAPES: [(usize, usize); 3] = [(16_384, 1536), (8192, 3584), (4096, 8192)];
/// Maximum ratio between the bytes moved by a norm backward pass and the minimum bytes.
const RATIO_MAX: f64 = 1.15;

/// Runs an operation, and returns the bytes that the kernels load and store.
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

/// Checks the bytes moved by an operation against the minimum.
fn check(name: &str, moved: u64, least: usize) {
    let ratio = moved as f64 / least as f64;
    println!("{name}: {moved} bytes, least {least}, ratio {ratio:.3}");
    assert!(ratio >= 1.0, "{name}: {moved} bytes are fewer than the least, {least}");
    assert!(ratio <= RATIO_MAX, "{name}: {ratio:.3} times the least bytes");
}

/// Returns the minimum bytes for a backward pass that reads `x` and `dy` and adds to `dx`, all in bf16, with
/// f32 row statistics; the pass reads a bf16 weight and adds to f32 parameter gradients.
fn least((rows, columns): (usize, usize), statistics: usize, parameters: usize) -> usize {
    rows * columns * 2 * 4 + 4 * rows * statistics + 2 * columns + 8 * columns * parameters
}

#[test]
fn backward_passes_of_norms_move_hardly_more_than_the_least_bytes() {
    let _turn = cuda::turn();
    cuda::stand_in().set_counts_bytes(true);
    let device = cuda::without_cache(Dtype::Bf16);
    for shape @ (rows, columns) in SHAPES {
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
        check(&format!("rms norm, {rows} x {columns}"), moved, least(shape, 1, 1));
        let moved = bytes(&device, || {
            let (dx, parameters) = (Some(&mut dx), Some((&mut d_weight, &mut d_bias)));
            device.layer_norm_backward(&dy, &x, &weight, &statistics, dx, parameters).unwrap();
        });
        check(&format!("layer norm, {rows} x {columns}"), moved, least(shape, 2, 2));
    }
}

/// The gradient is read and overwritten in place.
#[test]
fn the_backward_pass_of_norms_of_heads_moves_hardly_more_than_the_least_bytes() {
    let _turn = cuda::turn();
    cuda::stand_in().set_counts_bytes(true);
    let device = cuda::without_cache(Dtype::Bf16);
    for head_dim in [64, 80, 128] {
        let (rows, count) = (1024, 28);
        let heads = HeadColumns { first: head_dim, heads: count, head_dim, stride: 36 * head_dim };
        let (x, mut d) =
            (device.zeros(rows * heads.stride).unwrap(), device.zeros(rows * heads.stride).unwrap());
        let weight = device.zeros(head_dim).unwrap();
        let inverse = device.zeros_as(Dtype::F32, rows * count).unwrap();
        let mut d_weight = device.zeros_as(Dtype::F32, head_dim).unwrap();
        let moved = bytes(&device, || {
            let (weight, d_weight) = ((Some(&weight), 0.0), Some(&mut d_weight));
            device.head_norm_backward(heads, weight, (&x, &inverse), &mut d, d_weight).unwrap();
        });
        let least = rows * count * (head_dim * 2 * 3 + 4) + 2 * head_dim + 8 * head_dim;
        check(&format!("norm of {} heads of {head_dim}", rows * count), moved, least);
    }
}
