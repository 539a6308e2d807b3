//! Multi-head latent attention heads: joins queries, keys and values into rows, and rotates them.
//!
//! A query or key head has a plain part, then a rotated part, which all key heads share. Values are narrower
//! than keys; value heads are padded with zeros, so that attention has a single head width.
//!
//! # Source
//! DeepSeek-AI: "DeepSeek-V2", 2024, arXiv:2405.04434, section 2.1.

use rayon::prelude::*;

use super::argument::values;
use super::bias::Columns;
use super::operation::operation;
use super::parallel::chunk_rows;
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

/// Head sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentShape {
    /// Number of query, key and value heads.
    pub heads: usize,
    /// Width of the unrotated query and key part.
    pub plain: usize,
    /// Width of the rotated part.
    pub rotated: usize,
    /// Value width; at most the query width.
    pub value: usize,
    /// Whether neighboring columns are rotated together, instead of columns half a rotated part apart.
    pub is_interleaved: bool,
}

values!(LatentShape);

impl LatentShape {
    /// Returns the query and key head width.
    #[must_use]
    pub const fn head_dim(&self) -> usize {
        self.plain + self.rotated
    }

    /// Returns the number of elements in a query-key-value row.
    #[must_use]
    pub const fn row(&self) -> usize {
        3 * self.heads * self.head_dim()
    }

    /// Returns the number of elements in a row with plain keys and values: head by head, keys before values.
    #[must_use]
    pub const fn keys_values(&self) -> usize {
        self.heads * (self.plain + self.value)
    }

    /// Returns the columns of a rotated pair before rotation.
    const fn pair(&self, pair: usize) -> [usize; 2] {
        if self.is_interleaved { [2 * pair, 2 * pair + 1] } else { [pair, pair + self.rotated / 2] }
    }
}

operation! {
    /// Latent attention heads.
    pub trait LatentHeads: Runtime {
        /// Writes rows with rotated queries and keys, and values.
        ///
        /// - `queries`: `[tokens, heads * head_dim]`; `keys_values`: `[tokens, heads * (plain + value)]`
        /// - `rotated`: rows whose columns from `columns.first` on are the rotated part shared by all keys
        /// - `angles`: cosines and sines, `[tokens, rotated / 2]`
        /// - `qkv`: `[tokens, 3 * heads * head_dim]`
        fn latent_heads(
            &self,
            shape: &LatentShape,
            inputs: [&Tensor<Self>; 2],
            rotated: (&Tensor<Self>, Columns),
            angles: (&Tensor<Self>, &Tensor<Self>),
            qkv: &mut Tensor<Self>,
        ) -> Result<()>;
        /// Writes the gradients of queries, plain keys and values, and rotated key columns.
        fn latent_heads_backward(
            &self,
            shape: &LatentShape,
            d_qkv: &Tensor<Self>,
            angles: (&Tensor<Self>, &Tensor<Self>),
            d_inputs: [&mut Tensor<Self>; 2],
            d_rotated: (&mut Tensor<Self>, Columns),
        ) -> Result<()>;
    }
}

impl LatentHeads for Cpu {
    fn latent_heads(
        &self,
        shape: &LatentShape,
        [queries, keys_values]: [&Tensor<Self>; 2],
        (rotated, columns): (&Tensor<Self>, Columns),
        (cos, sin): (&Tensor<Self>, &Tensor<Self>),
        qkv: &mut Tensor<Self>,
    ) -> Result<()> {
        let (queries, keys_values) = (self.operand(queries)?, self.operand(keys_values)?);
        let (rotated, angles) = (self.operand(rotated)?, (cos.f32(), sin.f32()));
        self.update(qkv, |qkv| {
            self.on_pool(|| forward(shape, [&queries, &keys_values], (&rotated, columns), angles, qkv));
        })
    }

    fn latent_heads_backward(
        &self,
        shape: &LatentShape,
        d_qkv: &Tensor<Self>,
        (cos, sin): (&Tensor<Self>, &Tensor<Self>),
        [d_queries, d_keys_values]: [&mut Tensor<Self>; 2],
        (d_rotated, columns): (&mut Tensor<Self>, Columns),
    ) -> Result<()> {
        let (d_qkv, angles) = (self.operand(d_qkv)?, (cos.f32(), sin.f32()));
        self.update(d_queries, |dx| self.on_pool(|| queries_backward(shape, &d_qkv, angles, dx)))?;
        self.update(d_keys_values, |dx| self.on_pool(|| keys_values_backward(shape, &d_qkv, dx)))?;
        self.update(d_rotated, |dx| self.on_pool(|| rotated_backward(shape, &d_qkv, angles, (dx, columns))))
    }
}

