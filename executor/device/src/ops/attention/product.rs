//! Products of small tile matrices, whose operands stay in core caches.
//!
//! The right matrix is packed in *panels*: [`LANES`] columns for all rows, row by row, the last panel padded
//! with zeros. A block of [`ROWS`] rows and a result panel is summed in registers, in inner index order.
//! Multiplications and additions are fused (`IS_FUSED`) if the machine has such instructions; otherwise Rust
//! would call a function for each.

use crate::ops::parallel::filled_up;
use crate::ops::real::Real;

/// Number of columns in a panel.
pub(super) use crate::ops::parallel::LANES;

/// Number of rows in a block. With two registers a row, enough of the 16 registers remain for the operands.
pub(super) const ROWS: usize = 6;

/// Result for some rows and the columns in a panel.
pub(super) type Block<F> = [[F; LANES]; ROWS];

/// Rows inside a slice.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, F> {
    /// Elements, starting with the first row.
    pub(super) values: &'a [F],
    /// Number of elements from a row to the next.
    pub(super) stride: usize,
}

impl<'a, F: Real> Rows<'a, F> {
    /// Returns part of a row.
    #[inline(always)]
    fn part(&self, row: usize, len: usize) -> &'a [F] {
        &self.values[row * self.stride..][..len]
    }

    /// Packs rows with this width into panels.
    #[inline(always)]
    pub(super) fn pack(self, rows: usize, width: usize, panels: &mut Vec<[F; LANES]>) {
        panels.resize(rows * width.div_ceil(LANES), [F::ZERO; LANES]);
        for row in 0..rows {
            // one row after another, in memory order
            for (panel, part) in self.part(row, width).chunks(LANES).enumerate() {
                panels[panel * rows + row] = part.first_chunk().copied().unwrap_or_else(|| filled_up(part));
            }
        }
    }

    /// Returns rows `first..first + ROWS` with this width; rows from `end` on repeat the last row.
    #[inline(always)]
    pub(super) fn block(self, first: usize, end: usize, width: usize) -> [&'a [F]; ROWS] {
        let part = |row: usize| self.part((first + row).min(end - 1), width);
        [part(0), part(1), part(2), part(3), part(4), part(5)]
    }

    /// Multiplies the transposed columns `first..first + ROWS` by a panel.
    #[inline(always)]
    pub(super) fn transposed_times<const IS_FUSED: bool>(
        self,
        first: usize,
        panel: &[[F; LANES]],
    ) -> Block<F> {
        let mut sums = [[F::ZERO; LANES]; ROWS];
        for (left, right) in self.values.chunks_exact(self.stride).zip(panel) {
            let left: &[F; ROWS] = left[first..].first_chunk().expect("rows are padded");
            add_products::<F, IS_FUSED>(&mut sums, left, right);
        }
        sums
    }
}

/// Packs the transpose of packed rows with this width: a panel has a column for each of [`LANES`] rows.
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

/// Multiplies rows, starting at a column, by a panel.
#[inline(always)]
pub(super) fn times<F: Real, const IS_FUSED: bool>(
    rows: &[&[F]; ROWS],
    from: usize,
    panel: &[[F; LANES]],
) -> Block<F> {
    let from_column = |row: usize| rows[row][from..].iter();
    let mut sums = [[F::ZERO; LANES]; ROWS];
    // zipped slices need no bounds checks in the loop
    let columns = from_column(0).zip(from_column(1)).zip(from_column(2)).zip(from_column(3));
    let columns = columns.zip(from_column(4)).zip(from_column(5));
    for ((((((r0, r1), r2), r3), r4), r5), right) in columns.zip(panel) {
        add_products::<F, IS_FUSED>(&mut sums, &[*r0, *r1, *r2, *r3, *r4, *r5], right);
    }
    sums
}

