//! `AdamW` optimizer: Adam with decoupled weight decay.
//!
//! # Source
//! Loshchilov, Hutter: "Decoupled Weight Decay Regularization", 2017, arXiv:1711.05101, as implemented by
//! `torch.optim.AdamW`.

use rayon::prelude::*;

use super::argument::{Argument, Operands, Places, Queues, values};
use super::operation::operation;
use super::parallel::{chunk_len, vectorized};
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};
use std::ops::Range;

/// Consecutive elements with the same learning rate and weight decay.
#[derive(Debug, Clone, PartialEq)]
pub struct UpdateRange {
    /// Element range.
    pub elements: Range<usize>,
    /// Learning rate in this step.
    pub learning_rate: f64,
    /// Weight decay, relative to the learning rate.
    pub weight_decay: f64,
}

values!(UpdateRange);

/// Optimizer state on a device.
pub struct AdamWState<'a, D: Runtime> {
    /// `f32` master weights, which are updated; `None` to update the weights directly.
    pub master: Option<&'a mut Tensor<D>>,
    /// Gradient means (first moments).
    pub mean: &'a mut Tensor<D>,
    /// Squared gradient means (second moments).
    pub square: &'a mut Tensor<D>,
}

impl<Q: Queues> Argument<Q> for AdamWState<'_, Q> {
    /// Whether there are master weights.
    type Kept = bool;
    type Opened<'a> = AdamWState<'a, Q::Inner>;
    type Inner<'a> = AdamWState<'a, Q::Inner>;

    fn keep(self, places: &mut Places<Q>) -> bool {
        places.write(self.mean);
        places.write(self.square);
        self.master.map(|master| places.write(master)).is_some()
    }

    fn open<'a>(has_master: bool, operands: &mut Operands<'a, Q::Inner>) -> Result<Self::Opened<'a>> {
        let (mean, square) = (operands.write(), operands.write());
        Ok(AdamWState { master: has_master.then(|| operands.write()), mean, square })
    }

    fn lend<'b, 'a: 'b>(opened: &'b mut Self::Opened<'a>) -> Self::Inner<'b> {
        let AdamWState { master, mean, square } = opened;
        AdamWState { master: master.as_deref_mut(), mean, square }
    }
}

operation! {
    /// Gradient clipping and weight updates.
    pub trait Update: Runtime {
        /// Writes the sum of squares of each tensor to an element in an `f64` tensor.
        fn sums_of_squares(&self, tensors: &[(&Tensor<Self>, usize)], into: &mut Tensor<Self>) -> Result<()>;
        /// Computes the gradient norm in a step and the factor that clips the norm to `norm_max`.
        ///
        /// - `figures`: `f64`, losses, then sums of squares
        /// - `squares`: indices of figures that are sums of squares
        /// - `into`: `f64`: norm and factor; the factor is NaN if a figure is not finite
        fn clip_factor(
            &self,
            figures: &Tensor<Self>,
            squares: Range<usize>,
            norm_max: Option<f64>,
            into: &mut Tensor<Self>,
        ) -> Result<()>;
        /// Runs an optimizer step with the gradients multiplied by the factor from
        /// [`clip_factor`](Self::clip_factor); changes nothing if the factor is NaN.
        ///
        /// - `ranges`: cover the weights in order; learning rate and weight decay in [`AdamW`] are not read
        fn adamw(
            &self,
            adamw: &AdamW,
            ranges: &[UpdateRange],
            clip: &Tensor<Self>,
            weights: &mut Tensor<Self>,
            gradients: &Tensor<Self>,
            state: AdamWState<'_, Self>,
        ) -> Result<()>;
    }
}

/// Constant that `PyTorch` adds to the norm before it divides.
const EPSILON: f64 = 1e-6;

impl Update for Cpu {
    fn sums_of_squares(&self, tensors: &[(&Tensor<Self>, usize)], into: &mut Tensor<Self>) -> Result<()> {
        for &(tensor, index) in tensors {
            let x = self.operand(tensor)?;
            into.f64_mut()[index] = self.on_pool(|| super::elementwise::sum_of_squares(&x));
        }
        Ok(())
    }

