//! Weights for the experts that tokens go through, and weight gradients.
//!
//! A *router* outputs a logit per expert for every token. The host chooses a few experts per token; these
//! operations turn the logits of the chosen experts into output weights. Rows for chosen experts are *slots*:
//! `[tokens, experts per token]`.
//!
//! # Source
//! Shazeer et al.: "Outrageously Large Neural Networks", 2017, arXiv:1701.06538; sigmoids: DeepSeek-AI:
//! "DeepSeek-V3", 2024, arXiv:2412.19437, section 2.1.2.

use rayon::prelude::*;

use super::argument::values;
use super::operation::operation;
use super::parallel::{chunk_rows, dot, vectorized};
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

/// Minimum sigmoid sum, which keeps divisions finite.
pub const SUM_MIN: f64 = 1e-20;

/// Function from token logits to expert weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpertScores {
    /// Softmax over all experts.
    Softmax,
    /// Softmax over the chosen experts: the softmax over all experts divided by the sum over the chosen
    /// experts.
    SoftmaxOfChosen,
    /// Logistic function.
    Sigmoid,
    /// Logistic function, divided by the sum over the chosen experts.
    SigmoidOfChosen,
}

/// Sizes and score function for expert weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertWeightShape {
    /// Number of experts in the layer.
    pub experts: usize,
    /// Number of experts that a token goes through.
    pub chosen: usize,
    /// Score function.
    pub scores: ExpertScores,
    /// Factor on all weights.
    pub scale: f64,
}

values!(ExpertWeightShape);

operation! {
    /// Expert weights.
    pub trait Experts: Runtime {
        /// Writes the weights of the chosen experts.
        ///
        /// - `logits`: `[tokens, experts]` in `f32`
        /// - `chosen`: expert for every slot; `weights`: weight for every slot, in `f32`
        fn expert_weights(
            &self,
            shape: &ExpertWeightShape,
            logits: &Tensor<Self>,
            chosen: &Tensor<Self>,
            weights: &mut Tensor<Self>,
        ) -> Result<()>;
        /// Writes the gradients of all logits.
        ///
        /// - `d_weights`: weight gradient for every slot, in `f32`; `d_logits`: `[tokens, experts]`
        fn expert_weights_backward(
            &self,
            shape: &ExpertWeightShape,
            logits: &Tensor<Self>,
            chosen: &Tensor<Self>,
            d_weights: &Tensor<Self>,
            d_logits: &mut Tensor<Self>,
        ) -> Result<()>;
        /// Writes the scalar product of each token row with the slot rows for the token.
        ///
        /// - `tokens`: `[tokens, columns]`; `rows`: `[slots, columns]` in any order; `places`: row index for
        ///   every slot; `products`: product for every slot, in `f32`
        fn row_products(
            &self,
            columns: usize,
            tokens: &Tensor<Self>,
            rows: &Tensor<Self>,
            places: &Tensor<Self>,
            products: &mut Tensor<Self>,
        ) -> Result<()>;
    }
}

impl Experts for Cpu {
    fn expert_weights(
        &self,
        shape: &ExpertWeightShape,
        logits: &Tensor<Self>,
        chosen: &Tensor<Self>,
        weights: &mut Tensor<Self>,
    ) -> Result<()> {
        let (logits, chosen) = (self.operand(logits)?, chosen.u32());
        self.update(weights, |weights| self.on_pool(|| forward(shape, &logits, chosen, weights)))
    }

    fn expert_weights_backward(
        &self,
        shape: &ExpertWeightShape,
        logits: &Tensor<Self>,
        chosen: &Tensor<Self>,
        d_weights: &Tensor<Self>,
        d_logits: &mut Tensor<Self>,
    ) -> Result<()> {
        let (logits, d_weights, chosen) = (self.operand(logits)?, self.operand(d_weights)?, chosen.u32());
        self.update(d_logits, |d_logits| {
            self.on_pool(|| backward(shape, &logits, chosen, &d_weights, d_logits));
        })
    }

