//! Lists a layer's matrices, with the width that a rank in a TP group multiplies.
//!
//! # Source
//! Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053, section 3: query, key and value projections and the
//! first MLP matrices are cut by columns, output projection and last MLP matrix by rows.

use super::layer_flops::sparse_share;
use crate::model::{EncoderSpec, LlmSpec};

/// Layer matrices that have the same smaller dimension on a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LayerMatrix {
    /// Elements in the whole matrices that a token is multiplied with, mean over layers.
    pub(super) weights: f64,
    /// Smaller dimension on a rank.
    pub(super) local_width: f64,
    /// Share of the elements that a rank multiplies.
    pub(super) rank_share: f64,
}

/// Returns an encoder layer's matrices at a TP degree.
pub(super) fn encoder_matrices(spec: &EncoderSpec, tp: u32) -> Vec<LayerMatrix> {
    let cut = Cut { hidden: spec.hidden, tp: tp.max(1) };
    let matrices = f64::from(spec.mlp.matrices());
    vec![cut.matrix(1.0, 3 * spec.hidden), cut.matrix(1.0, spec.hidden), cut.matrix(matrices, spec.ffn)]
}

/// Returns an LLM layer's matrices at a TP degree: a mean layer if only some layers have experts.
///
/// Experts are cut like an MLP; the router and the projections into latent vectors are on every rank.
pub(super) fn llm_matrices(spec: &LlmSpec, tp: u32) -> Vec<LayerMatrix> {
    let cut = Cut { hidden: spec.hidden, tp: tp.max(1) };
    let mut all = attention_matrices(spec, cut);
    let sparse = sparse_share(spec);
    if sparse < 1.0 {
        all.push(cut.matrix(3.0 * (1.0 - sparse), spec.ffn));
    }
    if let Some(experts) = spec.experts.filter(|_| sparse > 0.0) {
        all.push(cut.matrix(3.0 * sparse * f64::from(experts.experts_per_token), experts.ffn));
        all.push(cut.whole(sparse, experts.experts));
        if experts.shared_ffn > 0 {
            all.push(cut.matrix(3.0 * sparse, experts.shared_ffn));
        }
    }
    all
}

/// Lists query, key and value projections, which run as a single matrix, and the output projection.
fn attention_matrices(spec: &LlmSpec, cut: Cut) -> Vec<LayerMatrix> {
    let [queries, keys] = [spec.heads, spec.kv_heads].map(|heads| heads.saturating_mul(spec.head_dim));
    let Some(latent) = spec.latent else {
        return vec![
            cut.matrix(1.0, queries.saturating_add(keys.saturating_mul(2))),
            cut.matrix(1.0, queries),
        ];
    };
    let heads = |width: u32| spec.heads.saturating_mul(width);
    let from = |rank: u32| Cut { hidden: rank, ..cut };
    let mut all = match latent.query_rank {
        Some(rank) => vec![cut.whole(1.0, rank), from(rank).matrix(1.0, queries)],
        None => vec![cut.matrix(1.0, queries)],
    };
    all.extend([
        cut.whole(1.0, latent.kv_rank.saturating_add(latent.rotated_dim)),
        from(latent.kv_rank).matrix(1.0, heads(latent.plain_dim.saturating_add(latent.value_dim))),
        cut.matrix(1.0, heads(latent.value_dim)),
    ]);
    all
}

/// Common matrix width, and number of ranks that share the matrices.
#[derive(Clone, Copy)]
struct Cut {
    hidden: u32,
    tp: u32,
}

impl Cut {
    /// Cuts some matrices along their second width.
    fn matrix(self, count: f64, width: u32) -> LayerMatrix {
        let [hidden, width, tp] = [self.hidden, width, self.tp].map(f64::from);
        LayerMatrix {
            weights: count * hidden * width,
            local_width: hidden.min(width / tp),
            rank_share: 1.0 / tp,
        }
    }

    /// Keeps some matrices whole on every rank.
    fn whole(self, count: f64, width: u32) -> LayerMatrix {
        LayerMatrix { rank_share: 1.0, ..Self { tp: 1, ..self }.matrix(count, width) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ExpertsDetails, ExpertsSpec, LayerSet, ModelSpec};

    /// A mean layer's matrices have as many weights as FLOPs count, and ranks share the cut matrices.
    #[test]
    fn matrices_have_the_weights_that_flops_count() {
        let mut spec = ModelSpec::preset("tiny").unwrap().llm;
        spec.experts = Some(ExpertsSpec {
            layers: LayerSet::range(1, spec.layers),
            experts: 16,
            experts_per_token: 2,
            ffn: 96,
            shared_ffn: 192,
            details: ExpertsDetails::NONE,
        });
        for tp in [1, 2] {
            let matrices = llm_matrices(&spec, tp);
            let weights: f64 = matrices.iter().map(|matrix| matrix.weights).sum();
            let dense = spec.attention_weights() + spec.active_mlp_weights(false);
            let sparse = spec.attention_weights() + spec.active_mlp_weights(true);
            let expected = (dense as f64 + 3.0 * sparse as f64) / 4.0;
            assert!((weights / expected - 1.0).abs() < 1e-12, "{weights} {expected}");
            let narrowest = matrices.iter().map(|matrix| matrix.local_width).fold(f64::INFINITY, f64::min);
            assert!((narrowest - 16.0).abs() < 1e-12, "the router is not cut");
            assert!(matrices.iter().any(|matrix| (matrix.local_width - 96.0 / f64::from(tp)).abs() < 1e-12));
        }
    }
}
