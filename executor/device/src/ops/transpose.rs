//! Transposes the last two axes, `[batch, rows, columns]` to `[batch, columns, rows]`.
//!
//! Convolution kernels have taps last in checkpoints and first in products.

use super::operation::operation;
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

operation! {
    /// Exchange of axes.
    pub trait Transpose: Runtime {
        /// Exchanges the last two axes, `[.., rows, columns]`, and writes or accumulates.
        fn transpose(
            &self,
            x: &Tensor<Self>,
            rows: usize,
            columns: usize,
            is_added: bool,
            y: &mut Tensor<Self>,
        ) -> Result<()>;
    }
}

impl Transpose for Cpu {
    fn transpose(
        &self,
        x: &Tensor<Self>,
        rows: usize,
        columns: usize,
        is_added: bool,
        y: &mut Tensor<Self>,
    ) -> Result<()> {
        // on the calling thread: only small convolution kernels are transposed
        let x = self.operand(x)?;
        self.update(y, |y| transpose(&x, rows, columns, is_added, y))
    }
}

/// Writes the transposed matrices, or accumulates them.
pub fn transpose<F: Real>(x: &[F], rows: usize, columns: usize, is_added: bool, y: &mut [F]) {
    assert!(x.len() == y.len() && x.len().is_multiple_of((rows * columns).max(1)), "shapes agree");
    for (x, y) in x.chunks(rows * columns).zip(y.chunks_mut(rows * columns)) {
        for row in 0..rows {
            for column in 0..columns {
                let (value, place) = (x[row * columns + column], &mut y[column * rows + row]);
                *place = if is_added { *place + value } else { value };
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::every_operation::{COLUMNS, LEN, ROWS, Results, changed, input};
    use super::super::finite_difference::numbers;
    use super::*;
    use crate::ops::Device;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let x = input(d, LEN, 1)?;
        Ok(vec![("transpose", changed(d, LEN, 4, |y| d.transpose(&x, ROWS, COLUMNS, true, y))?)])
    }

    #[test]
    fn transposing_twice_is_the_identity() {
        let x = numbers(4 * 3 * 5, 1);
        let (mut y, mut back) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        transpose(&x, 3, 5, false, &mut y);
        assert_eq!((y[0], y[1], y[3]), (x[0], x[5], x[1]));
        transpose(&y, 5, 3, false, &mut back);
        assert_eq!(x, back);
        transpose(&y, 5, 3, true, &mut back);
        assert_eq!(back[17], 2.0 * x[17]);
    }
}
