//! Measures the peak rate of matrix products on a device: the denominator of MFU.

use super::clock::Clock;
use crate::error::Result;
use dflop_device::ops::gemm::{GemmShape, MatrixLayout};
use dflop_device::prelude::*;
use dflop_device::{Cpu, Epilogue};

/// Side of the square matrices that are multiplied: three matrices of 4 MiB.
const SIDE: usize = 1024;

/// Measures the FLOP/s of a large square `f32` matrix product, the best of `runs` runs (at least one).
///
/// The product is [`Gemm::gemm`] on all threads of the device, after one run that is not timed.
///
/// # Errors
/// [`crate::Error::Device`].
pub fn gemm_peak_flops(device: &Cpu, runs: usize) -> Result<f64> {
    let values = |seed: usize| -> Vec<f32> {
        (0..SIDE * SIDE).map(|at| ((at * 31 + seed) % 61) as f32 / 61.0 - 0.5).collect()
    };
    let (a, b, mut c) = (device.upload(&values(1))?, device.upload(&values(2))?, device.alloc(SIDE * SIDE)?);
    let layout = MatrixLayout::rows(SIDE);
    let shape = GemmShape { rows: SIDE, columns: SIDE, inner: SIDE };
    let mut best = f64::INFINITY;
    for run in 0..=runs.max(1) {
        let product =
            || device.gemm(shape, (&a, layout), (&b, layout), false, (&mut c, layout), Epilogue::None);
        let (done, taken) = Clock::of(device).time(device, product);
        done?;
        // The first run warms up caches and threads.
        if run > 0 {
            best = best.min(taken.as_secs_f64());
        }
    }
    Ok(2.0 * (SIDE as f64).powi(3) / best)
}
