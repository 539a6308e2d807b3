//! Attention over packed sequences, causal or full, with grouped queries.
//!
//! A row holds queries, then keys, then values: `[tokens, (heads + 2 * kv_heads) * head_dim]`. Tokens attend
//! within their *segment* only: a sample of a pack, an image, a window of an image. Scores exist for a tile
//! of `TILE_ROWS` queries of one segment at a time, never for a whole pack. Forward keeps the log-sum-exp of
//! every row, from which backward recomputes the probabilities.
//!
//! # Source
//! Dao et al.: "`FlashAttention`", 2022, arXiv:2205.14135, for the saved tensors; Ainslie et al.: "GQA",
//! 2023, arXiv:2305.13245.

mod backward;
mod forward;

pub use backward::backward;
pub use forward::forward;

use super::parallel;
use super::real::Real;
use crate::ops::gemm::{GemmShape, MatrixLayout, gemm};

/// Number of queries whose scores exist at the same time.
const TILE_ROWS: usize = 64;

/// Sizes and mask of an attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Factor on the scores.
    pub scale: f64,
    /// Whether a token attends only to itself and earlier tokens.
    pub is_causal: bool,
}

impl AttentionShape {
    /// Elements of a row of queries, keys and values.
    #[must_use]
    pub const fn row(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Elements of a row of the output.
    #[must_use]
    pub const fn output(&self) -> usize {
        self.heads * self.head_dim
    }

    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// First columns of a query head, and of its keys and values.
    fn columns(&self, head: usize) -> (usize, usize, usize) {
        let keys = self.heads * self.head_dim + head / self.group() * self.head_dim;
        (head * self.head_dim, keys, keys + self.kv_heads * self.head_dim)
    }

    fn check<F>(&self, segments: &[u32], qkv: &[F], output: &[F], sums: &[F]) {
        let tokens = segments.last().map_or(0, |&tokens| tokens as usize);
        assert!(self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads), "heads share keys evenly");
        assert!(
            segments.first().is_none_or(|&first| first == 0) && segments.is_sorted(),
            "segments start at 0"
        );
        assert_eq!(qkv.len(), tokens * self.row(), "segments end with the tokens");
        assert_eq!(output.len(), tokens * self.output(), "the output has a row for every token");
        assert_eq!(sums.len(), tokens * self.heads, "every row of every head has its sum");
    }
}

/// Range of queries in one segment.
#[derive(Debug, Clone, Copy)]
struct Tile {
    segment: (usize, usize),
    start: usize,
    end: usize,
}

impl Tile {
    /// Returns the tiles of a segment, in order.
    fn in_segment(start: usize, end: usize) -> impl Iterator<Item = Self> {
        (start..end).step_by(TILE_ROWS).map(move |first| Self {
            segment: (start, end),
            start: first,
            end: (first + TILE_ROWS).min(end),
        })
    }

    fn rows(&self) -> usize {
        self.end - self.start
    }

    /// Number of keys that any query of the tile attends to; they start with the segment.
    fn keys(&self, is_causal: bool) -> usize {
        (if is_causal { self.end } else { self.segment.1 }) - self.segment.0
    }

    /// Number of keys that a query of the tile attends to.
    fn visible(&self, row: usize, is_causal: bool) -> usize {
        if is_causal { self.start + row + 1 - self.segment.0 } else { self.segment.1 - self.segment.0 }
    }
}

/// Writes the scaled scores of a tile, `[rows, keys]`.
fn scores<F: Real>(shape: &AttentionShape, tile: Tile, head: usize, qkv: &[F], scores: &mut [F]) {
    let (query, key, _) = shape.columns(head);
    let keys = tile.keys(shape.is_causal);
    let sizes = GemmShape { rows: tile.rows(), columns: keys, inner: shape.head_dim };
    let rows = MatrixLayout::rows(shape.row());
    let a = (qkv, rows.at(tile.start * shape.row() + query));
    let b = (qkv, rows.transposed().at(tile.segment.0 * shape.row() + key));
    gemm(1, sizes, F::from_f64(shape.scale), a, b, F::ZERO, (scores, MatrixLayout::rows(keys)));
}

/// Grows a buffer to at least this length and returns the slice.
fn grown<F: Real>(buffer: &mut Vec<F>, len: usize) -> &mut [F] {
    if buffer.len() < len {
        buffer.resize(len, F::ZERO);
    }
    &mut buffer[..len]
}

#[cfg(test)]
mod tests;
