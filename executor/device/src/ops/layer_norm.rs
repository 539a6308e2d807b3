//! Row layer normalization: `y = (x - mean) / sqrt(variance + epsilon) * weight + bias`.
//!
//! # Source
//! Ba, Kiros, Hinton: "Layer Normalization", 2016, arXiv:1607.06450.

use rayon::prelude::*;

use super::operation::operation;
use super::parallel::{chunk_len, chunk_rows, dot, sum, sum_chunks, vectorized};
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

operation! {
    /// Normalization to mean 0 and variance 1.
    pub trait LayerNorm: Runtime {
        /// Normalizes rows to mean 0 and variance 1; `parameters` contains weight and bias.
        ///
        /// - `statistics`: `f32`, mean and inverse deviation for every row
        fn layer_norm(
            &self,
            x: &Tensor<Self>,
            parameters: (&Tensor<Self>, &Tensor<Self>),
            epsilon: f64,
            y: &mut Tensor<Self>,
            statistics: &mut Tensor<Self>,
        ) -> Result<()>;
        /// Accumulates the requested gradients.
        fn layer_norm_backward(
            &self,
            dy: &Tensor<Self>,
            x: &Tensor<Self>,
            weight: &Tensor<Self>,
            statistics: &Tensor<Self>,
            dx: Option<&mut Tensor<Self>>,
            parameters: Option<(&mut Tensor<Self>, &mut Tensor<Self>)>,
        ) -> Result<()>;
    }
}

impl LayerNorm for Cpu {
    fn layer_norm(
        &self,
        x: &Tensor<Self>,
        (weight, bias): (&Tensor<Self>, &Tensor<Self>),
        epsilon: f64,
        y: &mut Tensor<Self>,
        statistics: &mut Tensor<Self>,
    ) -> Result<()> {
        let (x, weight, bias) = (self.operand(x)?, self.operand(weight)?, self.operand(bias)?);
        let statistics = statistics.f32_mut();
        self.update(y, |y| self.on_pool(|| forward(&x, &weight, &bias, epsilon, y, statistics)))
    }

    fn layer_norm_backward(
        &self,
        dy: &Tensor<Self>,
        x: &Tensor<Self>,
        weight: &Tensor<Self>,
        statistics: &Tensor<Self>,
        dx: Option<&mut Tensor<Self>>,
        parameters: Option<(&mut Tensor<Self>, &mut Tensor<Self>)>,
    ) -> Result<()> {
        let (dy, x, weight) = (self.operand(dy)?, self.operand(x)?, self.operand(weight)?);
        let (d_weight, d_bias) = parameters.unzip();
        self.update_if(dx, |dx| {
            self.update_if(d_weight, |d_weight| {
                self.update_if(d_bias, |d_bias| {
                    let parameters = d_weight.zip(d_bias);
                    self.on_pool(|| backward(&dy, &x, &weight, statistics.f32(), dx, parameters));
                    Ok(())
                })
            })
        })
    }
}

/// Writes the normalized rows and, for backward, mean and 1 / standard deviation for every row.
///
/// - `x`, `y`: `[rows, columns]`; `weight`, `bias`: `[columns]`; `statistics`: `[rows, 2]`
pub fn forward<F: Real>(x: &[F], weight: &[F], bias: &[F], epsilon: f64, y: &mut [F], statistics: &mut [F]) {
    let columns = weight.len();
    assert!(x.len() * 2 == statistics.len() * columns && y.len() == x.len(), "shapes agree");
    let (over, epsilon) = (F::from_f64(1.0 / columns as f64), F::from_f64(epsilon));
    let chunk = chunk_len(columns);
    let outputs = y.par_chunks_mut(chunk).zip(statistics.par_chunks_mut(2 * chunk_rows(columns)));
    outputs.zip(x.par_chunks(chunk)).for_each(|((y, statistics), x)| {
        vectorized(
            #[inline(always)]
            || {
                let rows = y.chunks_mut(columns).zip(x.chunks(columns)).zip(statistics.chunks_mut(2));
                for ((y, x), statistics) in rows {
                    let mean = sum(x) * over;
                    // two passes: subtracting the mean first avoids the cancellation of
                    // `mean(x^2) - mean(x)^2`
                    for (y, &x) in y.iter_mut().zip(x) {
                        *y = x - mean;
                    }
                    let inverse = F::ONE / (dot(y, y) * over + epsilon).sqrt();
                    for ((y, &weight), &bias) in y.iter_mut().zip(weight).zip(bias) {
                        *y = *y * inverse * weight + bias;
                    }
                    statistics.copy_from_slice(&[mean, inverse]);
                }
            },
        );
    });
}

