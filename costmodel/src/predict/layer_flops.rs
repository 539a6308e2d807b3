//! Counts FLOPs per layer and outside the layers.

use crate::flops::{EncoderFlops, LlmFlops, Recomputation};
use crate::model::{EncoderDetails, EncoderSpec, LlmSpec};
use crate::tokens::EncoderWork;

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
    // This many patches form one projector row.
    let patches = u64::from(spec.projector.merged_tokens.get());
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
