//! Row `RMSNorm`: `y = x / sqrt(mean(x^2) + epsilon) * (weight + offset)`.
//!
//! The offset is 0, or 1 if weights are stored as `w - 1`.
//!
//! # Source
//! Zhang, Sennrich: "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467.

use rayon::prelude::*;

use super::operation::operation;
use super::parallel::{chunk_len, chunk_rows, dot, sum_chunks, vectorized};
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

operation! {
    /// Normalization by the root mean square.
    pub trait RmsNorm: Runtime {
        /// Normalizes rows by the root mean square.
        ///
        /// - `weight`: weight for every column, and the offset added to it
        /// - `inverse`: `f32`, the inverse root mean square for every row
        fn rms_norm(
            &self,
            x: &Tensor<Self>,
            weight: (&Tensor<Self>, f64),
            epsilon: f64,
            y: &mut Tensor<Self>,
            inverse: &mut Tensor<Self>,
        ) -> Result<()>;
        /// Accumulates the requested gradients.
        fn rms_norm_backward(
            &self,
            dy: &Tensor<Self>,
            x: &Tensor<Self>,
            weight: (&Tensor<Self>, f64),
            inverse: &Tensor<Self>,
            dx: Option<&mut Tensor<Self>>,
            d_weight: Option<&mut Tensor<Self>>,
        ) -> Result<()>;
    }
}

impl RmsNorm for Cpu {
    fn rms_norm(
        &self,
        x: &Tensor<Self>,
        (weight, offset): (&Tensor<Self>, f64),
        epsilon: f64,
        y: &mut Tensor<Self>,
        inverse: &mut Tensor<Self>,
    ) -> Result<()> {
        let (x, weight, inverse) = (self.operand(x)?, self.operand(weight)?, inverse.f32_mut());
        self.update(y, |y| self.on_pool(|| forward(&x, (&weight, offset), epsilon, y, inverse)))
    }

    fn rms_norm_backward(
        &self,
        dy: &Tensor<Self>,
        x: &Tensor<Self>,
        (weight, offset): (&Tensor<Self>, f64),
        inverse: &Tensor<Self>,
        dx: Option<&mut Tensor<Self>>,
        d_weight: Option<&mut Tensor<Self>>,
    ) -> Result<()> {
        let (dy, x, weight) = (self.operand(dy)?, self.operand(x)?, self.operand(weight)?);
        self.update_if(dx, |dx| {
            self.update_if(d_weight, |d_weight| {
                self.on_pool(|| backward(&dy, &x, (&weight, offset), inverse.f32(), dx, d_weight));
                Ok(())
            })
        })
    }
}

/// Writes the normalized rows and, for backward, 1 / root mean square for every row.
///
/// - `x`, `y`: `[rows, columns]`, `weight`: `[columns]`, `inverse`: `[rows]`
pub fn forward<F: Real>(
    x: &[F],
    (weight, offset): (&[F], f64),
    epsilon: f64,
    y: &mut [F],
    inverse: &mut [F],
) {
    let columns = weight.len();
    assert!(x.len() == inverse.len() * columns && y.len() == x.len(), "shapes agree");
    let (mean, epsilon) = (F::from_f64(1.0 / columns as f64), F::from_f64(epsilon));
    let (rows, offset) = (chunk_rows(columns), F::from_f64(offset));
    let chunks = y.par_chunks_mut(chunk_len(columns)).zip(inverse.par_chunks_mut(rows));
    chunks.zip(x.par_chunks(chunk_len(columns))).for_each(|((y, inverse), x)| {
        vectorized(
            #[inline(always)]
            || {
                let rows = y.chunks_mut(columns).zip(x.chunks(columns)).zip(inverse);
                for ((y, x), inverse) in rows {
                    *inverse = F::ONE / (dot(x, x) * mean + epsilon).sqrt();
                    for ((y, &x), &weight) in y.iter_mut().zip(x).zip(weight) {
                        *y = x * *inverse * (weight + offset);
                    }
                }
            },
        );
    });
}

