//! What matrix products reach at best on a device: the denominator of utilization.

use super::clock::Clock;
use crate::device::{Cpu, Device};
use crate::error::Result;
use crate::ops::gemm::{GemmShape, MatrixLayout};

/// Rows, columns and length of the sums of the product that is timed: three matrices of 4 MiB.
const SIDE: usize = 1024;

/// Measures the FLOP/s that a large square product of `f32` reaches, the best of so many runs (at least one).
///
/// The product is that of [`Device::gemm`], on all threads of the device; one that is not timed comes first.
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn gemm_peak_flops(device: &Cpu, runs: usize) -> Result<f64> {
    let values = |seed: usize| -> Vec<f32> {
        (0..SIDE * SIDE).map(|at| ((at * 31 + seed) % 61) as f32 / 61.0 - 0.5).collect()
    };
    let (a, b, mut c) = (device.upload(&values(1))?, device.upload(&values(2))?, device.alloc(SIDE * SIDE)?);
    let layout = MatrixLayout::rows(SIDE);
    let shape = GemmShape { rows: SIDE, columns: SIDE, inner: SIDE };
    let mut best = f64::INFINITY;
    for run in 0..=runs.max(1) {
        let product = || device.gemm(shape, (&a, layout), (&b, layout), false, (&mut c, layout));
        let (done, taken) = Clock::of(device).time(device, product);
        done?;
        if run > 0 {
            best = best.min(taken.as_secs_f64());
        }
    }
    Ok(2.0 * (SIDE as f64).powi(3) / best)
}
