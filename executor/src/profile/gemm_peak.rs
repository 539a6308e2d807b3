//! Measures the peak matrix product rate on a device, the denominator in MFU.

use super::clock::Clock;
use crate::error::Result;
use dflop_device::ops::gemm::{GemmShape, MatrixLayout};
use dflop_device::{Device, Epilogue};

/// Minimum side of the square matrices to multiply: three matrices with 4 MiB in `f32`.
const SIDE_MIN: usize = 1024;
/// Maximum side, for a processor that smaller products do not keep busy.
const SIDE_MAX: usize = 8192;
/// Minimum duration in seconds of a product that shows the peak.
const PRODUCT_SECONDS: f64 = 1e-3;

/// Measures the FLOP/s of a large square matrix product in the weight type of the device, the best of `runs`
/// runs (at least one).
///
/// The product is [`gemm`](dflop_device::ops::gemm::Gemm::gemm), after a warm-up run that is not timed. The
/// matrix side is doubled from 1,024 until a product takes a millisecond, at most to 8,192.
///
/// # Errors
/// [`crate::Error::Device`].
pub fn gemm_peak_flops<D: Device>(device: &D, runs: usize) -> Result<f64> {
    let mut side = SIDE_MIN;
    loop {
        let seconds = best_product(device, side, runs)?;
        if seconds >= PRODUCT_SECONDS || side >= SIDE_MAX {
            return Ok(2.0 * (side as f64).powi(3) / seconds);
        }
        side *= 2;
    }
}

/// Returns the duration in seconds for the fastest product.
fn best_product<D: Device>(device: &D, side: usize, runs: usize) -> Result<f64> {
    let values = |seed: usize| -> Vec<f32> {
        (0..side * side).map(|at| ((at * 31 + seed) % 61) as f32 / 61.0 - 0.5).collect()
    };
    let (a, b, mut c) = (device.upload(&values(1))?, device.upload(&values(2))?, device.alloc(side * side)?);
    let layout = MatrixLayout::rows(side);
    let shape = GemmShape { rows: side, columns: side, inner: side };
    let mut best = f64::INFINITY;
    for run in 0..=runs.max(1) {
        let product =
            || device.gemm(shape, (&a, layout), (&b, layout), false, (&mut c, layout), Epilogue::None);
        let (done, taken) = Clock::of(device).time(device, product)?;
        done?;
        // The first run warms up caches and threads.
        if run > 0 {
            best = best.min(taken.as_secs_f64());
        }
    }
    Ok(best)
}
