//! Counted FLOPs and parameters, which replace the formulas over sizes for a model that these do not describe
//! exactly.

use serde::{Deserialize, Serialize};

use crate::interned::{Intern, Pool};
use crate::tokens::EncoderWork;

/// FLOPs of a pass, as a polynomial in the units of a medium or a sample.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Polynomial {
    /// FLOPs per item: per sequence with a fixed length.
    pub per_item: u64,
    /// FLOPs per token.
    pub per_token: u64,
    /// FLOPs per query-key pair in layers with full attention; in an LLM per pair of a causal sequence, where
    /// `n` tokens have `n² / 2` pairs.
    pub per_pair: u64,
    /// FLOPs per query-key pair in layers with windows.
    pub per_window_pair: u64,
    /// FLOPs per query-key pair of an LLM's layers without a causal mask; 0 for encoders.
    pub per_unmasked_pair: u64,
    /// FLOPs per chunk, the last chunk padded.
    pub per_chunk: u64,
}

impl Polynomial {
    /// Adds `count` times a polynomial, saturating.
    pub fn add(&mut self, count: u64, other: &Self) {
        let add = |sum: &mut u64, term: u64| *sum = sum.saturating_add(count.saturating_mul(term));
        add(&mut self.per_item, other.per_item);
        add(&mut self.per_token, other.per_token);
        add(&mut self.per_pair, other.per_pair);
        add(&mut self.per_window_pair, other.per_window_pair);
        add(&mut self.per_unmasked_pair, other.per_unmasked_pair);
        add(&mut self.per_chunk, other.per_chunk);
    }

    /// Returns whether there are no FLOPs.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the FLOPs for an encoder's work, saturating.
    ///
    /// - `chunk_tokens`: positions per chunk; 0 if nothing counts per chunk
    #[must_use]
    pub fn encoder_flops(&self, work: &EncoderWork, chunk_tokens: u32) -> u128 {
        let positions = work.encoder_tokens.saturating_add(work.padded_tokens);
        let chunks = if chunk_tokens == 0 { 0 } else { positions.div_ceil(u64::from(chunk_tokens)) };
        let terms =
            [(self.per_item, work.items), (self.per_token, work.encoder_tokens), (self.per_chunk, chunks)];
        let flops = terms.into_iter().map(|(factor, count)| u128::from(factor) * u128::from(count));
        flops.fold(self.attention_flops(work), u128::saturating_add)
    }

    /// Returns the part of [`Polynomial::encoder_flops`] for query-key pairs, saturating.
    #[must_use]
    pub fn attention_flops(&self, work: &EncoderWork) -> u128 {
        let full = u128::from(self.per_pair) * u128::from(work.attention_pairs);
        full.saturating_add(u128::from(self.per_window_pair) * u128::from(work.window_pairs))
    }
}

/// FLOPs of both passes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Passes {
    /// Forward FLOPs.
    pub forward: Polynomial,
    /// Backward FLOPs, for all gradients except the medium's own.
    pub backward: Polynomial,
}

impl Passes {
    /// Adds `count` times the FLOPs, saturating.
    pub fn add(&mut self, count: u64, other: &Self) {
        self.forward.add(count, &other.forward);
        self.backward.add(count, &other.backward);
    }

    /// Returns whether the backward pass takes twice the forward FLOPs.
    #[must_use]
    pub fn is_doubled(&self) -> bool {
        let mut doubled = Polynomial::default();
        doubled.add(2, &self.forward);
        doubled == self.backward
    }
}

/// Counts of an encoder with connector.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EncoderCounts {
    /// FLOPs in all layers together.
    pub layers: Passes,
    /// Forward FLOPs in the layers that have a backward pass.
    pub trained_layers_forward: Polynomial,
    /// FLOPs before and after the layers, without connectors.
    pub outside: Passes,
    /// FLOPs in the connectors into the LLM.
    pub connectors: Passes,
    /// Positions per chunk, to which the stem pads; 0 if nothing counts per chunk.
    pub chunk_tokens: u32,
    /// Number of parameters in all layers together.
    pub layer_parameters: u64,
}

