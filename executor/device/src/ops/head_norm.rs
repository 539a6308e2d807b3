//! `RMSNorm` for every query or key head, in place: `y = x / sqrt(mean(x^2) + epsilon) * (weight + offset)`.
//!
//! Heads are neighboring columns in wide rows, and share one weight; remaining columns are unchanged.
//!
//! # Source
//! Dehghani et al.: "Scaling Vision Transformers to 22 Billion Parameters", 2023, arXiv:2302.05442, for
//! normalized queries and keys; `RMSNorm` as in Qwen3 and Gemma 3.

use rayon::prelude::*;

use super::argument::values;
use super::operation::operation;
use super::parallel::{chunk_len, chunk_rows, dot, sum_chunks, vectorized};
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

/// Head layout within a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadColumns {
    /// First column in the first head.
    pub first: usize,
    /// Number of heads.
    pub heads: usize,
    /// Head width.
    pub head_dim: usize,
    /// Number of elements in a row.
    pub stride: usize,
}

values!(HeadColumns);

impl HeadColumns {
    /// Returns the number of rows in a tensor with this many elements.
    ///
    /// # Panics
    /// If heads exceed the rows, or the elements are not complete rows.
    #[must_use]
    pub fn rows(&self, elements: usize) -> usize {
        let Self { first, heads, head_dim, stride } = *self;
        assert!(first + heads * head_dim <= stride, "heads lie in the rows");
        assert!(heads * head_dim > 0, "there are heads");
        assert!(elements.is_multiple_of(stride), "rows are whole");
        elements / stride
    }

    /// Returns the head columns.
    const fn columns(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.heads * self.head_dim
    }
}

operation! {
    /// Head normalization.
    pub trait HeadNorm: Runtime {
        /// Normalizes heads in place.
        ///
        /// - `weight`: weight for every column in a head (none for zeros), and the offset added to it
        /// - `inverse`: `f32`, the inverse root mean square for every head, `[rows, heads]`
        fn head_norm(
            &self,
            heads: HeadColumns,
            weight: (Option<&Tensor<Self>>, f64),
            epsilon: f64,
            x: &mut Tensor<Self>,
            inverse: &mut Tensor<Self>,
        ) -> Result<()>;
        /// Turns the gradient of normalized heads into the gradient of `x`, in place, and accumulates the
        /// weight gradient if requested.
        fn head_norm_backward(
            &self,
            heads: HeadColumns,
            weight: (Option<&Tensor<Self>>, f64),
            x: (&Tensor<Self>, &Tensor<Self>),
            d: &mut Tensor<Self>,
            d_weight: Option<&mut Tensor<Self>>,
        ) -> Result<()>;
    }
}

impl HeadNorm for Cpu {
    fn head_norm(
        &self,
        heads: HeadColumns,
        (weight, offset): (Option<&Tensor<Self>>, f64),
        epsilon: f64,
        x: &mut Tensor<Self>,
        inverse: &mut Tensor<Self>,
    ) -> Result<()> {
        let weight = weight.map(|weight| self.operand(weight)).transpose()?;
        let scales = scales(heads.head_dim, weight.as_deref(), offset);
        let inverse = inverse.f32_mut();
        self.update(x, |x| self.on_pool(|| forward(heads, &scales, epsilon, x, inverse)))
    }

    fn head_norm_backward(
        &self,
        heads: HeadColumns,
        (weight, offset): (Option<&Tensor<Self>>, f64),
        (x, inverse): (&Tensor<Self>, &Tensor<Self>),
        d: &mut Tensor<Self>,
        d_weight: Option<&mut Tensor<Self>>,
    ) -> Result<()> {
        let (x, weight) = (self.operand(x)?, weight.map(|weight| self.operand(weight)).transpose()?);
        let scales = scales(heads.head_dim, weight.as_deref(), offset);
        self.update(d, |d| {
            self.update_if(d_weight, |d_weight| {
                self.on_pool(|| backward(heads, &scales, (&x, inverse.f32()), d, d_weight));
                Ok(())
            })
        })?
    }
}

