//! `AdamW` optimizer: Adam with decoupled weight decay.
//!
//! # Source
//! Loshchilov, Hutter: "Decoupled Weight Decay Regularization", 2017, arXiv:1711.05101, as implemented by
//! `torch.optim.AdamW`.

use rayon::prelude::*;

use super::parallel::{chunk_len, vectorized};
use super::real::Real;

/// Settings of one optimizer step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Weight decay as a factor of the learning rate.
    pub weight_decay: f64,
    /// Number of this step, starting at 1.
    pub step: u64,
    /// Factor applied to the gradients first: clipping.
    pub gradient_scale: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
            step: 1,
            gradient_scale: 1.0,
        }
    }
}

/// Takes one step: updates weights and both moments.
pub fn step<F: Real>(adamw: &AdamW, weights: &mut [F], gradients: &[F], mean: &mut [F], square: &mut [F]) {
    assert!(weights.len() == gradients.len(), "every weight has a gradient");
    assert!(mean.len() == weights.len() && square.len() == weights.len(), "every weight has its means");
    let power = |beta: f64| 1.0 - libm::pow(beta, adamw.step as f64);
    // bias corrections: both moments start at 0
    let (mean_left, square_left) = (power(adamw.beta1), power(adamw.beta2));
    // decoupled: the decay applies to the weight, not to the gradient
    let decay = F::from_f64(1.0 - adamw.learning_rate * adamw.weight_decay);
    let rate = F::from_f64(adamw.learning_rate / mean_left);
    let root = F::from_f64(1.0 / square_left.sqrt());
    let (beta1, beta2) = (F::from_f64(adamw.beta1), F::from_f64(adamw.beta2));
    let (rest1, rest2) = (F::from_f64(1.0 - adamw.beta1), F::from_f64(1.0 - adamw.beta2));
    let (epsilon, factor) = (F::from_f64(adamw.epsilon), F::from_f64(adamw.gradient_scale));
    let chunk = chunk_len(1);
    let means = mean.par_chunks_mut(chunk).zip(square.par_chunks_mut(chunk));
    let all = weights.par_chunks_mut(chunk).zip(gradients.par_chunks(chunk)).zip(means);
    all.for_each(|((weights, gradients), (means, squares))| {
        vectorized(
            #[inline(always)]
            || {
                let all = weights.iter_mut().zip(gradients).zip(means.iter_mut().zip(squares));
                for ((weight, &gradient), (mean, square)) in all {
                    let gradient = gradient * factor;
                    *mean = beta1 * *mean + rest1 * gradient;
                    *square = beta2 * *square + rest2 * gradient * gradient;
                    *weight = *weight * decay - rate * *mean / (square.sqrt() * root + epsilon);
                }
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Recorded from `torch.optim.AdamW([1.0, -2.0], lr=0.1, weight_decay=0.1)` with these gradients, in
    /// `f64`.
    #[test]
    fn steps_match_torch() {
        let (mut weights, mut mean, mut square) = ([1.0, -2.0], [0.0; 2], [0.0; 2]);
        let gradients = [[0.5, -1.0], [0.25, 2.0], [-1.0, 0.125]];
        for (index, gradients) in gradients.iter().enumerate() {
            let adamw =
                AdamW { learning_rate: 0.1, weight_decay: 0.1, step: index as u64 + 1, ..AdamW::default() };
            step(&adamw, &mut weights, gradients, &mut mean, &mut square);
        }
        let truth = TORCH;
        assert!(
            weights.iter().zip(truth).all(|(weight, truth)| (weight - truth).abs() < 1e-12),
            "{weights:?}"
        );
    }

    const TORCH: [f64; 2] = [0.800_638_922_460_836_8, -1.910_655_634_341_319_5];
}