    fn clip_factor(
        &self,
        figures: &Tensor<Self>,
        squares: Range<usize>,
        norm_max: Option<f64>,
        into: &mut Tensor<Self>,
    ) -> Result<()> {
        let norm = figures.f64()[squares].iter().sum::<f64>().sqrt();
        let is_finite = figures.f64().iter().all(|figure| figure.is_finite());
        let factor = norm_max.map_or(1.0, |norm_max| (norm_max / (norm + EPSILON)).min(1.0));
        into.f64_mut().copy_from_slice(&[norm, if is_finite { factor } else { f64::NAN }]);
        Ok(())
    }

    fn adamw(
        &self,
        adamw: &AdamW,
        ranges: &[UpdateRange],
        clip: &Tensor<Self>,
        weights: &mut Tensor<Self>,
        gradients: &Tensor<Self>,
        state: AdamWState<'_, Self>,
    ) -> Result<()> {
        let gradient_scale = clip.f64()[1];
        if gradient_scale.is_nan() {
            return Ok(());
        }
        let gradients = self.operand(gradients)?;
        let (mean, square) = (state.mean.f32_mut(), state.square.f32_mut());
        let mut update = |weights: &mut [f32]| {
            for &UpdateRange { ref elements, learning_rate, weight_decay } in ranges {
                let adamw = AdamW { learning_rate, weight_decay, gradient_scale, ..*adamw };
                let (weights, gradients) = (&mut weights[elements.clone()], &gradients[elements.clone()]);
                let (mean, square) = (&mut mean[elements.clone()], &mut square[elements.clone()]);
                self.on_pool(|| step(&adamw, weights, gradients, mean, square));
            }
        };
        let Some(master) = state.master else { return self.update(weights, update) };
        update(master.f32_mut());
        // rounds the master weights to the weight type
        self.update(weights, |weights| weights.copy_from_slice(master.f32()))
    }
}

/// Settings for an optimizer step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate in this step.
    pub learning_rate: f64,
    /// Decay factor for the first moment.
    pub beta1: f64,
    /// Decay factor for the second moment.
    pub beta2: f64,
    /// Epsilon added to the root of the second moment.
    pub epsilon: f64,
    /// Weight decay, relative to the learning rate.
    pub weight_decay: f64,
    /// Step number, starting at 1.
    pub step: u64,
    /// Clipping factor applied to the gradients first.
    pub gradient_scale: f64,
}

values!(AdamW);

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

/// Runs a step: updates weights and both moments.
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
pub(crate) mod tests {
    use super::super::every_operation::{LEN, Results, changed, input, scalars};
    use super::*;
    use crate::ops::Device;
    use crate::runtime::Dtype;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let adamw = AdamW { step: 3, ..AdamW::default() };
        let zeros = || d.zeros_as(Dtype::F32, LEN);
        let (mut mean, mut square, mut master) = (zeros()?, zeros()?, zeros()?);
        let gradients = input(d, LEN, 1)?;
        let mut figures = d.zeros_as(Dtype::F64, 3)?;
        d.sums_of_squares(&[(&gradients, 2), (&input(d, 5, 2)?, 1)], &mut figures)?;
        let mut clip = d.zeros_as(Dtype::F64, 2)?;
        d.clip_factor(&figures, 1..3, Some(0.5), &mut clip)?;
        let range =
            |elements, learning_rate, weight_decay| UpdateRange { elements, learning_rate, weight_decay };
        let ranges = [range(0..7, 1e-3, 0.01), range(7..9, 5e-3, 0.01), range(9..LEN, 1e-3, 0.0)];
        let run = |weights: &mut Tensor<D>| {
            let state = AdamWState { master: None, mean: &mut mean, square: &mut square };
            d.adamw(&adamw, &ranges, &clip, weights, &gradients, state)
        };
        let mut all = vec![("adamw", changed(d, LEN, 2, run)?)];
        d.add(&input(d, LEN, 2)?, &mut master)?;
        let run = |weights: &mut Tensor<D>| {
            let state = AdamWState { master: Some(&mut master), mean: &mut mean, square: &mut square };
            d.adamw(&adamw, &ranges, &clip, weights, &gradients, state)
        };
        all.push(("adamw with masters", changed(d, LEN, 3, run)?));
        all.push(("norm and factor", scalars(d, &clip)?));
        all.push(("sums of squares", scalars(d, &figures)?));
        Ok(all)
    }

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