impl Intern for EncoderCounts {
    fn pool() -> &'static Pool<Self> {
        static COUNTS: Pool<EncoderCounts> = Pool::new();
        &COUNTS
    }
}

/// Counts of a language model.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LlmCounts {
    /// FLOPs in all layers together; experts count where a token is routed to them.
    pub layers: Passes,
    /// FLOPs in the LM head, and in everything else outside the layers.
    pub head: Passes,
    /// Runs of layers with equal parameters, in order.
    pub runs: Vec<LayerParameters>,
    /// Number of embedding parameters.
    pub embedding: u64,
    /// Number of parameters outside layers, embedding and LM head.
    pub outside: u64,
    /// Number of LM head parameters; 0 if it shares the embedding's weights.
    pub head_parameters: u64,
}

impl Intern for LlmCounts {
    fn pool() -> &'static Pool<Self> {
        static COUNTS: Pool<LlmCounts> = Pool::new();
        &COUNTS
    }
}

/// Parameters of each layer in a run of equal layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayerParameters {
    /// Number of layers in the run.
    pub layers: u32,
    /// Number of parameters, all experts included.
    pub all: u64,
    /// Number of weights that every token is multiplied with, which the ranks of a TP group divide.
    pub weights: u64,
    /// Number of expert parameters; 0 in a layer without experts.
    pub experts: u64,
    /// Number of expert parameters that a token goes through.
    pub active_experts: u64,
}

impl LayerParameters {
    /// Returns the parameters on one rank in a TP group, saturating: weights and experts are divided,
    /// everything else is on every rank.
    #[must_use]
    pub fn on_rank(&self, tp: u32) -> Self {
        let split = |parameters: u64| parameters.div_ceil(u64::from(tp.max(1)));
        let divided = self.weights.saturating_add(self.experts).min(self.all);
        let whole = self.all - divided;
        let (weights, experts) = (split(divided.saturating_sub(self.experts)), split(self.experts));
        Self {
            layers: self.layers,
            all: whole.saturating_add(weights).saturating_add(experts),
            weights,
            experts,
            active_experts: split(self.active_experts),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_polynomial_is_the_sum_of_its_terms() {
        let mut flops = Polynomial { per_item: 1, per_token: 10, per_pair: 100, ..Polynomial::default() };
        flops.add(2, &Polynomial { per_window_pair: 500, per_chunk: 5000, ..Polynomial::default() });
        let work = EncoderWork {
            items: 3,
            encoder_tokens: 7,
            attention_pairs: 2,
            window_pairs: 1,
            padded_tokens: 2,
            ..EncoderWork::default()
        };
        let chunks = 3; // 9 positions in chunks of 4
        assert_eq!(flops.encoder_flops(&work, 4), 3 + 70 + 200 + 1000 + 10_000 * chunks);
        assert_eq!(flops.encoder_flops(&work, 0), 3 + 70 + 200 + 1000);
        assert_eq!(flops.attention_flops(&work), 1200);
        let most = Polynomial { per_token: u64::MAX, per_pair: u64::MAX, ..Polynomial::default() };
        let work = EncoderWork { encoder_tokens: u64::MAX, attention_pairs: u64::MAX, ..work };
        assert_eq!(most.encoder_flops(&work, 0), u128::MAX);
    }

    #[test]
    fn ranks_divide_weights_and_experts_only() {
        let layer = LayerParameters { layers: 2, all: 1010, weights: 401, experts: 600, active_experts: 60 };
        let half = layer.on_rank(2);
        assert_eq!(
            (half.all, half.weights, half.experts, half.active_experts),
            (9 + 201 + 300, 201, 300, 30)
        );
        assert_eq!(layer.on_rank(1), layer);
        let odd = LayerParameters { weights: u64::MAX, ..layer };
        assert_eq!(odd.on_rank(1).all, 1010);
    }
}