/// Adds the products of a left matrix column and a right matrix row.
#[inline(always)]
fn add_products<F: Real, const IS_FUSED: bool>(sums: &mut Block<F>, left: &[F; ROWS], right: &[F; LANES]) {
    for (sums, &left) in sums.iter_mut().zip(left) {
        for lane in 0..LANES {
            let (right, sum) = (right[lane], &mut sums[lane]);
            *sum = if IS_FUSED { left.mul_add(right, *sum) } else { *sum + left * right };
        }
    }
}

/// Stores the first rows and columns from a block into rows in a slice, `(row, block element, target)`.
#[inline(always)]
pub(super) fn store<F: Real>(
    block: &Block<F>,
    (rows, columns): (usize, usize),
    (target, stride): (&mut [F], usize),
    put: impl Fn(usize, F, &mut F),
) {
    for row in 0..rows {
        let to = &mut target[row * stride..][..columns];
        // complete panels compile to vector instructions
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

/// Returns the elements of a panel row inside a slice.
#[inline(always)]
pub(super) fn lanes_mut<F>(values: &mut [F], at: usize) -> &mut [F; LANES] {
    values[at..].first_chunk_mut().expect("a whole panel")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(len: usize, seed: usize) -> Vec<f64> {
        (0..len).map(|at| ((at * 37 + seed * 11) % 23) as f64 / 7.0 - 1.5).collect()
    }

    /// Rows, columns and inner lengths that do and do not fill blocks and panels.
    const SHAPES: [[usize; 3]; 4] = [[1, 1, 1], [7, 20, 5], [6, 16, 16], [13, 33, 18]];

    fn check<const IS_FUSED: bool>() {
        for [rows, columns, inner] in SHAPES {
            let (left, right) = (numbers(rows * (inner + 2), 1), numbers(inner * columns, 2));
            let left = Rows { values: &left, stride: inner + 2 };
            let mut panels = vec![[9.0; LANES]; 3];
            Rows { values: &right, stride: columns }.pack(inner, columns, &mut panels);
            // the transposed left matrix, with room for the last block
            let stride = rows + ROWS;
            let mut transposed = vec![0.0; inner * stride];
            for (row, at) in (0..rows).flat_map(|row| (0..inner).map(move |at| (row, at))) {
                transposed[at * stride + row] = left.part(row, inner)[at];
            }
            let transposed = Rows { values: &transposed, stride };
            for (panel, first) in (0..columns.div_ceil(LANES)).zip((0..rows).step_by(ROWS).cycle()) {
                let panel_rows = &panels[panel * inner..][..inner];
                let block = times::<_, IS_FUSED>(&left.block(first, rows, inner), 0, panel_rows);
                let by_columns = transposed.transposed_times::<IS_FUSED>(first, panel_rows);
                for (row, lane) in
                    (first..rows.min(first + ROWS)).flat_map(|row| (0..LANES).map(move |l| (row, l)))
                {
                    let column = panel * LANES + lane;
                    let truth: f64 = if column < columns {
                        (0..inner).map(|at| left.part(row, inner)[at] * right[at * columns + column]).sum()
                    } else {
                        0.0
                    };
                    assert!((block[row - first][lane] - truth).abs() < 1e-12);
                    assert_eq!(block[row - first][lane], by_columns[row - first][lane]);
                }
            }
        }
    }

    #[test]
    fn products_match_the_definition_with_and_without_fused_operations() {
        check::<true>();
        check::<false>();
    }

    #[test]
    fn transposed_panels_have_a_column_for_each_row() {
        for [rows, width, _] in SHAPES {
            let values = numbers(rows * width, 3);
            let (mut panels, mut transposed) = (Vec::new(), Vec::new());
            Rows { values: &values, stride: width }.pack(rows, width, &mut panels);
            transpose((&panels, rows), width, &mut transposed);
            for (row, column) in (0..rows).flat_map(|row| (0..width).map(move |column| (row, column))) {
                let found = transposed[row / LANES * width + column][row % LANES];
                assert_eq!(found, values[row * width + column]);
            }
        }
    }
}