/// Accumulates the gradients of `x` and `weight`, each only if requested.
pub fn backward<F: Real>(
    dy: &[F],
    x: &[F],
    (weight, offset): (&[F], f64),
    inverse: &[F],
    dx: Option<&mut [F]>,
    d_weight: Option<&mut [F]>,
) {
    let columns = weight.len();
    assert!(x.len() == inverse.len() * columns && dy.len() == x.len(), "shapes agree");
    if let Some(dx) = dx {
        input_gradient(dy, x, (weight, F::from_f64(offset)), inverse, dx);
    }
    let Some(d_weight) = d_weight else { return };
    let rows = chunk_rows(columns);
    sum_chunks(inverse.len().div_ceil(rows), d_weight, |index, sums| {
        vectorized(
            #[inline(always)]
            || {
                let rows =
                    dy.chunks(columns).zip(x.chunks(columns)).zip(inverse).skip(index * rows).take(rows);
                for ((dy, x), &inverse) in rows {
                    for ((sum, &dy), &x) in sums.iter_mut().zip(dy).zip(x) {
                        *sum += dy * x * inverse;
                    }
                }
            },
        );
    });
}

/// Computes the input gradient with `n = x / rms`: `dx = (dn - n mean(dn n)) / rms`, where
/// `dn = dy (weight + offset)`.
fn input_gradient<F: Real>(dy: &[F], x: &[F], (weight, offset): (&[F], F), inverse: &[F], dx: &mut [F]) {
    let columns = weight.len();
    let mean = F::from_f64(1.0 / columns as f64);
    let (chunk, rows) = (chunk_len(columns), chunk_rows(columns));
    let inputs = dy.par_chunks(chunk).zip(x.par_chunks(chunk)).zip(inverse.par_chunks(rows));
    dx.par_chunks_mut(chunk).zip(inputs).for_each_init(
        || vec![F::ZERO; columns],
        |scaled, (dx, ((dy, x), inverse))| {
            vectorized(
                #[inline(always)]
                || {
                    let rows = dy.chunks(columns).zip(x.chunks(columns)).zip(inverse);
                    for (dx, ((dy, x), &inverse)) in dx.chunks_mut(columns).zip(rows) {
                        for ((scaled, &dy), &weight) in scaled.iter_mut().zip(dy).zip(weight) {
                            *scaled = dy * (weight + offset);
                        }
                        // `n = x * inverse`, so both factors in `n mean(dn n)` contribute an `inverse`
                        let along = dot(scaled, x) * mean * inverse * inverse;
                        for ((dx, &scaled), &x) in dx.iter_mut().zip(&*scaled).zip(x) {
                            *dx += (scaled - x * along) * inverse;
                        }
                    }
                },
            );
        },
    );
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::every_operation::{COLUMNS, LEN, ROWS, Results, changed, input};
    use super::super::finite_difference::{check, numbers, project};
    use super::*;
    use crate::ops::Device;
    use crate::runtime::Dtype;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let (x, dy, weight) = (input(d, LEN, 1)?, input(d, LEN, 2)?, input(d, COLUMNS, 3)?);
        let mut inverse = d.alloc_as(Dtype::F32, ROWS)?;
        let run = |y: &mut Tensor<D>| d.rms_norm(&x, (&weight, 1.0), 1e-5, y, &mut inverse);
        let mut all = vec![("rms norm", changed(d, LEN, 5, run)?)];
        let mut d_weight = input(d, COLUMNS, 6)?;
        let run = |dx: &mut Tensor<D>| {
            d.rms_norm_backward(&dy, &x, (&weight, 1.0), &inverse, Some(dx), Some(&mut d_weight))
        };
        all.push(("rms norm dx", changed(d, LEN, 5, run)?));
        all.push(("rms norm d_weight", d.download(&d_weight)?));
        Ok(all)
    }

    #[test]
    fn gradients_match_finite_differences() {
        for (rows, columns, offset) in [(3, 37, 0.0), (600, 32, 1.0), (2, 1, 0.0)] {
            let (x, weight, dy) =
                (numbers(rows * columns, 1), numbers(columns, 2), numbers(rows * columns, 3));
            let loss = |x: &[f64], weight: &[f64]| {
                let (mut y, mut inverse) = (vec![f64::NAN; x.len()], vec![f64::NAN; rows]);
                forward(x, (weight, offset), 1e-2, &mut y, &mut inverse);
                (project(&y, &dy), inverse)
            };
            let (_, inverse) = loss(&x, &weight);
            let (mut dx, mut d_weight) = (vec![0.0; x.len()], vec![0.0; columns]);
            backward(&dy, &x, (&weight, offset), &inverse, Some(&mut dx), Some(&mut d_weight));
            check("x", &x, &dx, |x| loss(x, &weight).0);
            check("weight", &weight, &d_weight, |weight| loss(&x, weight).0);
        }
    }
}
