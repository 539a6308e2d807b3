//! Biases of linear layers: fills rows before the product is added, and sums gradients over rows.
//!
//! A row of the output may be part of a wider row ([`Columns`]): queries, keys and values of an attention
//! share one matrix, even if they come from several weights.

use rayon::prelude::*;

use super::parallel::{add_to, chunk_len, chunk_rows, sum_chunks};
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

/// Biases of linear layers.
pub trait Biases: Runtime {
    /// Writes the bias into every row of a range of columns.
    fn bias(&self, bias: &Tensor<Self>, y: &mut Tensor<Self>, columns: Columns) -> Result<()>;
    /// Accumulates the sums over rows of a range of columns.
    fn bias_backward(&self, dy: &Tensor<Self>, columns: Columns, d_bias: &mut Tensor<Self>) -> Result<()>;
    /// Copies `width` columns of every row of a matrix to columns of another one.
    fn copy_columns(
        &self,
        x: &Tensor<Self>,
        from: Columns,
        width: usize,
        y: &mut Tensor<Self>,
        to: Columns,
    ) -> Result<()>;
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

/// Range of columns of a row-major matrix, without its width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Columns {
    /// First column.
    pub first: usize,
    /// Elements of a row of the whole matrix.
    pub stride: usize,
}

impl Columns {
    /// Makes a range of all columns.
    #[must_use]
    pub const fn all(columns: usize) -> Self {
        Self { first: 0, stride: columns }
    }
}

/// Writes the bias into every row of a range of columns.
pub fn fill<F: Real>(bias: &[F], y: &mut [F], columns: Columns) {
    let until = columns.first + bias.len();
    assert!(until <= columns.stride && y.len().is_multiple_of(columns.stride), "columns lie in the rows");
    y.par_chunks_mut(chunk_len(columns.stride)).for_each(|rows| {
        for row in rows.chunks_mut(columns.stride) {
            row[columns.first..until].copy_from_slice(bias);
        }
    });
}

/// Accumulates the gradient of the bias: the sum over rows of a range of columns.
pub fn backward<F: Real>(dy: &[F], columns: Columns, d_bias: &mut [F]) {
    let until = columns.first + d_bias.len();
    assert!(until <= columns.stride && dy.len().is_multiple_of(columns.stride), "columns lie in the rows");
    let rows = dy.len() / columns.stride;
    // chunks depend on the shape alone, so the order of the sum does
    let chunk = chunk_rows(columns.stride);
    sum_chunks(rows.div_ceil(chunk), d_bias, |index, sums| {
        let rows = dy.chunks(columns.stride).skip(index * chunk).take(chunk);
        rows.for_each(|row| add_to(sums, &row[columns.first..until]));
    });
}

#[cfg(test)]
mod tests {
    use super::super::finite_difference::{check, numbers, project};
    use super::*;

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
