//! Attention sinks: a learned logit per head takes part in every softmax, without a value.
//!
//! A softmax with an additional logit equals the softmax without it, multiplied by the share of the keys.
//! Sinks therefore work after any attention: they scale the output and adjust the log-sum-exp, and the
//! attention backward, which reads both, is unchanged.
//!
//! # Source
//! Xiao et al.: "Efficient Streaming Language Models with Attention Sinks", 2023, arXiv:2309.17453, section
//! 3.3; as in gpt-oss.

use rayon::prelude::*;

use super::attention::AttentionShape;
use super::operation::operation;
use super::parallel::{chunk_rows, dot, sum_chunks};
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Runtime, Tensor};

operation! {
    /// Attention sinks.
    pub trait AttentionSinks: Runtime {
        /// Adds a sink per head to an attention softmax: changes output and log-sum-exp.
        fn attention_sinks(
            &self,
            shape: &AttentionShape,
            sinks: &Tensor<Self>,
            output: &mut Tensor<Self>,
            log_sums: &mut Tensor<Self>,
        ) -> Result<()>;
        /// Accumulates the sink gradients.
        ///
        /// - `output`: output and log-sum-exp with the sinks
        fn attention_sinks_backward(
            &self,
            shape: &AttentionShape,
            sinks: &Tensor<Self>,
            output: (&Tensor<Self>, &Tensor<Self>),
            d_output: &Tensor<Self>,
            d_sinks: &mut Tensor<Self>,
        ) -> Result<()>;
    }
}

impl AttentionSinks for Cpu {
    fn attention_sinks(
        &self,
        shape: &AttentionShape,
        sinks: &Tensor<Self>,
        output: &mut Tensor<Self>,
        log_sums: &mut Tensor<Self>,
    ) -> Result<()> {
        let (sinks, log_sums) = (self.operand(sinks)?, log_sums.f32_mut());
        self.update(output, |output| self.on_pool(|| forward(shape, &sinks, output, log_sums)))
    }

    fn attention_sinks_backward(
        &self,
        shape: &AttentionShape,
        sinks: &Tensor<Self>,
        (output, log_sums): (&Tensor<Self>, &Tensor<Self>),
        d_output: &Tensor<Self>,
        d_sinks: &mut Tensor<Self>,
    ) -> Result<()> {
        let (sinks, output, d_output) =
            (self.operand(sinks)?, self.operand(output)?, self.operand(d_output)?);
        self.update(d_sinks, |d_sinks| {
            self.on_pool(|| backward(shape, &sinks, (&output, log_sums.f32()), &d_output, d_sinks));
        })
    }
}

/// Scales the output by the share of the keys, and adds the sink to the log-sum-exp.
///
/// - `sinks`: `[heads]`, `output`: `[tokens, heads * head_dim]`, `log_sums`: `[tokens, heads]`
pub fn forward<F: Real>(shape: &AttentionShape, sinks: &[F], output: &mut [F], log_sums: &mut [F]) {
    check(shape, sinks, output, log_sums);
    let rows = output.par_chunks_mut(shape.output()).zip(log_sums.par_chunks_mut(shape.heads));
    rows.for_each(|(output, log_sums)| {
        let heads = output.chunks_mut(shape.head_dim).zip(log_sums).zip(sinks);
        for ((output, log_sum), &sink) in heads {
            let most = if *log_sum > sink { *log_sum } else { sink };
            let sum = (*log_sum - most).exp() + (sink - most).exp();
            let with_sink = most + F::from_f64(libm::log(sum.to_f64()));
            let share = (*log_sum - with_sink).exp();
            for output in output.iter_mut() {
                *output *= share;
            }
            *log_sum = with_sink;
        }
    });
}

/// Accumulates the sink gradients: minus the sink probability times the product of output and output
/// gradient.
pub fn backward<F: Real>(
    shape: &AttentionShape,
    sinks: &[F],
    (output, log_sums): (&[F], &[F]),
    d_output: &[F],
    d_sinks: &mut [F],
) {
    check(shape, sinks, output, log_sums);
    assert!(d_output.len() == output.len() && d_sinks.len() == sinks.len(), "shapes agree");
    let rows = chunk_rows(shape.output());
    sum_chunks((log_sums.len() / shape.heads).div_ceil(rows), d_sinks, |index, sums| {
        let products = output.chunks(shape.output()).zip(d_output.chunks(shape.output()));
        let of_chunk = products.zip(log_sums.chunks(shape.heads)).skip(index * rows).take(rows);
        for ((output, d_output), log_sums) in of_chunk {
            let heads = output.chunks(shape.head_dim).zip(d_output.chunks(shape.head_dim));
            for (((output, d_output), &log_sum), (sum, &sink)) in
                heads.zip(log_sums).zip(sums.iter_mut().zip(sinks))
            {
                *sum -= (sink - log_sum).exp() * dot(output, d_output);
            }
        }
    });
}

