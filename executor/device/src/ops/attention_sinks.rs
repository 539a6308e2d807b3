//! Sinks of attention: a learned logit per head that takes part in the softmax and has no value.
//!
//! A sink makes the probabilities of a row add up to less than 1: it scales the output of attention without
//! it, and raises the log-sum-exp of the row. Attention's backward pass needs no change: given output and
//! log-sum-exp with sinks, it computes the probabilities with sinks.
//!
//! # Source
//! Xiao et al.: "Efficient Streaming Language Models with Attention Sinks", 2023, arXiv:2309.17453; learned
//! logits: OpenAI: "gpt-oss-120b & gpt-oss-20b Model Card", 2025, arXiv:2508.10925.

use rayon::prelude::*;

use super::parallel::{chunk_rows, dot, sum_chunks};
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

/// Sinks of attention.
pub trait AttentionSinks: Runtime {
    /// Changes the output and the log-sum-exp of attention to those with sinks.
    ///
    /// - `sinks`: `[heads]`; `output`: `[tokens, heads * head_dim]`; `log_sums`: `[tokens, heads]`
    fn attention_sinks(
        &self,
        sinks: &Tensor<Self>,
        output: &mut Tensor<Self>,
        log_sums: &mut Tensor<Self>,
    ) -> Result<()>;
    /// Accumulates the gradient of the sinks.
    ///
    /// - `forward`: output and log-sum-exp with sinks
    fn attention_sinks_backward(
        &self,
        sinks: &Tensor<Self>,
        forward: (&Tensor<Self>, &Tensor<Self>),
        d_output: &Tensor<Self>,
        d_sinks: &mut Tensor<Self>,
    ) -> Result<()>;
}

impl AttentionSinks for Cpu {
    fn attention_sinks(
        &self,
        sinks: &Tensor<Self>,
        output: &mut Tensor<Self>,
        log_sums: &mut Tensor<Self>,
    ) -> Result<()> {
        let (sinks, log_sums) = (self.operand(sinks)?, log_sums.f32_mut());
        self.update(output, |output| self.on_pool(|| forward(&sinks, output, log_sums)))
    }

    fn attention_sinks_backward(
        &self,
        sinks: &Tensor<Self>,
        (output, log_sums): (&Tensor<Self>, &Tensor<Self>),
        d_output: &Tensor<Self>,
        d_sinks: &mut Tensor<Self>,
    ) -> Result<()> {
        let (sinks, output, d_output) = (self.operand(sinks)?, self.operand(output)?, self.operand(d_output)?);
        self.update(d_sinks, |d_sinks| {
            self.on_pool(|| backward(&sinks, (&output, log_sums.f32()), &d_output, d_sinks));
        })
    }
}

/// Changes the output and the log-sum-exp of attention to those with sinks.
///
/// - `sinks`: `[heads]`; `output`: `[tokens, heads * head_dim]`; `log_sums`: `[tokens, heads]`
///
/// # Panics
/// If shapes do not agree.
pub fn forward<F: Real>(sinks: &[F], output: &mut [F], log_sums: &mut [F]) {
    let width = width(sinks, output.len(), log_sums.len());
    let chunk = chunk_rows(width) * sinks.len();
    let rows = output.par_chunks_mut(chunk * width / sinks.len()).zip(log_sums.par_chunks_mut(chunk));
    rows.for_each(|(output, log_sums)| {
        let heads = output.chunks_mut(width / sinks.len()).zip(log_sums);
        for ((output, log_sum), &sink) in heads.zip(sinks.iter().cycle()) {
            // of the sums of exponentials, the share of the keys
            let share = (*log_sum - sink).sigmoid();
            output.iter_mut().for_each(|value| *value *= share);
            *log_sum = joined(*log_sum, sink);
        }
    });
}