    fn row_products(
        &self,
        columns: usize,
        tokens: &Tensor<Self>,
        rows: &Tensor<Self>,
        places: &Tensor<Self>,
        products: &mut Tensor<Self>,
    ) -> Result<()> {
        let (tokens, rows, places) = (self.operand(tokens)?, self.operand(rows)?, places.u32());
        self.update(products, |products| self.on_pool(|| dots(columns, &tokens, &rows, places, products)))
    }
}

/// Writes the weights of the chosen experts.
///
/// - `logits`: `[tokens, experts]`; `chosen`, `weights`: `[tokens, chosen]`
///
/// # Panics
/// If shapes do not match, or a chosen expert is not in the layer.
pub fn forward<F: Real>(shape: &ExpertWeightShape, logits: &[F], chosen: &[u32], weights: &mut [F]) {
    check(shape, logits.len(), chosen.len(), weights.len());
    let rows = chunk_rows(shape.experts);
    let inputs = logits.par_chunks(rows * shape.experts).zip(chosen.par_chunks(rows * shape.chosen));
    weights.par_chunks_mut(rows * shape.chosen).zip(inputs).for_each(|(weights, (logits, chosen))| {
        let inputs = logits.chunks(shape.experts).zip(chosen.chunks(shape.chosen));
        for (weights, (logits, chosen)) in weights.chunks_mut(shape.chosen).zip(inputs) {
            scores(shape, logits, chosen, weights);
            for weight in weights.iter_mut() {
                *weight *= F::from_f64(shape.scale);
            }
        }
    });
}

/// Writes the unscaled weights of a token.
fn scores<F: Real>(shape: &ExpertWeightShape, logits: &[F], chosen: &[u32], weights: &mut [F]) {
    for (weight, &expert) in weights.iter_mut().zip(chosen) {
        *weight = logits[expert as usize];
    }
    match shape.scores {
        ExpertScores::Softmax => {
            let (most, total) = softmax_parts(logits);
            for weight in weights.iter_mut() {
                *weight = (*weight - most).exp() / total;
            }
        }
        ExpertScores::SoftmaxOfChosen => {
            let (most, total) = softmax_parts(weights);
            for weight in weights.iter_mut() {
                *weight = (*weight - most).exp() / total;
            }
        }
        ExpertScores::Sigmoid => {
            for weight in weights.iter_mut() {
                *weight = weight.sigmoid();
            }
        }
        ExpertScores::SigmoidOfChosen => {
            for weight in weights.iter_mut() {
                *weight = weight.sigmoid();
            }
            let total = weights.iter().copied().sum::<F>() + F::from_f64(SUM_MIN);
            for weight in weights.iter_mut() {
                *weight = *weight / total;
            }
        }
    }
}

/// Returns the maximum logit, and the sum of exponentials of logits minus the maximum.
fn softmax_parts<F: Real>(logits: &[F]) -> (F, F) {
    let most = super::parallel::max(logits);
    (most, logits.iter().map(|&logit| (logit - most).exp()).sum())
}

/// Writes the gradients of all logits, `[tokens, experts]`, from the weight gradients.
///
/// # Panics
/// As [`forward`].
pub fn backward<F: Real>(
    shape: &ExpertWeightShape,
    logits: &[F],
    chosen: &[u32],
    d_weights: &[F],
    d_logits: &mut [F],
) {
    check(shape, logits.len(), chosen.len(), d_weights.len());
    assert_eq!(logits.len(), d_logits.len(), "every logit has a gradient");
    let ExpertWeightShape { experts, chosen: per_token, .. } = *shape;
    let rows = chunk_rows(experts);
    let slots = chosen.par_chunks(rows * per_token).zip(d_weights.par_chunks(rows * per_token));
    let inputs = logits.par_chunks(rows * experts).zip(slots);
    d_logits.par_chunks_mut(rows * experts).zip(inputs).for_each(|(d_logits, (logits, (chosen, d)))| {
        let slots = chosen.chunks(per_token).zip(d.chunks(per_token));
        let inputs = logits.chunks(experts).zip(slots);
        for (d_logits, (logits, (chosen, d_weights))) in d_logits.chunks_mut(experts).zip(inputs) {
            token_backward(shape, logits, (chosen, d_weights), d_logits);
        }
    });
}

