//! `InternViT` layer scale: adds a branch with a learned scale per column, `y = residual + scale x`.

use rayon::prelude::*;

use super::operation::operation;
use super::parallel::{chunk_len, chunk_rows, sum_chunks, vectorized};
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

operation! {
    /// Learned column scales.
    pub trait LayerScale: Runtime {
        /// Adds `scale x`, with a scale per column.
        fn layer_scale(&self, x: &Tensor<Self>, scale: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()>;
        /// Writes `dx` and accumulates `d_scale`.
        fn layer_scale_backward(
            &self,
            dy: &Tensor<Self>,
            x: &Tensor<Self>,
            scale: &Tensor<Self>,
            dx: &mut Tensor<Self>,
            d_scale: Option<&mut Tensor<Self>>,
        ) -> Result<()>;
    }
}

impl LayerScale for Cpu {
    fn layer_scale(&self, x: &Tensor<Self>, scale: &Tensor<Self>, y: &mut Tensor<Self>) -> Result<()> {
        let (x, scale) = (self.operand(x)?, self.operand(scale)?);
        self.update(y, |y| self.on_pool(|| forward(&x, &scale, y)))
    }

    fn layer_scale_backward(
        &self,
        dy: &Tensor<Self>,
        x: &Tensor<Self>,
        scale: &Tensor<Self>,
        dx: &mut Tensor<Self>,
        d_scale: Option<&mut Tensor<Self>>,
    ) -> Result<()> {
        let (dy, x, scale) = (self.operand(dy)?, self.operand(x)?, self.operand(scale)?);
        self.update_if(d_scale, |d_scale| {
            self.update(dx, |dx| self.on_pool(|| backward(&dy, &x, &scale, dx, d_scale)))
        })
    }
}

/// Adds `scale x` to `y`, row by row.
pub fn forward<F: Real>(x: &[F], scale: &[F], y: &mut [F]) {
    let columns = scale.len();
    assert_eq!(x.len(), y.len(), "the residual has the shape of what is added");
    let chunk = chunk_len(columns);
    y.par_chunks_mut(chunk).zip(x.par_chunks(chunk)).for_each(|(y, x)| {
        vectorized(
            #[inline(always)]
            || {
                for (y, x) in y.chunks_mut(columns).zip(x.chunks(columns)) {
                    for ((y, &x), &scale) in y.iter_mut().zip(x).zip(scale) {
                        *y += scale * x;
                    }
                }
            },
        );
    });
}

/// Writes the gradient of `x` and accumulates the scale gradient, if requested. The residual gradient is `dy`
/// itself.
pub fn backward<F: Real>(dy: &[F], x: &[F], scale: &[F], dx: &mut [F], d_scale: Option<&mut [F]>) {
    let columns = scale.len();
    assert!(x.len() == dy.len() && dx.len() == dy.len(), "gradients have the shapes of what they are of");
    let chunk = chunk_len(columns);
    dx.par_chunks_mut(chunk).zip(dy.par_chunks(chunk)).for_each(|(dx, dy)| {
        vectorized(
            #[inline(always)]
            || {
                for (dx, dy) in dx.chunks_mut(columns).zip(dy.chunks(columns)) {
                    for ((dx, &dy), &scale) in dx.iter_mut().zip(dy).zip(scale) {
                        *dx = scale * dy;
                    }
                }
            },
        );
    });
    let Some(d_scale) = d_scale else { return };
    let rows = chunk_rows(columns);
    sum_chunks((x.len() / columns).div_ceil(rows), d_scale, |index, sums| {
        let rows = x.chunks(columns).zip(dy.chunks(columns)).skip(index * rows).take(rows);
        rows.for_each(|(x, dy)| {
            for ((sum, &x), &dy) in sums.iter_mut().zip(x).zip(dy) {
                *sum += x * dy;
            }
        });
    });
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::every_operation::{COLUMNS, LEN, Results, changed, input};
    use super::super::finite_difference::{check, numbers, project};
    use super::*;
    use crate::ops::Device;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let (x, scale) = (input(d, LEN, 1)?, input(d, COLUMNS, 3)?);
        let mut all = vec![("column scale", changed(d, LEN, 4, |y| d.layer_scale(&x, &scale, y))?)];
        let (dy, mut d_scale) = (input(d, LEN, 6)?, input(d, COLUMNS, 5)?);
        let run = |dx: &mut Tensor<D>| d.layer_scale_backward(&dy, &x, &scale, dx, Some(&mut d_scale));
        all.push(("column scale dx", changed(d, LEN, 4, run)?));
        all.push(("column scale d_scale", d.download(&d_scale)?));
        Ok(all)
    }

    #[test]
    fn gradients_match_finite_differences() {
        let (x, scale, dy) = (numbers(7 * 3000, 1), numbers(7, 2), numbers(7 * 3000, 3));
        let (mut dx, mut d_scale) = (vec![0.0; x.len()], vec![0.0; 7]);
        backward(&dy, &x, &scale, &mut dx, Some(&mut d_scale));
        let loss = |x: &[f64], scale: &[f64]| {
            let mut y = numbers(x.len(), 4);
            forward(x, scale, &mut y);
            project(&y, &dy)
        };
        check("x", &x, &dx, |x| loss(x, &scale));
        check("scale", &scale, &d_scale, |scale| loss(&x, scale));
    }
}
