//! Implements the inner resampling loops: weighted sums of byte rows.
//!
//! Sums are exact modulo 2³² and the true sum fits, so the order of addition does not matter and the compiler
//! may vectorize freely.

use multiversion::multiversion;

use super::filter::{AxisWeights, WEIGHT_BITS};

/// Number of rows that the horizontal pass processes together, transposed.
pub(super) const STRIP_ROWS: usize = 16;
/// Bytes per strip column.
pub(super) const STRIP_BYTES: usize = 3 * STRIP_ROWS;

/// Resamples a strip along the length.
///
/// - `strip`: `[columns, STRIP_ROWS, 3]`, the stored pixels
/// - `padding`: `[STRIP_ROWS, 3]`, a padding column
/// - `resampled`: `[STRIP_ROWS, windows, 3]`
#[multiversion(targets("x86_64+avx2", "x86_64+sse4.1"))]
pub(super) fn convolve_strip(
    strip: &[u8],
    padding: &[u8; STRIP_BYTES],
    axis: &AxisWeights,
    resampled: &mut [u8],
) {
    let row_bytes = 3 * axis.windows.len();
    for (column, window) in axis.windows.iter().enumerate() {
        let source = &strip[window.start * STRIP_BYTES..];
        let sums = weighted_sum::<STRIP_BYTES>(
            source,
            STRIP_BYTES,
            axis.window_weights(window),
            padding,
            window.padding_weight,
        );
        for (row, pixel) in sums.chunks_exact(3).enumerate() {
            let at = row * row_bytes + 3 * column;
            resampled[at..at + 3].copy_from_slice(pixel);
        }
    }
}

/// Computes an image row from the rows in a vertical window.
///
/// - `rows`: `[weights, row.len()]`, starting with the first weighted row
/// - `padding`: a padding row, as long as `row`
#[multiversion(targets("x86_64+avx2", "x86_64+sse4.1"))]
pub(super) fn convolve_row(
    rows: &[u8],
    weights: &[i32],
    padding: &[u8],
    padding_weight: i32,
    row: &mut [u8],
) {
    const LANES: usize = 32;
    let stride = row.len();
    let mut at = 0;
    while at + LANES <= stride {
        let sums = weighted_sum::<LANES>(&rows[at..], stride, weights, &padding[at..], padding_weight);
        row[at..at + LANES].copy_from_slice(&sums);
        at += LANES;
    }
    for (lane, byte) in row.iter_mut().enumerate().skip(at) {
        *byte = weighted_sum::<1>(&rows[lane..], stride, weights, &padding[lane..], padding_weight)[0];
    }
}

/// Sums `LANES` bytes over steps of `stride`, and rounds and clips each to a byte.
#[expect(clippy::inline_always, reason = "must be compiled for the instruction set of each caller")]
#[inline(always)]
fn weighted_sum<const LANES: usize>(
    source: &[u8],
    stride: usize,
    weights: &[i32],
    padding: &[u8],
    padding_weight: i32,
) -> [u8; LANES] {
    let mut sums = [1_i32 << (WEIGHT_BITS - 1); LANES];
    if padding_weight != 0 {
        add_weighted(&mut sums, padding, padding_weight);
    }
    for (step, &weight) in weights.iter().enumerate() {
        add_weighted(&mut sums, &source[step * stride..], weight);
    }
    sums.map(|sum| (sum >> WEIGHT_BITS).clamp(0, 255) as u8)
}

#[expect(clippy::inline_always, reason = "must be compiled for the instruction set of each caller")]
#[inline(always)]
fn add_weighted<const LANES: usize>(sums: &mut [i32; LANES], bytes: &[u8], weight: i32) {
    let Some(bytes) = bytes.first_chunk::<LANES>() else { return };
    for (sum, &byte) in sums.iter_mut().zip(bytes) {
        *sum = sum.wrapping_add(i32::from(byte).wrapping_mul(weight));
    }
}
