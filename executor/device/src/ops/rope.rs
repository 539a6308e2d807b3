//! Rotary position embedding: rotates column pairs in every head by a token angle.
//!
//! Columns in a pair are neighbors, or half a rotated width apart. Columns after the rotated width are
//! unchanged.
//!
//! The caller provides the angles as a table of cosines and sines. Text, multimodal sections and image rows
//! and columns differ only in this table.
//!
//! # Source
//! Su et al.: "`RoFormer`", 2021, arXiv:2104.09864, for neighbors; halves as in transformers.

use rayon::prelude::*;

use super::argument::values;
use super::operation::operation;
use super::parallel::{chunk_len, chunk_rows, vectorized};
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Dtype, Runtime, Tensor};
use std::sync::OnceLock;

/// Number of first positions whose sines and cosines are computed once; later positions are computed for
/// every microbatch.
const KEPT_POSITIONS: usize = 4096;

/// Frequency and position axis for every column pair in a head.
#[derive(Debug, Clone)]
pub struct RopeTable {
    /// Angle per position, for every pair.
    pub frequencies: Vec<f32>,
    /// Position axis, for every pair.
    pub axes: Vec<u8>,
    /// Sine and cosine for every pair, position by position, once computed.
    kept: OnceLock<Vec<(f32, f32)>>,
}

values!(RopeTable);

impl PartialEq for RopeTable {
    /// Compares frequencies and axes, whether or not angles are computed yet.
    fn eq(&self, other: &Self) -> bool {
        self.frequencies == other.frequencies && self.axes == other.axes
    }
}

impl RopeTable {
    /// Creates a pair table.
    ///
    /// # Panics
    /// If there is not exactly an axis for every frequency.
    #[must_use]
    pub fn new(frequencies: Vec<f32>, axes: Vec<u8>) -> Self {
        assert_eq!(frequencies.len(), axes.len(), "every pair has an axis");
        Self { frequencies, axes, kept: OnceLock::new() }
    }

    /// Allocates cosines and sines, `[tokens, pairs]`.
    fn alloc<D: Runtime>(&self, device: &D, tokens: usize) -> Result<(Tensor<D>, Tensor<D>)> {
        let len = tokens * self.frequencies.len();
        Ok((device.alloc_as(Dtype::F32, len)?, device.alloc_as(Dtype::F32, len)?))
    }

    /// Writes cosines and sines, `[tokens, pairs]`, for positions `[axes, tokens]`.
    fn fill(&self, positions: &[u32], tokens: usize, cos: &mut [f32], sin: &mut [f32]) {
        let pairs = self.frequencies.len();
        if pairs == 0 {
            return;
        }
        let kept = self.kept.get_or_init(|| self.first_angles());
        let rows = cos.par_chunks_mut(pairs).zip(sin.par_chunks_mut(pairs)).with_min_len(64);
        rows.enumerate().for_each(|(token, (cos, sin))| {
            for (pair, (&frequency, &axis)) in self.frequencies.iter().zip(&self.axes).enumerate() {
                let position = positions[usize::from(axis) * tokens + token];
                let angle = kept.get(position as usize * pairs + pair);
                (sin[pair], cos[pair]) = angle.copied().unwrap_or_else(|| sin_cos(position, frequency));
            }
        });
    }

    /// Computes the angles for the first positions.
    fn first_angles(&self) -> Vec<(f32, f32)> {
        let of_position =
            |position| self.frequencies.iter().map(move |&frequency| sin_cos(position, frequency));
        (0..KEPT_POSITIONS as u32).flat_map(of_position).collect()
    }
}

/// Computes sine and cosine with `libm` instead of system functions, whose bits differ between machines.
fn sin_cos(position: u32, frequency: f32) -> (f32, f32) {
    libm::sincosf(position as f32 * frequency)
}