/// Returns the factors for the columns in a head.
fn scales(head_dim: usize, weight: Option<&[f32]>, offset: f64) -> Vec<f32> {
    match weight {
        Some(weight) => weight.iter().map(|weight| weight + offset as f32).collect(),
        None => vec![offset as f32; head_dim],
    }
}

/// Normalizes heads, and writes 1 / root mean square for each head.
///
/// - `scales`: `[head_dim]`, `x`: `[rows, stride]`, `inverse`: `[rows, heads]`
pub fn forward<F: Real>(heads: HeadColumns, scales: &[F], epsilon: f64, x: &mut [F], inverse: &mut [F]) {
    let rows = heads.rows(x.len());
    assert!(inverse.len() == rows * heads.heads && scales.len() == heads.head_dim, "shapes agree");
    let (mean, epsilon) = (F::from_f64(1.0 / heads.head_dim as f64), F::from_f64(epsilon));
    let inverses = inverse.par_chunks_mut(chunk_rows(heads.stride) * heads.heads);
    x.par_chunks_mut(chunk_len(heads.stride)).zip(inverses).for_each(|(x, inverse)| {
        vectorized(
            #[inline(always)]
            || {
                let rows = x.chunks_mut(heads.stride).zip(inverse.chunks_mut(heads.heads));
                for (row, inverse) in rows {
                    let of_row = row[heads.columns()].chunks_mut(heads.head_dim);
                    for (head, inverse) in of_row.zip(inverse) {
                        *inverse = F::ONE / (dot(head, head) * mean + epsilon).sqrt();
                        for (x, &scale) in head.iter_mut().zip(scales) {
                            *x = *x * *inverse * scale;
                        }
                    }
                }
            },
        );
    });
}

/// Turns the gradient of normalized heads into the input gradient, and accumulates the weight gradient if
/// requested.
///
/// - `(x, inverse)`: norm input, and the forward output `inverse`
pub fn backward<F: Real>(
    heads: HeadColumns,
    scales: &[F],
    (x, inverse): (&[F], &[F]),
    d: &mut [F],
    d_weight: Option<&mut [F]>,
) {
    let rows = heads.rows(x.len());
    assert!(inverse.len() == rows * heads.heads && d.len() == x.len(), "shapes agree");
    if let Some(d_weight) = d_weight {
        weight_gradient(heads, (x, inverse), d, d_weight);
    }
    let mean = F::from_f64(1.0 / heads.head_dim as f64);
    let (chunk, rows) = (chunk_len(heads.stride), chunk_rows(heads.stride));
    let inputs = x.par_chunks(chunk).zip(inverse.par_chunks(rows * heads.heads));
    d.par_chunks_mut(chunk).zip(inputs).for_each(|(d, (x, inverse))| {
        vectorized(
            #[inline(always)]
            || {
                let rows = x.chunks(heads.stride).zip(inverse.chunks(heads.heads));
                for (d, (x, inverse)) in d.chunks_mut(heads.stride).zip(rows) {
                    let inputs = x[heads.columns()].chunks(heads.head_dim).zip(inverse);
                    for (d, (x, &inverse)) in d[heads.columns()].chunks_mut(heads.head_dim).zip(inputs) {
                        for (d, &scale) in d.iter_mut().zip(scales) {
                            *d *= scale;
                        }
                        // same as for a row: `dx = (dn - n mean(dn n)) / rms` with `n = x * inverse`
                        let along = dot(d, x) * mean * inverse * inverse;
                        for (d, &x) in d.iter_mut().zip(x) {
                            *d = (*d - x * along) * inverse;
                        }
                    }
                }
            },
        );
    });
}