fn check<F>(shape: &AttentionShape, sinks: &[F], output: &[F], log_sums: &[F]) {
    assert_eq!(sinks.len(), shape.heads, "every head has a sink");
    assert_eq!(output.len(), log_sums.len() * shape.head_dim, "every row of every head has its sum");
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::attention;
    use super::super::every_operation::{ROWS, Results, changed, input};
    use super::super::finite_difference::{check, numbers, project};
    use super::*;
    use crate::ops::Device;
    use crate::runtime::Dtype;
    use crate::segments::HostSegments;
    use crate::segments::Segments;

    pub(crate) fn cases<D: Device>(d: &D) -> Result<Results> {
        let shape = AttentionShape { heads: 2, kv_heads: 1, head_dim: 2, scale: 0.7, is_causal: true };
        let segments = Segments::new(d, &[0, 4, ROWS as u32])?;
        let (mut log_sums, len) = (d.alloc_as(Dtype::F32, ROWS * shape.heads)?, ROWS * shape.output());
        let qkv = input(d, ROWS * shape.row(), 1)?;
        d.attention(&shape, &segments, &qkv, &mut d.alloc(len)?, &mut log_sums)?;
        let (output, d_output) = (input(d, len, 3)?, input(d, len, 4)?);
        let (sinks, mut d_sinks) = (input(d, shape.heads, 5)?, input(d, shape.heads, 6)?);
        d.attention_sinks_backward(&shape, &sinks, (&output, &log_sums), &d_output, &mut d_sinks)?;
        let run = |output: &mut Tensor<D>| d.attention_sinks(&shape, &sinks, output, &mut log_sums);
        Ok(vec![
            ("attention sinks backward", d.download(&d_sinks)?),
            ("attention sinks", changed(d, len, 3, run)?),
        ])
    }

    const SHAPE: AttentionShape =
        AttentionShape { heads: 4, kv_heads: 2, head_dim: 3, scale: 0.7, is_causal: true };
    const STARTS: [u32; 3] = [0, 5, 30];

    fn run(qkv: &[f64], sinks: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (mut output, mut log_sums) = (vec![0.0; 30 * SHAPE.output()], vec![0.0; 30 * SHAPE.heads]);
        attention::forward(&SHAPE, &HostSegments::new(&STARTS), qkv, &mut output, &mut log_sums);
        forward(&SHAPE, sinks, &mut output, &mut log_sums);
        (output, log_sums)
    }

    #[test]
    fn a_first_token_has_the_share_of_its_own_score() {
        let (qkv, sinks) = (numbers(30 * SHAPE.row(), 1), numbers(SHAPE.heads, 2));
        let (output, _) = run(&qkv, &sinks);
        for (head, sink) in sinks.iter().enumerate() {
            let (query, key) = (&qkv[head * 3..][..3], &qkv[(4 + head / 2) * 3..][..3]);
            let share = 1.0 / (1.0 + (sink - SHAPE.scale * project(query, key)).exp());
            let value = &qkv[(6 + head / 2) * 3..][..3];
            let found = &output[head * 3..][..3];
            assert!(found.iter().zip(value).all(|(found, value)| (found - share * value).abs() < 1e-12));
        }
    }

    #[test]
    fn gradients_match_finite_differences() {
        let (qkv, sinks) = (numbers(30 * SHAPE.row(), 1), numbers(SHAPE.heads, 2));
        let dy = numbers(30 * SHAPE.output(), 3);
        let (output, log_sums) = run(&qkv, &sinks);
        let mut d_sinks = vec![0.0; SHAPE.heads];
        backward(&SHAPE, &sinks, (&output, &log_sums), &dy, &mut d_sinks);
        check("sinks", &sinks, &d_sinks, |sinks| project(&run(&qkv, sinks).0, &dy));
        let (mut scratch, mut d_qkv) = (vec![0.0; qkv.len()], vec![0.0; qkv.len()]);
        let saved = (&qkv[..], &output[..], &log_sums[..]);
        attention::backward(&SHAPE, &HostSegments::new(&STARTS), saved, &dy, &mut scratch, &mut d_qkv);
        check("queries, keys, values", &qkv, &d_qkv, |qkv| project(&run(qkv, &sinks).0, &dy));
    }
}
