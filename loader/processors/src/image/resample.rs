//! Resizes images exactly as Pillow's `Image.resize`: horizontally, rounded to bytes, then vertically.
//!
//! Rows are passed on as soon as they are computed, so that normalization and layout need no second image.
//! Padding around an image is never stored, and pixels outside a crop are never computed.

use std::ops::Range;

use super::RgbView;
use super::convolve::{STRIP_BYTES, STRIP_ROWS, convolve_row, convolve_strip};
use super::filter::{AxisExtent, AxisWeights, Filter};

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
