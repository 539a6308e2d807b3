//! Names and constants for latent attention in a decoder.

use crate::layers::{LatentNames, LatentQueries, LatentSpec};
use dflop_costmodel::model::{AttentionBias, LlmSpec};
use dflop_device::ops::latent_heads::LatentShape;

/// Epsilon for latent row norms, which no configuration changes.
const EPSILON: f64 = 1e-6;

/// Latent attention constants, which are not part of the sizes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LlmLatent {
    /// Whether neighboring columns are rotated together.
    pub is_interleaved: bool,
    /// Score factor.
    pub scale: f64,
}

impl LlmLatent {
    /// Returns the specification for the projections in a layer, if the decoder has latent attention.
    ///
    /// - `prefix`: attention name prefix
    pub(super) fn layer(&self, prefix: &str, spec: &LlmSpec) -> Option<LatentSpec> {
        let sizes = spec.latent?;
        let name = |rest: &str| format!("{prefix}{rest}");
        let queries = match sizes.query_rank {
            None => LatentQueries::Direct(name("q_proj")),
            Some(rank) => {
                let [down, norm, up] = ["q_a_proj", "q_a_layernorm", "q_b_proj"].map(name);
                LatentQueries::Latent(LatentNames { down, norm, up }, rank as usize)
            }
        };
        let [down, norm, up] = ["kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"].map(name);
        Some(LatentSpec {
            shape: LatentShape {
                heads: spec.heads as usize,
                plain: sizes.plain_dim as usize,
                rotated: sizes.rotated_dim as usize,
                value: sizes.value_dim as usize,
                is_interleaved: self.is_interleaved,
            },
            queries,
            keys_values: LatentNames { down, norm, up },
            rank: sizes.kv_rank as usize,
            epsilon: EPSILON,
            has_bias: spec.details.attention_bias != AttentionBias::None,
        })
    }
}