fn token_backward<F: Real>(
    shape: &ExpertWeightShape,
    logits: &[F],
    (chosen, d_weights): (&[u32], &[F]),
    d_logits: &mut [F],
) {
    let scale = F::from_f64(shape.scale);
    let slots = || chosen.iter().map(|&expert| expert as usize).zip(d_weights.iter().copied());
    let probability = |(most, total): (F, F), logit: F| (logit - most).exp() / total;
    match shape.scores {
        ExpertScores::Softmax => {
            let of = softmax_parts(logits);
            let along: F = slots().map(|(expert, d)| d * probability(of, logits[expert])).sum();
            for (d_logit, &logit) in d_logits.iter_mut().zip(logits) {
                *d_logit = -(scale * along * probability(of, logit));
            }
            slots().for_each(|(expert, d)| d_logits[expert] += scale * d * probability(of, logits[expert]));
        }
        ExpertScores::SoftmaxOfChosen => {
            d_logits.fill(F::ZERO);
            let own: Vec<F> = slots().map(|(expert, _)| logits[expert]).collect();
            let of = softmax_parts(&own);
            let along: F = slots().map(|(expert, d)| d * probability(of, logits[expert])).sum();
            for (expert, d) in slots() {
                d_logits[expert] = scale * (d - along) * probability(of, logits[expert]);
            }
        }
        ExpertScores::Sigmoid => {
            d_logits.fill(F::ZERO);
            for (expert, d) in slots() {
                let open = logits[expert].sigmoid();
                d_logits[expert] = scale * d * open * (F::ONE - open);
            }
        }
        ExpertScores::SigmoidOfChosen => {
            d_logits.fill(F::ZERO);
            let open = |expert: usize| logits[expert].sigmoid();
            let total = slots().map(|(expert, _)| open(expert)).sum::<F>() + F::from_f64(SUM_MIN);
            let along = slots().map(|(expert, d)| d * open(expert)).sum::<F>() / total;
            for (expert, d) in slots() {
                let open = open(expert);
                d_logits[expert] = scale * (d - along) / total * open * (F::ONE - open);
            }
        }
    }
}

/// Writes the scalar products of token rows and slot rows.
///
/// # Panics
/// If shapes do not match, or a place is beyond the rows.
pub fn dots<F: Real>(columns: usize, tokens: &[F], rows: &[F], places: &[u32], products: &mut [F]) {
    assert!(places.len() == products.len() && rows.len() == columns * places.len(), "every slot has a row");
    let per_token = places.len() / (tokens.len() / columns.max(1)).max(1);
    assert_eq!(per_token * tokens.len(), rows.len(), "tokens have the same number of slots");
    let chunk = chunk_rows(columns);
    products.par_chunks_mut(chunk).enumerate().for_each(|(index, products)| {
        vectorized(
            #[inline(always)]
            || {
                for (product, slot) in products.iter_mut().zip(index * chunk..) {
                    let token = &tokens[slot / per_token * columns..][..columns];
                    *product = dot(token, &rows[places[slot] as usize * columns..][..columns]);
                }
            },
        );
    });
}

