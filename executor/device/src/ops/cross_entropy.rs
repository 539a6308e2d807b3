//! Logit cross entropy and gradient, row by row.
//!
//! Forward and backward are one function: the gradient replaces the logits. The caller scales the loss sum by
//! the target tokens in the complete *step*, never in a microbatch.

use rayon::prelude::*;

use super::operation::operation;
use super::parallel::{chunk_rows, max, sum, vectorized};
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};
use std::ops::Range;

operation! {
    /// Logit cross entropy.
    pub trait CrossEntropy: Runtime {
        /// Replaces logits, `[targets, vocabulary]`, by the gradient of `scale` times the loss sum, and adds
        /// the unscaled sum to a scalar.
        ///
        /// - `targets`: target word for every row, a range in an index tensor
        /// - `loss`: one `f64`
        fn cross_entropy(
            &self,
            logits: &mut Tensor<Self>,
            targets: (&Tensor<Self>, Range<usize>),
            scale: f64,
            loss: &mut Tensor<Self>,
        ) -> Result<()>;
    }
}

impl CrossEntropy for Cpu {
    fn cross_entropy(
        &self,
        logits: &mut Tensor<Self>,
        (targets, range): (&Tensor<Self>, Range<usize>),
        scale: f64,
        loss: &mut Tensor<Self>,
    ) -> Result<()> {
        let targets = &targets.u32()[range];
        loss.f64_mut()[0] +=
            self.update(logits, |logits| self.on_pool(|| forward_backward(logits, targets, scale)))?;
        Ok(())
    }
}

/// Replaces logits, `[targets, vocabulary]`, by the gradient of `scale` times the loss sum, and returns the
/// unscaled loss sum.
///
/// Every row has a target; the caller omits ignored rows. NaN and infinite logits produce a sum that is not
/// finite.
///
/// # Panics
/// If a target is not in the vocabulary.
pub fn forward_backward<F: Real>(logits: &mut [F], targets: &[u32], scale: f64) -> f64 {
    if targets.is_empty() {
        return 0.0;
    }
    let vocabulary = logits.len() / targets.len();
    assert_eq!(vocabulary * targets.len(), logits.len(), "every target has a row");
    let rows = chunk_rows(vocabulary);
    let chunks = logits.par_chunks_mut(rows * vocabulary).zip(targets.par_chunks(rows));
    let losses: Vec<f64> = chunks
        .map(|(logits, targets)| {
            vectorized(
                #[inline(always)]
                || {
                    // a loop instead of an iterator sum, which would be a call without these vector
                    // instructions
                    let mut sum = 0.0;
                    for (logits, &target) in logits.chunks_mut(vocabulary).zip(targets) {
                        sum += row(logits, target as usize, F::from_f64(scale));
                    }
                    sum
                },
            )
        })
        .collect();
    // in chunk order, for any number of threads
    losses.iter().sum()
}

/// Returns the loss of a row; the logits become `scale (p - 1 at the target)`.
#[inline(always)]
fn row<F: Real>(logits: &mut [F], target: usize, scale: F) -> f64 {
    // the maximum keeps exponentials from overflowing
    let most = max(logits);
    let of_target = (logits[target] - most).to_f64();
    for value in logits.iter_mut() {
        *value = (*value - most).exp();
    }
    let total = sum(logits);
    let factor = scale / total;
    for value in logits.iter_mut() {
        *value *= factor;
    }
    logits[target] -= scale;
    libm::log(total.to_f64()) - of_target
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::every_operation::{COLUMNS, LEN, ROWS, Results, changed, scalars};
    use super::super::finite_difference::{check, numbers};
    use super::*;
    use crate::ops::Device;
    use crate::runtime::Dtype;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let targets: Vec<u32> = (0..ROWS as u32).map(|row| row % COLUMNS as u32).collect();
        let targets = d.upload_indices(&targets)?;
        let mut loss = d.zeros_as(Dtype::F64, 1)?;
        let run = |logits: &mut Tensor<D>| d.cross_entropy(logits, (&targets, 0..ROWS), 0.125, &mut loss);
        Ok(vec![("cross entropy", changed(d, LEN, 4, run)?), ("loss", scalars(d, &loss)?)])
    }

    #[test]
    fn the_gradient_matches_finite_differences() {
        let (rows, vocabulary) = (300, 50);
        let x: Vec<f64> = numbers(rows * vocabulary, 1).iter().map(|x| 5.0 * x).collect();
        let targets: Vec<u32> = (0..rows as u32).map(|row| row * 7 % 50).collect();
        let mut dx = x.clone();
        forward_backward(&mut dx, &targets, 0.3);
        check("logits", &x, &dx, |x| 0.3 * forward_backward(&mut x.to_vec(), &targets, 0.3));
        let uniform = forward_backward(&mut vec![2.5; 100], &[3, 99 - 50], 1.0);
        assert!((uniform - 2.0 * 50.0_f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn nan_and_infinity_reach_the_loss() {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut logits = vec![0.0_f32; 40];
            logits[25] = bad;
            assert!(!forward_backward(&mut logits, &[1, 2], 1.0).is_finite());
        }
        assert_eq!(forward_backward::<f32>(&mut [], &[], 1.0), 0.0);
    }
}
