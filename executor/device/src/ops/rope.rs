//! Rotary position embedding: rotates pairs of columns of every head, half a head apart, by an angle of their
//! token.
//!
//! The caller provides the angles as a table of cosines and sines. Text, multimodal sections and the rows and
//! columns of images differ only in this table.
//!
//! # Source
//! Su et al.: "`RoFormer`", 2021, arXiv:2104.09864; halves instead of neighboring columns, as in
//! transformers.

use rayon::prelude::*;

use super::parallel::{chunk_len, chunk_rows, vectorized};
use super::real::Real;

/// Direction of the rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rotation {
    /// By the angle.
    Forward,
    /// By the negative angle, for the gradient, as rotations are orthogonal.
    Backward,
}

/// Columns that are rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RopeShape {
    /// Number of rotated heads, from the first column on; columns after them are unchanged.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Elements of a row.
    pub stride: usize,
}

/// Rotates the first heads of every row in place.
///
/// - `x`: `[tokens, stride]`; `cos`, `sin`: `[tokens, head_dim / 2]`
pub fn rotate<F: Real>(rotation: Rotation, shape: RopeShape, cos: &[F], sin: &[F], x: &mut [F]) {
    let RopeShape { heads, head_dim, stride } = shape;
    let half = head_dim / 2;
    assert!(heads * head_dim <= stride && cos.len() == sin.len(), "heads lie in the rows");
    assert_eq!(cos.len() * stride, x.len() * half, "every token has its angles");
    // chunks of length 0 would panic
    if half == 0 {
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
                        let (low, high) = head.split_at_mut(half);
                        let angles = cos.iter().zip(sin);
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
mod tests {
    use super::super::finite_difference::{check, numbers, project};
    use super::*;

    #[test]
    fn the_gradient_matches_finite_differences() {
        let shape = RopeShape { heads: 3, head_dim: 8, stride: 40 };
        let tokens = 300;
        let angles = numbers(tokens * 4, 1);
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
