//! Linear layer biases: fills rows before the product is added, and sums gradients over rows.
//!
//! An output row may be part of a wider row ([`Columns`]): attention queries, keys and values share a matrix,
//! even if they come from several weights.

use rayon::prelude::*;

use super::argument::values;
use super::operation::operation;
use super::parallel::{add_to, chunk_len, chunk_rows, sum_chunks};
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

operation! {
    /// Linear layer biases.
    pub trait Biases: Runtime {
        /// Writes the bias into a column range in every row.
        fn bias(&self, bias: &Tensor<Self>, y: &mut Tensor<Self>, columns: Columns) -> Result<()>;
        /// Accumulates the sums over rows in a column range.
        fn bias_backward(&self, dy: &Tensor<Self>, columns: Columns, d_bias: &mut Tensor<Self>) -> Result<()>;
        /// Copies `width` columns in every matrix row to columns in a second matrix.
        fn copy_columns(
            &self,
            x: &Tensor<Self>,
            from: Columns,
            width: usize,
            y: &mut Tensor<Self>,
            to: Columns,
        ) -> Result<()>;
    }
}

impl Biases for Cpu {
    fn bias(&self, bias: &Tensor<Self>, y: &mut Tensor<Self>, columns: Columns) -> Result<()> {
        let bias = self.operand(bias)?;
        self.update(y, |y| self.on_pool(|| fill(&bias, y, columns)))
    }

    fn bias_backward(&self, dy: &Tensor<Self>, columns: Columns, d_bias: &mut Tensor<Self>) -> Result<()> {
        let dy = self.operand(dy)?;
        self.update(d_bias, |d_bias| self.on_pool(|| backward(&dy, columns, d_bias)))
    }

    fn copy_columns(
        &self,
        x: &Tensor<Self>,
        from: Columns,
        width: usize,
        y: &mut Tensor<Self>,
        to: Columns,
    ) -> Result<()> {
        let x = self.operand(x)?;
        self.update(y, |y| {
            for (x, y) in x.chunks(from.stride).zip(y.chunks_mut(to.stride)) {
                y[to.first..to.first + width].copy_from_slice(&x[from.first..from.first + width]);
            }
        })
    }
}

/// Column range in a row-major matrix, without the range width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Columns {
    /// First column.
    pub first: usize,
    /// Number of elements in a complete matrix row.
    pub stride: usize,
}

values!(Columns);

impl Columns {
    /// Returns a range with all columns.
    #[must_use]
    pub const fn all(columns: usize) -> Self {
        Self { first: 0, stride: columns }
    }
}

/// Writes the bias into a column range in every row.
pub fn fill<F: Real>(bias: &[F], y: &mut [F], columns: Columns) {
    let until = columns.first + bias.len();
    assert!(until <= columns.stride && y.len().is_multiple_of(columns.stride), "columns lie in the rows");
    y.par_chunks_mut(chunk_len(columns.stride)).for_each(|rows| {
        for row in rows.chunks_mut(columns.stride) {
            row[columns.first..until].copy_from_slice(bias);
        }
    });
}

/// Accumulates the bias gradient: the sum over rows in a column range.
pub fn backward<F: Real>(dy: &[F], columns: Columns, d_bias: &mut [F]) {
    let until = columns.first + d_bias.len();
    assert!(until <= columns.stride && dy.len().is_multiple_of(columns.stride), "columns lie in the rows");
    let rows = dy.len() / columns.stride;
    // chunks depend only on the shape, and so does the summation order
    let chunk = chunk_rows(columns.stride);
    sum_chunks(rows.div_ceil(chunk), d_bias, |index, sums| {
        let rows = dy.chunks(columns.stride).skip(index * chunk).take(chunk);
        rows.for_each(|row| add_to(sums, &row[columns.first..until]));
    });
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::every_operation::{COLUMNS, LEN, ROWS, Results, changed, input};
    use super::super::finite_difference::{check, numbers, project};
    use super::*;
    use crate::ops::Device;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let (x, bias) = (input(d, LEN, 1)?, input(d, COLUMNS, 3)?);
        let columns = Columns { first: 1, stride: COLUMNS + 2 };
        let (from, to) = (Columns { first: 1, stride: COLUMNS }, Columns { first: 0, stride: COLUMNS });
        Ok(vec![
            ("bias", changed(d, ROWS * columns.stride, 4, |y| d.bias(&bias, y, columns))?),
            ("bias backward", changed(d, COLUMNS, 4, |y| d.bias_backward(&x, Columns::all(COLUMNS), y))?),
            ("copy columns", changed(d, LEN, 4, |y| d.copy_columns(&x, from, 2, y, to))?),
        ])
    }

    #[test]
    fn the_gradient_matches_finite_differences() {
        let (columns, bias, dy) = (Columns { first: 2, stride: 9 }, numbers(5, 1), numbers(9 * 4000, 2));
        let mut d_bias = vec![0.0; 5];
        backward(&dy, columns, &mut d_bias);
        check("bias", &bias, &d_bias, |bias| {
            let mut y = vec![0.0; dy.len()];
            fill(bias, &mut y, columns);
            project(&y, &dy)
        });
    }
}
