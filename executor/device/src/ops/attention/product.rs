//! Products of the small matrices of a tile, whose operands stay in the caches of a core.
//!
//! The right matrix is packed in *panels*: [`LANES`] columns of all its rows, one row after another, the last
//! panel padded with zeros. A block of [`ROWS`] rows and a panel of the result is summed in registers, in the
//! order of the inner index. Sums are fused multiplications and additions.

use crate::ops::real::Real;

/// Columns of a panel: one or two vector registers.
pub(super) const LANES: usize = 16;
/// Rows of a block. With two registers a row, it leaves enough of 16 registers for the operands.
pub(super) const ROWS: usize = 6;

/// Result of some rows and the columns of a panel.
pub(super) type Block<F> = [[F; LANES]; ROWS];

/// Rows inside a slice.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, F> {
    /// Starts with the first row.
    pub(super) values: &'a [F],
    /// Elements from one row to the next.
    pub(super) stride: usize,
}

impl<'a, F: Real> Rows<'a, F> {
    /// Part of a row.
    #[inline(always)]
    fn part(&self, row: usize, len: usize) -> &'a [F] {
        &self.values[row * self.stride..][..len]
    }

    /// Packs rows of this width into panels, times a factor.
    #[inline(always)]
    pub(super) fn pack(self, rows: usize, width: usize, factor: F, panels: &mut Vec<[F; LANES]>) {
        panels.resize(rows * width.div_ceil(LANES), [F::ZERO; LANES]);
        for row in 0..rows {
            // one row after another, as they lie in memory
            for (panel, part) in self.part(row, width).chunks(LANES).enumerate() {
                scale_into(part, factor, &mut panels[panel * rows + row]);
            }
        }
    }

    /// Multiplies rows `first..first + ROWS`, of which those from `end` on repeat the last one, by a panel.
    #[inline(always)]
    pub(super) fn times(self, first: usize, end: usize, from: usize, panel: &[[F; LANES]]) -> Block<F> {
        let part = |row: usize| &self.part((first + row).min(end - 1), from + panel.len())[from..];
        let mut sums = [[F::ZERO; LANES]; ROWS];
        // zipped slices need no checks of bounds in the loop
        let rows = part(0).iter().zip(part(1)).zip(part(2)).zip(part(3)).zip(part(4)).zip(part(5));
        for ((((((a, b), c), d), e), f), right) in rows.zip(panel) {
            add_products(&mut sums, &[*a, *b, *c, *d, *e, *f], right);
        }
        sums
    }

    /// Multiplies the transpose of columns `first..first + ROWS` by a panel.
    #[inline(always)]
    pub(super) fn transposed_times(self, first: usize, panel: &[[F; LANES]]) -> Block<F> {
        let mut sums = [[F::ZERO; LANES]; ROWS];
        for (left, right) in self.values.chunks_exact(self.stride).zip(panel) {
            let left: &[F; ROWS] = left[first..].first_chunk().expect("rows are padded");
            add_products(&mut sums, left, right);
        }
        sums
    }
}

/// Packs the transpose of packed rows of this width: a panel has a column for each of [`LANES`] rows.
#[inline(always)]
pub(super) fn transpose<F: Real>(
    (panels, rows): (&[[F; LANES]], usize),
    width: usize,
    transposed: &mut Vec<[F; LANES]>,
) {
    transposed.resize(rows.div_ceil(LANES) * width, [F::ZERO; LANES]);
    for (group, transposed) in transposed.chunks_exact_mut(width).enumerate() {
        for (panel, transposed) in panels.chunks_exact(rows).zip(transposed.chunks_mut(LANES)) {
            let mut square = [[F::ZERO; LANES]; LANES];
            for (square, &row) in square.iter_mut().zip(&panel[group * LANES..]) {
                *square = row;
            }
            for (column, transposed) in transposed.iter_mut().enumerate() {
                for lane in 0..LANES {
                    transposed[lane] = square[lane][column];
                }
            }
        }
    }
}

/// Copies a row, times a factor, and zeros if it has fewer elements.
#[inline(always)]
fn scale_into<F: Real>(row: &[F], factor: F, to: &mut [F; LANES]) {
    if let Some(row) = row.first_chunk::<LANES>() {
        for lane in 0..LANES {
            to[lane] = row[lane] * factor;
        }
    } else {
        *to = [F::ZERO; LANES];
        for (to, &value) in to.iter_mut().zip(row) {
            *to = value * factor;
        }
    }
}

/// Adds the products of a column of the left matrix and a row of the right one.
#[inline(always)]
fn add_products<F: Real>(sums: &mut Block<F>, left: &[F; ROWS], right: &[F; LANES]) {
    for (sums, &left) in sums.iter_mut().zip(left) {
        for lane in 0..LANES {
            sums[lane] = left.mul_add(right[lane], sums[lane]);
        }
    }
}

/// Puts the first rows and columns of a block into rows of a slice, `(row, element of the block, target)`.
#[inline(always)]
pub(super) fn store<F: Real>(
    block: &Block<F>,
    (rows, columns): (usize, usize),
    (target, stride): (&mut [F], usize),
    put: impl Fn(usize, F, &mut F),
) {
    for row in 0..rows {
        let to = &mut target[row * stride..][..columns];
        // whole panels become vector instructions
        if let Some(to) = to.first_chunk_mut::<LANES>() {
            for lane in 0..LANES {
                put(row, block[row][lane], &mut to[lane]);
            }
        } else {
            for (to, &new) in to.iter_mut().zip(&block[row]) {
                put(row, new, to);
            }
        }
    }
}

/// Elements of a panel's row inside a slice.
#[inline(always)]
pub(super) fn lanes_mut<F>(values: &mut [F], at: usize) -> &mut [F; LANES] {
    values[at..].first_chunk_mut().expect("a whole panel")
}