/// Writes rows with queries, keys and values.
///
/// # Panics
/// If shapes do not match.
pub fn forward<F: Real>(
    shape: &LatentShape,
    [queries, keys_values]: [&[F]; 2],
    (rotated, columns): (&[F], Columns),
    (cos, sin): (&[F], &[F]),
    qkv: &mut [F],
) {
    let LatentShape { heads, plain, value, .. } = *shape;
    let (dim, half) = (shape.head_dim(), shape.rotated / 2);
    let tokens = qkv.len() / shape.row();
    assert!(
        qkv.len() == tokens * shape.row()
            && queries.len() == tokens * heads * dim
            && keys_values.len() == tokens * shape.keys_values()
            && rotated.len() == tokens * columns.stride
            && cos.len() == tokens * half
            && sin.len() == cos.len(),
        "every token has a row"
    );
    let chunk = chunk_rows(shape.row());
    qkv.par_chunks_mut(chunk * shape.row()).enumerate().for_each(|(index, rows)| {
        for (token, row) in (index * chunk..).zip(rows.chunks_mut(shape.row())) {
            let angles = (&cos[token * half..][..half], &sin[token * half..][..half]);
            let (q, k) = row.split_at_mut(heads * dim);
            let (k, v) = k.split_at_mut(heads * dim);
            let shared = &rotated[token * columns.stride + columns.first..][..shape.rotated];
            for head in 0..heads {
                let from = &queries[(token * heads + head) * dim..][..dim];
                let q = &mut q[head * dim..][..dim];
                q[..plain].copy_from_slice(&from[..plain]);
                rotate(shape, &from[plain..], angles, &mut q[plain..]);
                let from = &keys_values[(token * heads + head) * (plain + value)..][..plain + value];
                let k = &mut k[head * dim..][..dim];
                k[..plain].copy_from_slice(&from[..plain]);
                rotate(shape, shared, angles, &mut k[plain..]);
                let v = &mut v[head * dim..][..dim];
                v[..value].copy_from_slice(&from[plain..]);
                v[value..].fill(F::ZERO);
            }
        }
    });
}

/// Rotates the rotated part of a head; pairs are written half a part apart.
fn rotate<F: Real>(shape: &LatentShape, x: &[F], (cos, sin): (&[F], &[F]), y: &mut [F]) {
    for (pair, (&cos, &sin)) in cos.iter().zip(sin).enumerate() {
        let [a, b] = shape.pair(pair).map(|column| x[column]);
        y[pair] = a * cos - b * sin;
        y[pair + shape.rotated / 2] = b * cos + a * sin;
    }
}

/// Adds the gradient of the rotated part of a head before rotation, from the gradient after rotation.
fn rotate_back<F: Real>(shape: &LatentShape, dy: &[F], (cos, sin): (&[F], &[F]), dx: &mut [F]) {
    for (pair, (&cos, &sin)) in cos.iter().zip(sin).enumerate() {
        let (a, b) = (dy[pair], dy[pair + shape.rotated / 2]);
        let [first, second] = shape.pair(pair);
        dx[first] += a * cos + b * sin;
        dx[second] += b * cos - a * sin;
    }
}

/// Writes the query gradient, `[tokens, heads * head_dim]`.
pub fn queries_backward<F: Real>(shape: &LatentShape, d_qkv: &[F], (cos, sin): (&[F], &[F]), dx: &mut [F]) {
    let (dim, half, plain) = (shape.head_dim(), shape.rotated / 2, shape.plain);
    let width = shape.heads * dim;
    let chunk = chunk_rows(width);
    dx.par_chunks_mut(chunk * width).enumerate().for_each(|(index, rows)| {
        for (token, row) in (index * chunk..).zip(rows.chunks_mut(width)) {
            let angles = (&cos[token * half..][..half], &sin[token * half..][..half]);
            let from = &d_qkv[token * shape.row()..][..width];
            for (dx, dy) in row.chunks_mut(dim).zip(from.chunks(dim)) {
                dx[..plain].copy_from_slice(&dy[..plain]);
                dx[plain..].fill(F::ZERO);
                rotate_back(shape, &dy[plain..], angles, &mut dx[plain..]);
            }
        }
    });
}

/// Writes the gradient of plain keys and values, `[tokens, heads * (plain + value)]`.
pub fn keys_values_backward<F: Real>(shape: &LatentShape, d_qkv: &[F], dx: &mut [F]) {
    let LatentShape { heads, plain, value, .. } = *shape;
    let (dim, width) = (shape.head_dim(), shape.keys_values());
    let chunk = chunk_rows(width);
    dx.par_chunks_mut(chunk * width).enumerate().for_each(|(index, rows)| {
        for (token, row) in (index * chunk..).zip(rows.chunks_mut(width)) {
            let from = &d_qkv[token * shape.row()..][..shape.row()];
            for (head, dx) in row.chunks_mut(plain + value).enumerate() {
                dx[..plain].copy_from_slice(&from[(heads + head) * dim..][..plain]);
                dx[plain..].copy_from_slice(&from[(2 * heads + head) * dim..][..value]);
            }
        }
    });
}

