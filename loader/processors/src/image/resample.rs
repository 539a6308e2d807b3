//! Resamples images by separable convolution.
//!
//! Rows are passed on as soon as they are computed, so that normalization and layout need no second image.
//! Padding around an image is never stored, and pixels outside a crop are never computed.
//!
//! Sums are exact modulo 2³² and the true sum fits, so the order of addition does not matter and the compiler
//! may vectorize freely.

use super::RgbView;
use super::filter::{AxisExtent, AxisWeights, Filter, WEIGHT_BITS};
use multiversion::multiversion;
use std::ops::Range;

/// Image, possibly centered in a larger plain canvas.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Canvas<'a> {
    pixels: &'a [u8],
    columns: AxisExtent,
    rows: AxisExtent,
    background: [u8; 3],
}

impl<'a> Canvas<'a> {
    /// Creates a canvas with the image size.
    pub(crate) fn from_image(image: RgbView<'a>) -> Self {
        let [columns, rows] = [image.width, image.height].map(|length| {
            let stored = length as usize;
            AxisExtent { whole: stored, before: 0, stored }
        });
        Self { pixels: image.pixels, columns, rows, background: [0; 3] }
    }

    /// Centers the image in the smallest square that contains it.
    pub(crate) fn padded_to_square(image: RgbView<'a>, background: [u8; 3]) -> Self {
        let mut canvas = Self { background, ..Self::from_image(image) };
        let side = canvas.columns.stored.max(canvas.rows.stored);
        for length in [&mut canvas.columns, &mut canvas.rows] {
            *length = AxisExtent { whole: side, before: (side - length.stored) / 2, ..*length };
        }
        canvas
    }
}

/// Target size and region for resizing.
#[derive(Clone, Debug)]
pub(crate) struct Resize {
    pub(crate) filter: Filter,
    /// Width of the whole image after resampling in pixels; width and height are at least 1.
    pub(crate) width: usize,
    pub(crate) height: usize,
    /// Requested columns in the resampled image.
    pub(crate) columns: Range<usize>,
    pub(crate) rows: Range<usize>,
}

impl Resize {
    /// Resizes a whole image to this size.
    pub(crate) fn whole(filter: Filter, width: usize, height: usize) -> Self {
        Self { filter, width, height, columns: 0..width, rows: 0..height }
    }
}

/// Resampler that reuses memory between images.
#[derive(Debug, Default)]
pub(crate) struct Resampler {
    columns: AxisWeights,
    rows: AxisWeights,
    strip: Vec<u8>,
    narrowed: Vec<u8>,
    padding_row: Vec<u8>,
    row: Vec<u8>,
}

impl Resampler {
    /// Resizes an image and calls `emit` with the index and the `[width, 3]` bytes of every requested row.
    pub(crate) fn resize(
        &mut self,
        canvas: &Canvas<'_>,
        resize: &Resize,
        mut emit: impl FnMut(usize, &[u8]),
    ) {
        self.columns.compute(resize.filter, canvas.columns, resize.width, resize.columns.clone());
        self.rows.compute(resize.filter, canvas.rows, resize.height, resize.rows.clone());
        let source_range = self.rows.source_range();
        let row_bytes = 3 * resize.columns.len();
        self.horizontal_pass(canvas, source_range.clone(), row_bytes);
        self.horizontal_pass_padding(canvas.background, row_bytes);
        self.row.resize(row_bytes, 0);
        for (index, window) in self.rows.windows.iter().enumerate() {
            let first = window.start.saturating_sub(source_range.start) * row_bytes;
            let weights = self.rows.window_weights(window);
            let rows = &self.narrowed[first..];
            convolve_row(rows, weights, &self.padding_row, window.padding_weight, &mut self.row);
            emit(index, &self.row);
        }
    }

    /// Runs the horizontal pass over the rows that the vertical pass needs.
    fn horizontal_pass(&mut self, canvas: &Canvas<'_>, source_range: Range<usize>, row_bytes: usize) {
        let strips = source_range.len().div_ceil(STRIP_ROWS);
        self.narrowed.resize(strips * STRIP_ROWS * row_bytes, 0);
        let padding = strip_column(canvas.background);
        let wanted = self.columns.source_range();
        let stored_bytes = 3 * canvas.columns.stored;
        self.strip.resize(wanted.end * STRIP_BYTES, 0);
        for (index, resampled) in self.narrowed.chunks_exact_mut(STRIP_ROWS * row_bytes).enumerate() {
            for row in 0..STRIP_ROWS {
                let source = source_range.start + index * STRIP_ROWS + row;
                if source < source_range.end {
                    let pixels = &canvas.pixels[source * stored_bytes..][..stored_bytes];
                    transpose_into_strip(pixels, wanted.clone(), row, &mut self.strip);
                }
            }
            convolve_strip(&self.strip, &padding, &self.columns, resampled);
        }
    }

    /// Runs the horizontal pass over a padding row.
    fn horizontal_pass_padding(&mut self, background: [u8; 3], row_bytes: usize) {
        self.padding_row.clear();
        if self.rows.windows.iter().all(|window| window.padding_weight == 0) {
            self.padding_row.resize(row_bytes, 0);
            return;
        }
        // All padding rows are equal, so one suffices; rounding must match the stored rows.
        for window in &self.columns.windows {
            let weights = self.columns.window_weights(window).iter();
            let total = weights.fold(window.padding_weight, |total, weight| total.wrapping_add(*weight));
            let mut pixel = [0; 3];
            convolve_row(&background, &[total], &[0; 3], 0, &mut pixel);
            self.padding_row.extend(pixel);
        }
    }
}

fn strip_column(pixel: [u8; 3]) -> [u8; STRIP_BYTES] {
    std::array::from_fn(|byte| pixel[byte % 3])
}

/// Writes a pixel row into row `row` of a strip, `[columns, STRIP_ROWS, 3]`.
fn transpose_into_strip(pixels: &[u8], columns: Range<usize>, row: usize, strip: &mut [u8]) {
    let source = pixels[3 * columns.start..3 * columns.end].chunks_exact(3);
    let target = strip[columns.start * STRIP_BYTES..].chunks_exact_mut(STRIP_BYTES);
    for (pixel, column) in source.zip(target) {
        column[3 * row..3 * row + 3].copy_from_slice(pixel);
    }
}

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