/// Accumulates the gradients of `x`, weight and bias, each only if requested.
pub fn backward<F: Real>(
    dy: &[F],
    x: &[F],
    weight: &[F],
    statistics: &[F],
    dx: Option<&mut [F]>,
    parameters: Option<(&mut [F], &mut [F])>,
) {
    let columns = weight.len();
    assert!(x.len() * 2 == statistics.len() * columns && dy.len() == x.len(), "shapes agree");
    if let Some(dx) = dx {
        input_gradient(dy, x, weight, statistics, dx);
    }
    let Some((d_weight, d_bias)) = parameters else { return };
    let rows = chunk_rows(columns);
    // one pass over the rows for both sums
    let mut both = vec![F::ZERO; 2 * columns];
    sum_chunks((x.len() / columns).div_ceil(rows), &mut both, |index, sums| {
        vectorized(
            #[inline(always)]
            || {
                let (weights, biases) = sums.split_at_mut(columns);
                let inputs = dy.chunks(columns).zip(x.chunks(columns)).zip(statistics.chunks(2));
                for ((dy, x), statistics) in inputs.skip(index * rows).take(rows) {
                    for (((weight, bias), &dy), &x) in weights.iter_mut().zip(&mut *biases).zip(dy).zip(x) {
                        *weight += dy * (x - statistics[0]) * statistics[1];
                        *bias += dy;
                    }
                }
            },
        );
    });
    super::parallel::add_to(d_weight, &both[..columns]);
    super::parallel::add_to(d_bias, &both[columns..]);
}

/// Computes the input gradient with `n = (x - mean) / deviation`:
/// `dx = (dn - mean(dn) - n mean(dn n)) / deviation`, `dn = dy weight`.
fn input_gradient<F: Real>(dy: &[F], x: &[F], weight: &[F], statistics: &[F], dx: &mut [F]) {
    let columns = weight.len();
    let over = F::from_f64(1.0 / columns as f64);
    let chunk = chunk_len(columns);
    let inputs = dy.par_chunks(chunk).zip(x.par_chunks(chunk));
    let inputs = inputs.zip(statistics.par_chunks(2 * chunk_rows(columns)));
    dx.par_chunks_mut(chunk).zip(inputs).for_each_init(
        || (vec![F::ZERO; columns], vec![F::ZERO; columns]),
        |(scaled, normal), (dx, ((dy, x), statistics))| {
            vectorized(
                #[inline(always)]
                || {
                    let rows = dy.chunks(columns).zip(x.chunks(columns)).zip(statistics.chunks(2));
                    for (dx, ((dy, x), statistics)) in dx.chunks_mut(columns).zip(rows) {
                        let (mean, inverse) = (statistics[0], statistics[1]);
                        for ((scaled, &dy), &weight) in scaled.iter_mut().zip(dy).zip(weight) {
                            *scaled = dy * weight;
                        }
                        for (normal, &x) in normal.iter_mut().zip(x) {
                            *normal = (x - mean) * inverse;
                        }
                        let (along, average) = (dot(scaled, normal) * over, sum(scaled) * over);
                        for ((dx, &scaled), &normal) in dx.iter_mut().zip(&*scaled).zip(&*normal) {
                            *dx += (scaled - average - normal * along) * inverse;
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
        let (x, dy) = (input(d, LEN, 1)?, input(d, LEN, 2)?);
        let (weight, bias) = (input(d, COLUMNS, 3)?, input(d, COLUMNS, 4)?);
        let mut statistics = d.alloc_as(Dtype::F32, 2 * ROWS)?;
        let run = |y: &mut Tensor<D>| d.layer_norm(&x, (&weight, &bias), 1e-5, y, &mut statistics);
        let mut all = vec![("layer norm", changed(d, LEN, 5, run)?)];
        let (mut d_weight, mut d_bias) = (input(d, COLUMNS, 6)?, input(d, COLUMNS, 7)?);
        let run = |dx: &mut Tensor<D>| {
            let parameters = Some((&mut d_weight, &mut d_bias));
            d.layer_norm_backward(&dy, &x, &weight, &statistics, Some(dx), parameters)
        };
        all.push(("layer norm dx", changed(d, LEN, 5, run)?));
        all.push(("layer norm d_weight", d.download(&d_weight)?));
        all.push(("layer norm d_bias", d.download(&d_bias)?));
        Ok(all)
    }

    #[test]
    fn gradients_match_finite_differences() {
        for (rows, columns) in [(3, 37), (600, 32), (2, 2)] {
            let (x, weight, bias) = (numbers(rows * columns, 1), numbers(columns, 2), numbers(columns, 3));
            let dy = numbers(x.len(), 4);
            let loss = |x: &[f64], weight: &[f64], bias: &[f64]| {
                let (mut y, mut statistics) = (vec![f64::NAN; x.len()], vec![f64::NAN; 2 * rows]);
                forward(x, weight, bias, 1e-2, &mut y, &mut statistics);
                (project(&y, &dy), statistics)
            };
            let (_, statistics) = loss(&x, &weight, &bias);
            let (mut dx, mut d_weight, mut d_bias) =
                (vec![0.0; x.len()], vec![0.0; columns], vec![0.0; columns]);
            let parameters = Some((&mut d_weight[..], &mut d_bias[..]));
            backward(&dy, &x, &weight, &statistics, Some(&mut dx), parameters);
            check("x", &x, &dx, |x| loss(x, &weight, &bias).0);
            check("weight", &weight, &d_weight, |weight| loss(&x, weight, &bias).0);
            check("bias", &bias, &d_bias, |bias| loss(&x, &weight, bias).0);
        }
    }
}