/// Accumulates the weight gradient over all heads in all rows.
fn weight_gradient<F: Real>(heads: HeadColumns, (x, inverse): (&[F], &[F]), d: &[F], d_weight: &mut [F]) {
    assert_eq!(d_weight.len(), heads.head_dim, "shapes agree");
    let rows = chunk_rows(heads.stride);
    let all = (x.len() / heads.stride).div_ceil(rows);
    sum_chunks(all, d_weight, |index, sums| {
        vectorized(
            #[inline(always)]
            || {
                let inputs = x.chunks(heads.stride).zip(inverse.chunks(heads.heads));
                for (d, (x, inverse)) in d.chunks(heads.stride).zip(inputs).skip(index * rows).take(rows) {
                    let of_heads = x[heads.columns()].chunks(heads.head_dim).zip(inverse);
                    for (d, (x, &inverse)) in d[heads.columns()].chunks(heads.head_dim).zip(of_heads) {
                        for ((sum, &d), &x) in sums.iter_mut().zip(d).zip(x) {
                            *sum += d * x * inverse;
                        }
                    }
                }
            },
        );
    });
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::every_operation::{LEN, Results, changed, input};
    use super::super::finite_difference::{check, numbers, project};
    use super::super::rms_norm;
    use super::*;
    use crate::ops::Device;
    use crate::runtime::Dtype;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let x = input(d, LEN, 1)?;
        let heads = HeadColumns { first: 1, heads: 2, head_dim: 2, stride: 6 };
        let (weight, mut d_weight) = (input(d, 2, 8)?, input(d, 2, 9)?);
        let mut inverse = d.alloc_as(Dtype::F32, 8)?;
        let run = |y: &mut Tensor<D>| d.head_norm(heads, (Some(&weight), 1.0), 1e-5, y, &mut inverse);
        let mut all = vec![("head norm", changed(d, LEN, 5, run)?)];
        let run = |y: &mut Tensor<D>| d.head_norm(heads, (None, 1.0), 1e-5, y, &mut inverse);
        all.push(("head norm without weight", changed(d, LEN, 5, run)?));
        let run = |dx: &mut Tensor<D>| {
            d.head_norm_backward(heads, (Some(&weight), 1.0), (&x, &inverse), dx, Some(&mut d_weight))
        };
        all.push(("head norm dx", changed(d, LEN, 5, run)?));
        all.push(("head norm d_weight", d.download(&d_weight)?));
        Ok(all)
    }

    const HEADS: HeadColumns = HeadColumns { first: 3, heads: 4, head_dim: 6, stride: 31 };

    fn run(x: &[f64], weight: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (mut y, mut inverse) = (x.to_vec(), vec![f64::NAN; x.len() / HEADS.stride * HEADS.heads]);
        forward(HEADS, weight, 1e-2, &mut y, &mut inverse);
        (y, inverse)
    }

    #[test]
    fn a_head_is_normalized_like_a_row() {
        let (x, weight) = (numbers(5 * HEADS.stride, 1), numbers(HEADS.head_dim, 2));
        let (y, _) = run(&x, &weight);
        for (x, y) in x.chunks(HEADS.stride).zip(y.chunks(HEADS.stride)) {
            let (mut normal, mut inverse) = (vec![0.0; HEADS.heads * HEADS.head_dim], [0.0; HEADS.heads]);
            rms_norm::forward(&x[HEADS.columns()], (&weight, 0.0), 1e-2, &mut normal, &mut inverse);
            assert_eq!(y[HEADS.columns()], normal);
            assert_eq!((&y[..3], &y[27..]), (&x[..3], &x[27..]), "other columns stay");
        }
    }

    #[test]
    fn gradients_match_finite_differences() {
        let rows = 400;
        let (x, weight) = (numbers(rows * HEADS.stride, 1), numbers(HEADS.head_dim, 2));
        let dy = numbers(x.len(), 3);
        let (_, inverse) = run(&x, &weight);
        let (mut dx, mut d_weight) = (dy.clone(), vec![0.0; HEADS.head_dim]);
        backward(HEADS, &weight, (&x, &inverse), &mut dx, Some(&mut d_weight));
        check("x", &x, &dx, |x| project(&run(x, &weight).0, &dy));
        check("weight", &weight, &d_weight, |weight| project(&run(&x, weight).0, &dy));
    }
}
