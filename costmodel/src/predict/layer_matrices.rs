//! Lists the matrices of one layer, with the width that one rank of a TP group multiplies.
//!
//! # Source
//! Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053, section 3: query, key and value projections and the
//! first matrices of the MLP are cut by columns, output projection and last matrix of the MLP by rows.

use crate::model::{EncoderSpec, LlmSpec, Mlp};

/// Matrices of one layer that have the same smaller dimension on a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LayerMatrix {
    /// Elements of the whole matrices.
    pub(super) weights: f64,
    /// Smaller dimension on one rank.
    pub(super) local_width: f64,
}

/// Returns the matrices of an encoder layer at a TP degree.
pub(super) fn encoder_matrices(spec: &EncoderSpec, tp: u32) -> [LayerMatrix; 3] {
    matrices(spec.hidden, [spec.hidden, spec.hidden], spec.ffn, spec.mlp, tp)
}

/// Returns the matrices of an LLM layer at a TP degree.
pub(super) fn llm_matrices(spec: &LlmSpec, tp: u32) -> [LayerMatrix; 3] {
    let [queries, keys] = [spec.heads, spec.kv_heads].map(|heads| heads.saturating_mul(spec.head_dim));
    matrices(spec.hidden, [queries, keys], spec.ffn, Mlp::Gated, tp)
}

/// Lists query, key and value projections, which run as one, output projection, and MLP.
fn matrices(hidden: u32, [queries, keys]: [u32; 2], ffn: u32, mlp: Mlp, tp: u32) -> [LayerMatrix; 3] {
    let hidden = f64::from(hidden);
    let [queries, keys, ffn] = [queries, keys, ffn].map(f64::from);
    let matrix = |count: f64, cut: f64| LayerMatrix {
        weights: count * hidden * cut,
        local_width: hidden.min(cut / f64::from(tp.max(1))),
    };
    [matrix(1.0, queries + 2.0 * keys), matrix(1.0, queries), matrix(f64::from(mlp.matrices()), ffn)]
}
