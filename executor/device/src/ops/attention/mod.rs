//! Attention over packed sequences, causal, full or by key ranges, with grouped queries.
//!
//! A row holds queries, then keys, then values: `[tokens, (heads + 2 * kv_heads) * head_dim]`. Tokens attend
//! only within their *segment*: a packed sample, an image, an image window. Scores exist for one query tile
//! in one segment at a time ([`Tile`]), never for a complete pack; a thread packs the tile operands and
//! multiplies them in blocks, skipping masked blocks. Forward keeps the log-sum-exp for every row, from which
//! backward recomputes the probabilities.
//!
//! # Source
//! Dao et al.: "`FlashAttention`", 2022, arXiv:2205.14135, for the saved tensors; Ainslie et al.: "GQA",
//! 2023, arXiv:2305.13245.

mod backward;
mod forward;
mod mask;
mod product;

pub use backward::backward;
pub use forward::forward;

use super::argument::{Argument, Operands, Places, Queues, values};
use super::operation::operation;
use super::parallel;
use super::real::Real;
use crate::cpu::Cpu;
use crate::error::Result;
use crate::runtime::{Dtype, Runtime, Tensor};
use crate::segments::{HostSegments, Segments, Tile};

operation! {
    /// Attention over packed sequences.
    pub trait Attend: Runtime {
        /// Computes attention within segments.
        ///
        /// - `log_sums`: `f32`, the log-sum-exp for every row and head
        fn attention(
            &self,
            shape: &AttentionShape,
            segments: &Segments<Self>,
            qkv: &Tensor<Self>,
            output: &mut Tensor<Self>,
            log_sums: &mut Tensor<Self>,
        ) -> Result<()>;
        /// Returns query, key and value gradients.
        ///
        /// - `output`: forward output and log-sum-exp
        fn attention_backward(
            &self,
            shape: &AttentionShape,
            segments: &Segments<Self>,
            qkv: &Tensor<Self>,
            output: (&Tensor<Self>, &Tensor<Self>),
            d_output: &Tensor<Self>,
        ) -> Result<Tensor<Self>> in self.alloc(qkv.len());
    }
}

/// The queued work computes the segments of the inner device again.
impl<Q: Queues> Argument<Q> for &Segments<Q> {
    type Kept = HostSegments;
    type Opened<'a> = Segments<Q::Inner>;
    type Inner<'a> = &'a Segments<Q::Inner>;

    fn keep(self, places: &mut Places<Q>) -> HostSegments {
        places.read(self.starts());
        self.host().clone()
    }

    fn open<'a>(kept: HostSegments, operands: &mut Operands<'a, Q::Inner>) -> Result<Self::Opened<'a>> {
        operands.read();
        Segments::of(operands.inner, kept)
    }

    fn lend<'b, 'a: 'b>(opened: &'b mut Self::Opened<'a>) -> Self::Inner<'b> {
        opened
    }
}

impl Attend for Cpu {
    fn attention(
        &self,
        shape: &AttentionShape,
        segments: &Segments<Self>,
        qkv: &Tensor<Self>,
        output: &mut Tensor<Self>,
        log_sums: &mut Tensor<Self>,
    ) -> Result<()> {
        let (qkv, log_sums) = (self.operand(qkv)?, log_sums.f32_mut());
        self.update(output, |output| {
            self.on_pool(|| forward(shape, segments.host(), &qkv, output, log_sums));
        })
    }

    fn attention_backward(
        &self,
        shape: &AttentionShape,
        segments: &Segments<Self>,
        qkv: &Tensor<Self>,
        (output, log_sums): (&Tensor<Self>, &Tensor<Self>),
        d_output: &Tensor<Self>,
    ) -> Result<Tensor<Self>> {
        let mut scratch = self.alloc_as(Dtype::F32, qkv.len())?;
        let mut d_qkv = self.alloc(qkv.len())?;
        let (qkv, output, d_output) = (self.operand(qkv)?, self.operand(output)?, self.operand(d_output)?);
        let (log_sums, scratch) = (log_sums.f32(), scratch.f32_mut());
        let segments = segments.host();
        self.update(&mut d_qkv, |d_qkv| {
            let saved = (&*qkv, &*output, log_sums);
            self.on_pool(|| backward(shape, segments, saved, &d_output, scratch, d_qkv));
        })?;
        Ok(d_qkv)
    }
}

/// Attention sizes and mask.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Head width.
    pub head_dim: usize,
    /// Score factor.
    pub scale: f64,
    /// Whether a token attends only to itself and earlier tokens; segments with key ranges override it.
    pub is_causal: bool,
}

values!(AttentionShape);

impl AttentionShape {
    /// Returns the number of elements in a query-key-value row.
    #[must_use]
    pub const fn row(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Returns the number of elements in an output row.
    #[must_use]
    pub const fn output(&self) -> usize {
        self.heads * self.head_dim
    }

    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns the first columns of a query head and of the matching keys and values.
    fn columns(&self, head: usize) -> (usize, usize, usize) {
        let keys = self.heads * self.head_dim + head / self.group() * self.head_dim;
        (head * self.head_dim, keys, keys + self.kv_heads * self.head_dim)
    }

    fn check<F>(&self, segments: &HostSegments, qkv: &[F], output: &[F], sums: &[F]) {
        let tokens = segments.rows();
        assert!(self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads), "heads share keys evenly");
        assert_eq!(qkv.len(), tokens * self.row(), "segments end with the tokens");
        assert_eq!(output.len(), tokens * self.output(), "the output has a row for every token");
        assert_eq!(sums.len(), tokens * self.heads, "every row of every head has its sum");
    }
}

/// Returns the number of elements from the scores of a key to the scores of the next key: complete query
/// panels, and room for the last row block.
const fn scores_stride(queries: usize) -> usize {
    (queries.div_ceil(product::LANES) + 1) * product::LANES
}

/// Grows a buffer to at least this length and returns the slice.
fn grown<F: Real>(buffer: &mut Vec<F>, len: usize) -> &mut [F] {
    if buffer.len() < len {
        buffer.resize(len, F::ZERO);
    }
    &mut buffer[..len]
}

#[cfg(test)]
pub(crate) mod tests;