/// Logarithm of the sum of two exponentials.
fn joined<F: Real>(a: F, b: F) -> F {
    let (most, least) = if a > b { (a, b) } else { (b, a) };
    most + F::from_f64(libm::log1p((least - most).to_f64().exp()))
}

/// Accumulates the gradient of the sinks.
///
/// # Panics
/// If shapes do not agree.
pub fn backward<F: Real>(
    sinks: &[F],
    (output, log_sums): (&[F], &[F]),
    d_output: &[F],
    d_sinks: &mut [F],
) {
    let width = width(sinks, output.len(), log_sums.len());
    assert!(output.len() == d_output.len() && sinks.len() == d_sinks.len(), "shapes agree");
    let (heads, rows) = (sinks.len(), chunk_rows(width));
    let (tokens, head_dim) = (log_sums.len() / heads, width / heads);
    sum_chunks(tokens.div_ceil(rows), d_sinks, |chunk, sums| {
        for token in chunk * rows..((chunk + 1) * rows).min(tokens) {
            for (head, sum) in sums.iter_mut().enumerate() {
                let at = token * heads + head;
                let of_head = at * head_dim..(at + 1) * head_dim;
                let along = dot(&output[of_head.clone()], &d_output[of_head]);
                *sum -= (sinks[head] - log_sums[at]).exp() * along;
            }
        }
    });
}

/// Width of a row of all heads.
fn width<F>(sinks: &[F], output: usize, log_sums: usize) -> usize {
    let heads = sinks.len().max(1);
    let tokens = (log_sums / heads).max(1);
    let width = output / tokens;
    assert!(log_sums.is_multiple_of(heads) && output == log_sums / heads * width, "every head has a sum");
    assert!(width.is_multiple_of(heads), "heads have one width");
    width.max(heads)
}

#[cfg(test)]
mod tests {
    use super::super::finite_difference::{check, numbers, project};
    use super::*;

    const HEADS: usize = 2;
    const KEYS: usize = 3;

    /// Output and log-sum-exp of attention over 3 keys with values of width 2.
    fn attention(scores: &[f64], values: &[f64], sinks: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (mut output, mut log_sums) = (Vec::new(), Vec::new());
        for scores in scores.chunks(KEYS) {
            let total: f64 = scores.iter().map(|score| score.exp()).sum();
            log_sums.push(total.ln());
            for column in 0..2 {
                let of_keys = scores.iter().zip(values.chunks(2));
                output.push(of_keys.map(|(score, value)| score.exp() / total * value[column]).sum());
            }
        }
        forward(sinks, &mut output, &mut log_sums);
        (output, log_sums)
    }

    #[test]
    fn a_sink_takes_its_share_of_the_softmax() {
        let (scores, values, sinks) = (numbers(4 * KEYS, 1), numbers(6, 2), [0.3, -0.7]);
        let (output, log_sums) = attention(&scores, &values, &sinks);
        for (row, scores) in scores.chunks(KEYS).enumerate() {
            let all: f64 = scores.iter().chain([&sinks[row % HEADS]]).map(|score| score.exp()).sum();
            let of_keys = scores.iter().zip(values.chunks(2));
            let truth: f64 = of_keys.map(|(score, value)| score.exp() / all * value[0]).sum();
            assert!((output[2 * row] - truth).abs() < 1e-12 && (log_sums[row] - all.ln()).abs() < 1e-12);
        }
    }

    #[test]
    fn the_gradient_matches_finite_differences() {
        let (scores, values, sinks) = (numbers(4 * KEYS, 1), numbers(6, 2), numbers(HEADS, 3));
        let d_output = numbers(8, 4);
        let (output, log_sums) = attention(&scores, &values, &sinks);
        let mut d_sinks = vec![0.0; HEADS];
        backward(&sinks, (&output, &log_sums), &d_output, &mut d_sinks);
        check("sinks", &sinks, &d_sinks, |sinks| project(&attention(&scores, &values, sinks).0, &d_output));
    }
}