operation! {
    /// Rotary positions.
    pub trait Rotate: Runtime {
        /// Computes cosines and sines, `[tokens, pairs]`, in `f32`.
        ///
        /// - `positions`: `[axes, tokens]`
        fn rope_angles(
            &self,
            table: &RopeTable,
            positions: &Tensor<Self>,
            tokens: usize,
        ) -> Result<(Tensor<Self>, Tensor<Self>)> in table.alloc(self, tokens);
        /// Rotates column pairs by the row angles.
        fn rope(
            &self,
            rotation: Rotation,
            shape: RopeShape,
            angles: (&Tensor<Self>, &Tensor<Self>),
            x: &mut Tensor<Self>,
        ) -> Result<()>;
    }
}

impl Rotate for Cpu {
    fn rope_angles(
        &self,
        table: &RopeTable,
        positions: &Tensor<Self>,
        tokens: usize,
    ) -> Result<(Tensor<Self>, Tensor<Self>)> {
        let (mut cos, mut sin) = table.alloc(self, tokens)?;
        let (positions, cosines, sines) = (positions.u32(), cos.f32_mut(), sin.f32_mut());
        self.on_pool(|| table.fill(positions, tokens, cosines, sines));
        Ok((cos, sin))
    }

    fn rope(
        &self,
        rotation: Rotation,
        shape: RopeShape,
        (cos, sin): (&Tensor<Self>, &Tensor<Self>),
        x: &mut Tensor<Self>,
    ) -> Result<()> {
        self.update(x, |x| self.on_pool(|| rotate(rotation, shape, cos.f32(), sin.f32(), x)))
    }
}

/// Rotation direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rotation {
    /// By the angle.
    Forward,
    /// By the negative angle, for the gradient, as rotations are orthogonal.
    Backward,
}

values!(Rotation);

/// Rotated columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RopeShape {
    /// Number of rotated heads, from the first column on; columns after these heads are unchanged.
    pub heads: usize,
    /// Head width.
    pub head_dim: usize,
    /// Number of rotated columns in a head, from the first column on; even.
    pub rotated: usize,
    /// Whether neighboring columns are rotated together, instead of columns half a rotated width apart.
    pub is_interleaved: bool,
    /// Number of elements in a row.
    pub stride: usize,
}

values!(RopeShape);

impl RopeShape {
    /// Returns the number of tokens.
    ///
    /// - `angles`: number of cosines, `[tokens, rotated / 2]`
    /// - `elements`: number of row elements, `[tokens, stride]`
    ///
    /// # Panics
    /// If heads exceed the rows, or not every token has angles.
    #[must_use]
    pub fn tokens(&self, angles: usize, elements: usize) -> usize {
        let Self { heads, head_dim, rotated, stride, .. } = *self;
        assert!(heads * head_dim <= stride && rotated <= head_dim, "heads lie in the rows");
        assert_eq!(angles * stride, elements * (rotated / 2), "every token has its angles");
        elements / stride.max(1)
    }
}