fn check(shape: &ExpertWeightShape, logits: usize, chosen: usize, weights: usize) {
    let ExpertWeightShape { experts, chosen: per_token, .. } = *shape;
    assert!(0 < per_token && per_token <= experts, "a token goes through some of the experts");
    assert_eq!(logits / experts * experts, logits, "a row has a logit per expert");
    assert!(chosen == logits / experts * per_token && chosen == weights, "every slot has a weight");
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::every_operation::{COLUMNS, LEN, ROWS, Results, changed, input};
    use super::super::finite_difference::{check, numbers, project};
    use super::*;
    use crate::ops::Device;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let logits = input(d, LEN, 1)?;
        let chosen = d.upload_indices(&[3, 1, 0, 2, 1, 2, 3, 0, 0, 1, 2, 3])?;
        let d_weights = input(d, 2 * ROWS, 2)?;
        let mut all = Results::new();
        for (name, gradient, scores) in [
            ("expert softmax", "expert softmax backward", ExpertScores::Softmax),
            ("chosen softmax", "chosen softmax backward", ExpertScores::SoftmaxOfChosen),
            ("expert sigmoid", "expert sigmoid backward", ExpertScores::Sigmoid),
            ("chosen sigmoid", "chosen sigmoid backward", ExpertScores::SigmoidOfChosen),
        ] {
            let shape = ExpertWeightShape { experts: COLUMNS, chosen: 2, scores, scale: 1.5 };
            all.push((name, changed(d, 2 * ROWS, 3, |w| d.expert_weights(&shape, &logits, &chosen, w))?));
            let run =
                |dx: &mut Tensor<D>| d.expert_weights_backward(&shape, &logits, &chosen, &d_weights, dx);
            all.push((gradient, changed(d, LEN, 4, run)?));
        }
        let rows = input(d, 2 * LEN, 5)?;
        let places = d.upload_indices(&[3, 1, 0, 2, 11, 4, 5, 6, 7, 10, 9, 8])?;
        let run = |products: &mut Tensor<D>| d.row_products(COLUMNS, &logits, &rows, &places, products);
        all.push(("row products", changed(d, 2 * ROWS, 6, run)?));
        Ok(all)
    }

    const ALL: [ExpertScores; 4] = [
        ExpertScores::Softmax,
        ExpertScores::SoftmaxOfChosen,
        ExpertScores::Sigmoid,
        ExpertScores::SigmoidOfChosen,
    ];
    /// Experts of two tokens.
    const CHOSEN: [u32; 6] = [4, 1, 0, 2, 3, 4];

    fn shape(scores: ExpertScores) -> ExpertWeightShape {
        ExpertWeightShape { experts: 5, chosen: 3, scores, scale: 2.5 }
    }

    #[test]
    fn the_gradients_match_finite_differences() {
        let (logits, d) = (numbers(10, 1), numbers(6, 2));
        for scores in ALL {
            let mut d_logits = vec![f64::NAN; 10];
            backward(&shape(scores), &logits, &CHOSEN, &d, &mut d_logits);
            check("logits", &logits, &d_logits, |logits| {
                let mut weights = vec![f64::NAN; 6];
                forward(&shape(scores), logits, &CHOSEN, &mut weights);
                project(&weights, &d)
            });
        }
    }

    #[test]
    fn weights_of_the_chosen_experts_add_up_to_the_scale() {
        let logits = numbers(10, 3);
        for scores in [ExpertScores::SoftmaxOfChosen, ExpertScores::SigmoidOfChosen] {
            let mut weights = vec![f64::NAN; 6];
            forward(&shape(scores), &logits, &CHOSEN, &mut weights);
            let sums: Vec<f64> = weights.chunks(3).map(|token| token.iter().sum()).collect();
            assert!(sums.iter().all(|sum| (sum - 2.5).abs() < 1e-12), "{sums:?}");
        }
        let mut all = vec![f64::NAN; 5];
        let shape = ExpertWeightShape { chosen: 5, scale: 1.0, ..shape(ExpertScores::Softmax) };
        forward(&shape, &logits[..5], &[0, 1, 2, 3, 4], &mut all);
        assert!((all.iter().sum::<f64>() - 1.0).abs() < 1e-12);
    }

    #[test]
    fn products_are_of_a_token_and_the_rows_of_its_slots() {
        let (tokens, rows) = ([1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 0.0]);
        let mut products = [f64::NAN; 4];
        dots(2, &tokens, &rows, &[2, 0, 1, 3], &mut products);
        assert_eq!(products, [3.0, 1.0, 4.0, 6.0]);
    }

    #[test]
    #[should_panic(expected = "every slot has a weight")]
    fn slots_without_a_weight_are_refused() {
        forward(&shape(ExpertScores::Sigmoid), &[0.0; 10], &CHOSEN, &mut [0.0; 5]);
    }
}