/// Writes the gradient of the rotated key columns, summed over heads.
pub fn rotated_backward<F: Real>(
    shape: &LatentShape,
    d_qkv: &[F],
    (cos, sin): (&[F], &[F]),
    (dx, columns): (&mut [F], Columns),
) {
    let (dim, half) = (shape.head_dim(), shape.rotated / 2);
    let chunk = chunk_rows(shape.heads * shape.rotated);
    dx.par_chunks_mut(chunk * columns.stride).enumerate().for_each(|(index, rows)| {
        for (token, row) in (index * chunk..).zip(rows.chunks_mut(columns.stride)) {
            let dx = &mut row[columns.first..][..shape.rotated];
            dx.fill(F::ZERO);
            let angles = (&cos[token * half..][..half], &sin[token * half..][..half]);
            let keys = &d_qkv[token * shape.row() + shape.heads * dim..][..shape.heads * dim];
            // in head order, for any number of threads
            for dy in keys.chunks(dim) {
                rotate_back(shape, &dy[shape.plain..], angles, dx);
            }
        }
    });
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::every_operation::{Results, changed, input};
    use super::super::finite_difference::{check, numbers, project};
    use super::*;
    use crate::ops::Device;
    use crate::runtime::Dtype;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let upload = |values: &[f32; 3]| d.upload_as(Dtype::F32, values);
        let (cos, sin) = (&upload(&[0.5, 0.25, -1.0])?, &upload(&[1.0, -0.5, 0.75])?);
        let columns = Columns { first: 1, stride: 4 };
        let mut all = Results::new();
        for (name, is_interleaved) in [("latent heads", false), ("latent heads, interleaved", true)] {
            let shape = LatentShape { heads: 2, plain: 1, rotated: 2, value: 2, is_interleaved };
            let (queries, keys_values) = (input(d, 3 * 6, 1)?, input(d, 3 * shape.keys_values(), 2)?);
            let rotated = input(d, 3 * columns.stride, 3)?;
            let run = |qkv: &mut Tensor<D>| {
                d.latent_heads(&shape, [&queries, &keys_values], (&rotated, columns), (cos, sin), qkv)
            };
            all.push((name, changed(d, 3 * shape.row(), 4, run)?));
            let d_qkv = input(d, 3 * shape.row(), 5)?;
            let (mut dq, mut dkv) = (input(d, 18, 6)?, input(d, 3 * shape.keys_values(), 7)?);
            let run = |dr: &mut Tensor<D>| {
                d.latent_heads_backward(&shape, &d_qkv, (cos, sin), [&mut dq, &mut dkv], (dr, columns))
            };
            all.push(("latent heads d_rotated", changed(d, 3 * columns.stride, 8, run)?));
            all.extend([("latent heads dq", d.download(&dq)?), ("latent heads dkv", d.download(&dkv)?)]);
        }
        Ok(all)
    }

    const TOKENS: usize = 300;

    fn shape(is_interleaved: bool) -> LatentShape {
        LatentShape { heads: 3, plain: 3, rotated: 4, value: 5, is_interleaved }
    }

    #[test]
    fn the_gradients_match_finite_differences() {
        for shape in [shape(false), shape(true)] {
            let columns = Columns { first: 2, stride: 7 };
            let inputs = [
                numbers(TOKENS * 21, 1),
                numbers(TOKENS * shape.keys_values(), 2),
                numbers(TOKENS * columns.stride, 3),
            ];
            let (cos, sin) = (numbers(TOKENS * 2, 4), numbers(TOKENS * 2, 5));
            let dy = numbers(TOKENS * shape.row(), 6);
            let mut gradients = inputs.each_ref().map(|input| vec![0.0; input.len()]);
            let [dq, dkv, dr] = &mut gradients;
            queries_backward(&shape, &dy, (&cos, &sin), dq);
            keys_values_backward(&shape, &dy, dkv);
            rotated_backward(&shape, &dy, (&cos, &sin), (dr, columns));
            for (index, name) in ["queries", "keys and values", "rotated keys"].into_iter().enumerate() {
                check(name, &inputs[index], &gradients[index], |changed| {
                    let mut all = inputs.each_ref().map(|input| &input[..]);
                    all[index] = changed;
                    let mut y = vec![f64::NAN; dy.len()];
                    forward(&shape, [all[0], all[1]], (all[2], columns), (&cos, &sin), &mut y);
                    project(&y, &dy)
                });
            }
        }
    }

    #[test]
    fn scores_do_not_depend_on_the_order_of_pairs() {
        // the same pairs, once as neighbors and once half a part apart
        let apart = [1.0, 2.0, 3.0, 4.0];
        let neighbors = [1.0, 3.0, 2.0, 4.0];
        let angles = (&[0.6, 0.8][..], &[0.8, -0.6][..]);
        let (mut a, mut b) = ([0.0; 4], [0.0; 4]);
        rotate(&shape(false), &apart, angles, &mut a);
        rotate(&shape(true), &neighbors, angles, &mut b);
        assert_eq!(a, b);
    }
}