/// Rotates the first heads in every row, in place.
///
/// - `x`: `[tokens, stride]`; `cos`, `sin`: `[tokens, rotated / 2]`
pub fn rotate<F: Real>(rotation: Rotation, shape: RopeShape, cos: &[F], sin: &[F], x: &mut [F]) {
    let RopeShape { heads, head_dim, rotated, is_interleaved, stride } = shape;
    let half = rotated / 2;
    assert_eq!(cos.len(), sin.len(), "a cosine for every sine");
    // chunks with length 0 would panic
    if shape.tokens(cos.len(), x.len()) == 0 || half == 0 {
        return;
    }
    let sign = if rotation == Rotation::Forward { F::ONE } else { -F::ONE };
    let angles = chunk_rows(stride) * half;
    let tables = cos.par_chunks(angles).zip(sin.par_chunks(angles));
    x.par_chunks_mut(chunk_len(stride)).zip(tables).for_each(|(x, (cos, sin))| {
        vectorized(
            #[inline(always)]
            || {
                let tables = cos.chunks(half).zip(sin.chunks(half));
                for (row, (cos, sin)) in x.chunks_mut(stride).zip(tables) {
                    for head in row[..heads * head_dim].chunks_mut(head_dim) {
                        let angles = cos.iter().zip(sin);
                        if is_interleaved {
                            for (pair, (&cos, &sin)) in head.chunks_exact_mut(2).zip(angles) {
                                let (a, b, sin) = (pair[0], pair[1], sign * sin);
                                pair[0] = a * cos - b * sin;
                                pair[1] = b * cos + a * sin;
                            }
                            continue;
                        }
                        let (low, high) = head[..rotated].split_at_mut(half);
                        for ((low, high), (&cos, &sin)) in low.iter_mut().zip(high).zip(angles) {
                            let (a, b, sin) = (*low, *high, sign * sin);
                            *low = a * cos - b * sin;
                            *high = b * cos + a * sin;
                        }
                    }
                }
            },
        );
    });
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::every_operation::{ROWS, Results, changed};
    use super::super::finite_difference::{check, numbers, project};
    use super::*;
    use crate::ops::Device;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let stride = 8;
        let table = RopeTable::new(vec![0.7], vec![1]);
        let positions = d.upload_indices(&[9, 9, 9, 9, 9, 9, 0, 1, 2, 3, 0, 5000])?;
        let (cos, sin) = d.rope_angles(&table, &positions, ROWS)?;
        let mut all = Results::new();
        for (name, head_dim, is_interleaved) in [("rope", 2, false), ("rope, neighbors", 3, true)] {
            let shape = RopeShape { heads: 2, head_dim, rotated: 2, is_interleaved, stride };
            let rotate = |x: &mut Tensor<D>| d.rope(Rotation::Backward, shape, (&cos, &sin), x);
            all.push((name, changed(d, ROWS * stride, 7, rotate)?));
        }
        Ok(all)
    }

    #[test]
    fn kept_angles_have_the_bits_of_computed_ones() {
        let table = RopeTable::new(vec![1.0, 0.1, 0.01, 0.001], vec![0; 4]);
        let device = Cpu::new(1).unwrap();
        let last = KEPT_POSITIONS as u32 - 1;
        let positions = [0, 7, last, last + 1, 3 * last];
        let indices = device.upload_indices(&positions).unwrap();
        let (cos, sin) = device.rope_angles(&table, &indices, positions.len()).unwrap();
        let expected: Vec<(f32, f32)> = positions
            .iter()
            .flat_map(|&position| {
                table.frequencies.iter().map(move |&frequency| sin_cos(position, frequency))
            })
            .collect();
        let found: Vec<(f32, f32)> = sin.f32().iter().copied().zip(cos.f32().iter().copied()).collect();
        assert_eq!(found, expected);
        assert_eq!(
            table,
            RopeTable::new(table.frequencies.clone(), vec![0; 4]),
            "kept angles are not compared"
        );
    }

    #[test]
    fn the_gradient_matches_finite_differences() {
        for (rotated, is_interleaved) in [(8, false), (8, true), (4, false), (4, true)] {
            let shape = RopeShape { heads: 3, head_dim: 8, rotated, is_interleaved, stride: 40 };
            let tokens = 300;
            let angles = numbers(tokens * rotated / 2, 1);
            let cos: Vec<f64> = angles.iter().map(|angle| (9.0 * angle).cos()).collect();
            let sin: Vec<f64> = angles.iter().map(|angle| (9.0 * angle).sin()).collect();
            let (x, mut dx) = (numbers(tokens * 40, 2), numbers(tokens * 40, 3));
            let dy = dx.clone();
            rotate(Rotation::Backward, shape, &cos, &sin, &mut dx);
            check("x", &x, &dx, |x| {
                let mut y = x.to_vec();
                rotate(Rotation::Forward, shape, &cos, &sin, &mut y);
                project(&y, &dy)
            });
        }
    }

    #[test]
    fn pairs_are_halves_or_neighbors_and_other_columns_stay() {
        // a quarter turn, then none
        let (cos, sin) = ([0.0, 1.0], [1.0, 0.0]);
        let turned = |is_interleaved: bool| {
            let shape = RopeShape { heads: 1, head_dim: 5, rotated: 4, is_interleaved, stride: 6 };
            let mut x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
            rotate(Rotation::Forward, shape, &cos, &sin, &mut x);
            x
        };
        assert_eq!(turned(false), [-3.0, 2.0, 1.0, 4.0, 5.0, 6.0]);
        assert_eq!(turned(true), [-2.0, 1.0, 3.0, 4.0, 5.0, 6.0]);
    }
}
