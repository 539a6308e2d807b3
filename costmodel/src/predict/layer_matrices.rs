//! Counts FLOPs per layer and outside the layers, and lists a layer's matrices, with the width that a rank in
//! a TP group multiplies. FLOPs are counted, if the model was described; matrices follow from its sizes.
//!
//! # Source
//! Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053, section 3: query, key and value projections and the
//! first MLP matrices are cut by columns, output projection and last MLP matrix by rows.

use crate::flops::{EncoderFlops, LlmFlops, Recomputation};
use crate::model::{EncoderDetails, EncoderSpec, LlmSpec};
use crate::tokens::EncoderWork;

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

/// Passes with the same FLOPs in a step: one forward and two backward.
const TRAINING_PASSES: f64 = 3.0;

/// FLOPs per layer and outside the layers, per token or tile.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerFlops {
    pub(super) layer: f64,
    pub(super) outside: f64,
}

/// Counts FLOPs per tile, forward and backward.
pub(super) fn encoder_layer_flops(spec: &EncoderSpec, llm_hidden: u32, tile_tokens: u32) -> LayerFlops {
    work_layer_flops(spec, llm_hidden, &tile_work(1, tile_tokens))
}

/// Counts FLOPs per patch in a native-resolution medium without attention, forward and backward.
pub(super) fn native_layer_flops(spec: &EncoderSpec, llm_hidden: u32) -> LayerFlops {
    // This many patches form whole numbers of projector rows and of chunks.
    let chunk = spec.counts.map_or(1, |counts| u64::from(counts.chunk_tokens.max(1)));
    let patches = u64::from(spec.projector.merged_tokens.get()).saturating_mul(chunk);
    let work = EncoderWork { encoder_tokens: patches, ..EncoderWork::default() };
    let LayerFlops { layer, outside } = work_layer_flops(spec, llm_hidden, &work);
    LayerFlops { layer: layer / patches as f64, outside: outside / patches as f64 }
}

/// Counts FLOPs per query-key pair in a layer, forward and backward.
pub(super) fn encoder_pair_flops(spec: &EncoderSpec, llm_hidden: u32) -> f64 {
    let pair = EncoderWork { attention_pairs: 1, window_pairs: 1, ..EncoderWork::default() };
    work_layer_flops(spec, llm_hidden, &pair).layer
}

fn work_layer_flops(spec: &EncoderSpec, llm_hidden: u32, work: &EncoderWork) -> LayerFlops {
    let flops = |spec: &EncoderSpec| {
        EncoderFlops::new(spec, llm_hidden).training(work, Recomputation::None).total() as f64
    };
    let details = EncoderDetails { unused_layers: 0, ..spec.details };
    let outside = flops(&EncoderSpec { layers: 0, windowed_layers: 0, details, ..*spec });
    LayerFlops { layer: (flops(spec) - outside).max(0.0) / f64::from(spec.layers.max(1)), outside }
}

pub(super) fn tile_work(tiles: u64, tile_tokens: u32) -> EncoderWork {
    let tokens = u64::from(tile_tokens);
    let pairs = tokens * tokens;
    let tile = EncoderWork {
        items: 1,
        encoder_tokens: tokens,
        tokens: 0,
        attention_pairs: pairs,
        window_pairs: pairs,
        padded_tokens: 0,
    };
    tile.repeat(tiles)
}

/// Counts FLOPs per token without attention in a mean layer, forward and backward.
pub(super) fn llm_layer_flops(spec: &LlmSpec) -> LayerFlops {
    let flops = LlmFlops::new(spec);
    let outside = TRAINING_PASSES * flops.head_forward(1) as f64;
    LayerFlops { layer: TRAINING_PASSES * mean(flops.layers_per_token() as f64, spec), outside }
}

/// Counts causal attention FLOPs in a layer, per squared token, forward and backward.
pub(super) fn llm_square_flops(spec: &LlmSpec) -> f64 {
    TRAINING_PASSES * mean(LlmFlops::new(spec).layers_per_square() as f64, spec)
}

/// Counts the weights in a token's experts in a mean layer, over layers with and without experts.
pub(super) fn active_expert_weights(spec: &LlmSpec) -> f64 {
    let experts = spec.experts.map_or(0, |experts| experts.experts_per_token);
    sparse_share(spec) * spec.expert_weights() as f64 * f64::from(experts)
}

/// Returns the share of layers that have experts.
pub(super) fn sparse_share(spec: &LlmSpec) -> f64 {
    mean(f64::from(spec.sparse_layer_count()), spec)
}

fn mean(of_all_layers: f64, spec: &LlmSpec) -> f64 {
    of_all_layers / f64::from(spec.layers.max(1))
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
