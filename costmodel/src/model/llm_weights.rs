//! Counts the elements in a language model's matrices, layer by layer.
//!
//! FLOPs and parameters follow from the same counts: a token goes through all weights except the experts that
//! the router does not select.

use super::{LayerSet, LlmSpec};

impl LlmSpec {
    /// Returns the layers that have experts.
    #[must_use]
    pub fn sparse_layers(&self) -> LayerSet {
        self.experts.map_or_else(LayerSet::default, |experts| experts.layers)
    }

    /// Returns the number of layers that have experts.
    #[must_use]
    pub fn sparse_layer_count(&self) -> u32 {
        self.sparse_layers().len_below(self.layers)
    }

    /// Returns the number of layers that attend within windows.
    #[must_use]
    pub fn windowed_layer_count(&self) -> u32 {
        self.windows.map_or(0, |windows| windows.layers.len_below(self.layers))
    }

    /// Returns the width of a head's values.
    #[must_use]
    pub fn value_dim(&self) -> u32 {
        self.latent.map_or(self.head_dim, |latent| latent.value_dim)
    }

    /// Counts the attention projections: queries, keys, values, output.
    pub(crate) fn attention_weights(&self) -> u128 {
        let Some(latent) = self.latent else {
            let heads = u128::from(self.heads) + u128::from(self.kv_heads);
            return product([2, self.hidden, self.head_dim]).saturating_mul(heads);
        };
        let queries = match latent.query_rank {
            Some(rank) => sum([product([self.hidden, rank]), product([rank, self.heads, self.head_dim])]),
            None => product([self.hidden, self.heads, self.head_dim]),
        };
        let keys_and_values = latent.plain_dim.saturating_add(latent.value_dim);
        sum([
            queries,
            product([self.hidden, latent.kv_rank.saturating_add(latent.rotated_dim)]),
            product([latent.kv_rank, self.heads, keys_and_values]),
            product([self.heads, latent.value_dim, self.hidden]),
        ])
    }

    /// Counts the MLP in a layer without experts.
    pub(crate) fn mlp_weights(&self) -> u128 {
        product([3, self.hidden, self.ffn])
    }

    /// Counts a single expert; 0 for a model without experts.
    pub(crate) fn expert_weights(&self) -> u128 {
        self.experts.map_or(0, |experts| product([3, self.hidden, experts.ffn]))
    }

    /// Counts what every token goes through in addition to the selected experts: router, shared experts and
    /// gate.
    pub(crate) fn around_experts_weights(&self) -> u128 {
        self.experts.map_or(0, |experts| {
            sum([
                product([self.hidden, experts.experts]),
                product([3, self.hidden, experts.shared_ffn]),
                product([self.hidden, u32::from(experts.details.has_shared_gate)]),
            ])
        })
    }

    /// Counts the weights that a token meets in a layer's MLP or experts.
    pub(crate) fn active_mlp_weights(&self, has_experts: bool) -> u128 {
        match self.experts.filter(|_| has_experts) {
            None => self.mlp_weights(),
            Some(experts) => {
                let active = self.expert_weights().saturating_mul(u128::from(experts.experts_per_token));
                active.saturating_add(self.around_experts_weights())
            }
        }
    }
}

/// Multiplies, saturating.
fn product<const N: usize>(factors: [u32; N]) -> u128 {
    factors.into_iter().fold(1, |product, factor| product.saturating_mul(u128::from(factor)))
}

fn sum<const N: usize>(terms: [u128; N]) -> u128 {
    terms.into_iter().fold(0, u128::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ExpertsDetails, ExpertsSpec, ModelSpec};

    /// Width 8, two of four experts with width 3, shared experts with width 5, a gate.
    #[test]
    fn a_token_meets_its_experts_and_what_is_around_them() {
        let mut spec = ModelSpec::preset("tiny").unwrap().llm;
        (spec.hidden, spec.ffn) = (8, 20);
        spec.experts = Some(ExpertsSpec {
            layers: LayerSet::range(1, 4),
            experts: 4,
            experts_per_token: 2,
            ffn: 3,
            shared_ffn: 5,
            details: ExpertsDetails { has_shared_gate: true, ..ExpertsDetails::NONE },
        });
        assert_eq!(spec.active_mlp_weights(false), 3 * 8 * 20);
        assert_eq!(spec.active_mlp_weights(true), 2 * 3 * 8 * 3 + 8 * 4 + 3 * 8 * 5 + 8);
        assert_eq!((spec.sparse_layer_count(), spec.windowed_layer_count()), (3, 0));
    }
}
