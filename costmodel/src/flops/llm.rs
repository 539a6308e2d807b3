//! Counts FLOPs for a language model.

use super::slice::ZigzagSlices;
use super::{Attention, Gradients, Recomputation, TrainingFlops, flops, product, sum, wide_product};
use crate::model::counts::{LlmCounts, Polynomial};
use crate::model::{LlmSpec, WindowedAttention};

/// FLOPs for an LLM: by its sizes, or [as counted](LlmCounts).
///
/// A mixture of experts counts the router, the experts that a token is routed to, and the shared experts.
///
/// # Source
/// Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, arXiv:2104.04473,
/// appendix, extended to grouped-query attention and gated MLPs. Per layer and token of width `h`, with `a`
/// query and `kv` key heads of width `d`: `4h d (a + kv)` for the projections, `6hf` for a gated MLP of width
/// `f`; `4 a d` per query-key pair; `2hV` per token for the LM head over `V` words. With experts, `2hE` for a
/// router over `E` experts and `6hf` for each expert that a token selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LlmFlops {
    forward: PassFlops,
    backward: PassFlops,
    windows: Option<WindowedAttention>,
    /// Widths of scores and values: the two attention products.
    product_widths: [u32; 2],
    gradients: Gradients,
}

/// FLOPs for a pass through all layers and the LM head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct PassFlops {
    per_token: u64,
    /// Causal attention FLOPs per squared token, in all layers with full attention.
    per_full_square: u64,
    /// Causal attention FLOPs per squared token, in all layers with windows.
    per_windowed_square: u64,
    /// Attention FLOPs per squared token, in all layers without a causal mask.
    per_unmasked_square: u64,
    head_per_token: u64,
}

/// Tokens that run together, with their attention in squares: twice the pairs, so that a causal sequence has
/// the square of its length.
#[derive(Debug, Clone, Copy, Default)]
struct Rows {
    tokens: u64,
    /// In layers with full attention.
    full: u64,
    /// In layers with windows.
    windowed: u64,
    /// In layers without a causal mask.
    unmasked: u64,
}

/// Training FLOPs for a slice of a sequence, with the attention by ring step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceFlops {
    /// All FLOPs.
    pub training: TrainingFlops,
    /// Attention in layers without windows, part of [`Self::training`], by pass over the layers: forward;
    /// forward again if layers are recomputed; backward with recomputed scores, unless there is no backward
    /// pass.
    pub ring: Vec<RingPass>,
}

/// Attention FLOPs for a slice in a pass over the layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingPass {
    /// FLOPs by ring step, `[ranks]`.
    pub steps: Vec<u128>,
    /// Message size in multiples of the keys and values: 1 forward, 2 backward, with their gradients.
    pub messages: u32,
}

impl PassFlops {
    /// Converts counts; a causal square has half the pairs.
    const fn counted(layers: &Polynomial, head: &Polynomial) -> Self {
        Self {
            per_token: layers.per_token,
            per_full_square: layers.per_pair / 2,
            per_windowed_square: layers.per_window_pair / 2,
            per_unmasked_square: layers.per_unmasked_pair,
            head_per_token: head.per_token,
        }
    }

    /// Returns the FLOPs in the layers without attention.
    fn linear(&self, rows: &Rows) -> u128 {
        wide_product(self.per_token, rows.tokens)
    }

    /// Returns the attention FLOPs in all layers.
    fn attention(&self, rows: &Rows, attention: Attention) -> u128 {
        let causal = wide_product(self.per_full_square, rows.full)
            .saturating_add(wide_product(self.per_windowed_square, rows.windowed));
        let masked = match attention {
            Attention::Causal => causal,
            Attention::Full => causal.saturating_mul(2),
        };
        masked.saturating_add(wide_product(self.per_unmasked_square, rows.unmasked))
    }

    const fn doubled(self) -> Self {
        Self {
            per_token: self.per_token.saturating_mul(2),
            per_full_square: self.per_full_square.saturating_mul(2),
            per_windowed_square: self.per_windowed_square.saturating_mul(2),
            per_unmasked_square: self.per_unmasked_square.saturating_mul(2),
            head_per_token: self.head_per_token.saturating_mul(2),
        }
    }
}

impl LlmFlops {
    /// Folds an LLM into FLOPs per token and pair.
    #[must_use]
    pub fn new(spec: &LlmSpec) -> Self {
        if let Some(counts) = spec.counts {
            return Self::counted(spec, &counts);
        }
        let sparse = spec.sparse_layer_count();
        let windowed = spec.windowed_layer_count();
        let times = |weights: u128, layers: u32| weights.saturating_mul(u128::from(layers));
        let weights = sum([
            times(spec.attention_weights(), spec.layers),
            times(spec.active_mlp_weights(false), spec.layers - sparse),
            times(spec.active_mlp_weights(true), sparse),
        ]);
        let product_widths = [spec.head_dim, spec.value_dim()];
        // A causal square has half the pairs, so it takes one multiply-add for two per pair.
        let width = product_widths.map(u128::from).iter().sum();
        let per_square = |layers: u32| {
            u64::try_from(product([layers, spec.heads]).saturating_mul(width)).unwrap_or(u64::MAX)
        };
        let forward = PassFlops {
            per_token: flops(weights),
            per_full_square: per_square(spec.layers - windowed),
            per_windowed_square: per_square(windowed),
            per_unmasked_square: 0,
            head_per_token: flops(product([spec.hidden, spec.vocab])),
        };
        Self {
            forward,
            backward: forward.doubled(),
            windows: spec.windows,
            product_widths,
            gradients: Gradients::All,
        }
    }

    fn counted(spec: &LlmSpec, counts: &LlmCounts) -> Self {
        Self {
            forward: PassFlops::counted(&counts.layers.forward, &counts.head.forward),
            backward: PassFlops::counted(&counts.layers.backward, &counts.head.backward),
            windows: spec.windows,
            product_widths: [spec.head_dim, spec.value_dim()],
            gradients: Gradients::All,
        }
    }

    /// Sets the computed gradients: [`Gradients::Inputs`] if the LLM is frozen, including embedding and LM
    /// head.
    #[must_use]
    pub const fn gradients(mut self, gradients: Gradients) -> Self {
        self.gradients = gradients;
        self
    }

    /// Returns the forward FLOPs for all layers, without LM head, over samples packed into one sequence.
    ///
    /// `sample_tokens`: tokens per sample; attention stays within a sample, so it costs the sum of the
    /// squares.
    #[must_use]
    pub fn layers_forward(&self, sample_tokens: &[u32], attention: Attention) -> u128 {
        let rows = self.rows(sample_tokens);
        self.forward.linear(&rows).saturating_add(self.forward.attention(&rows, attention))
    }

    /// Returns the forward FLOPs per token in all layers, without attention.
    pub(crate) const fn layers_per_token(&self) -> u64 {
        self.forward.per_token
    }

    /// Returns the causal attention FLOPs per squared token in all layers, forward, as if all layers had full
    /// attention.
    pub(crate) const fn layers_per_square(&self) -> u64 {
        let forward = &self.forward;
        forward
            .per_full_square
            .saturating_add(forward.per_windowed_square)
            .saturating_add(forward.per_unmasked_square)
    }

    /// Returns the part of [`LlmFlops::layers_per_square`] in layers with windows, as a fraction.
    pub(crate) fn windowed_share(&self) -> f64 {
        self.forward.per_windowed_square as f64 / (self.layers_per_square() as f64).max(1.0)
    }

    /// Returns the forward FLOPs for the LM head, which only the last pipeline stage computes.
    #[must_use]
    pub fn head_forward(&self, tokens: u64) -> u128 {
        wide_product(self.forward.head_per_token, tokens)
    }

    /// Returns the training FLOPs for samples packed into one sequence, LM head included.
    #[must_use]
    pub fn training(
        &self,
        sample_tokens: &[u32],
        attention: Attention,
        recomputation: Recomputation,
    ) -> TrainingFlops {
        self.training_rows(&self.rows(sample_tokens), attention, recomputation)
    }

    /// Returns the training FLOPs for the slice of a sequence on one rank of a context-parallel group, LM
    /// head included; over all ranks they add up to [`Self::training`] of the sequence, with causal
    /// attention.
    ///
    /// # Panics
    /// If there is no such rank.
    #[must_use]
    pub fn slice(&self, slices: &ZigzagSlices, rank: u32, recomputation: Recomputation) -> SliceFlops {
        let tokens: u64 = slices.tokens(rank).into();
        let steps = || 0..slices.ranks();
        let rows = Rows {
            tokens,
            full: slices.squares(rank),
            windowed: self.windows.map_or(0, |windows| slices.window_squares(rank, &windows)),
            unmasked: steps().map(|step| slices.unmasked_ring_squares(rank, step)).sum(),
        };
        let training = self.training_rows(&rows, Attention::Causal, recomputation);
        let step_rows = |step: u32| Rows {
            full: slices.ring_squares(rank, step),
            unmasked: slices.unmasked_ring_squares(rank, step),
            ..Rows::default()
        };
        let forward = |step: u32| self.forward.attention(&step_rows(step), Attention::Causal);
        let mut ring = vec![RingPass { steps: steps().map(forward).collect(), messages: 1 }];
        if self.gradients != Gradients::None {
            if recomputation == Recomputation::Layers {
                ring.push(ring[0].clone());
            }
            let backward = |step: u32| {
                let own = self.backward.attention(&step_rows(step), Attention::Causal);
                let scores =
                    if recomputation == Recomputation::None { 0 } else { self.scores(forward(step)) };
                own.saturating_add(scores)
            };
            ring.push(RingPass { steps: steps().map(backward).collect(), messages: 2 });
        }
        SliceFlops { training, ring }
    }

    fn training_rows(
        &self,
        rows: &Rows,
        attention: Attention,
        recomputation: Recomputation,
    ) -> TrainingFlops {
        let pairs = self.forward.attention(rows, attention);
        let linear = self.forward.linear(rows);
        let head = self.head_forward(rows.tokens);
        let layers = linear.saturating_add(pairs);
        let forward = layers.saturating_add(head);
        let recomputed = match recomputation {
            _ if self.gradients == Gradients::None => 0,
            Recomputation::None => 0,
            Recomputation::Scores => self.scores(pairs),
            // The layers run forward again, and the fused kernel still recomputes the scores in its backward
            // pass.
            Recomputation::Layers => layers.saturating_add(self.scores(pairs)),
        };
        let backward = match self.gradients {
            // The embedding is trained, so the layers need input gradients even if nothing comes before them.
            Gradients::All | Gradients::Weights => self.all_gradients(rows, attention),
            // Weight gradients take as many FLOPs as the forward pass; attention has no weights.
            Gradients::Inputs => {
                let weights = linear.saturating_add(head);
                self.all_gradients(rows, attention).saturating_sub(weights)
            }
            Gradients::None => 0,
        };
        TrainingFlops { forward, backward, recomputed }
    }

    /// Returns the FLOPs for weight and input gradients, saturating.
    fn all_gradients(&self, rows: &Rows, attention: Attention) -> u128 {
        let pass = &self.backward;
        let head = wide_product(pass.head_per_token, rows.tokens);
        sum([pass.linear(rows), pass.attention(rows, attention), head])
    }

    /// Returns the FLOPs for the first attention product, from the FLOPs for both.
    const fn scores(&self, pairs: u128) -> u128 {
        let [scores, values] = self.product_widths;
        if scores == values {
            return pairs / 2;
        }
        let both = scores as u128 + values as u128;
        // Divided before it is multiplied, so that it does not overflow.
        pairs / both * scores as u128
    }

    /// Sums the rows of whole samples.
    fn rows(&self, sample_tokens: &[u32]) -> Rows {
        let squares = |of: &dyn Fn(u64) -> u64| {
            sample_tokens.iter().map(|&tokens| of(u64::from(tokens))).fold(0, u64::saturating_add)
        };
        let all = squares(&|tokens| tokens * tokens);
        let windowed = self.windows.map_or(0, |windows| squares(&|tokens| windows.causal_squares(tokens)));
        Rows {
            tokens: sample_tokens.iter().map(|&tokens| u64::from(tokens)).sum(),
            full: all,
            windowed,
            unmasked: all,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{LlmDetails, ModelSpec};

    fn llm(name: &str) -> LlmFlops {
        LlmFlops::new(&ModelSpec::preset(name).unwrap().llm)
    }

    /// Layers over a sample with 1000 tokens and a sample with 4096 tokens, over both samples in a pack with
    /// 4096, and the LM head over 4096; from `2 L s h² ((2 kv/a + 1) + s/h + 1) + 6 L s h f` and `2 s h V` in
    /// Python.
    #[test]
    fn llm_flops_follow_the_closed_formula() {
        for (name, of_1000, of_4096, packed, head) in [
            (
                "llava-ov-qwen2.5-7b",
                13_251_280_896_000,
                56_822_417_326_080,
                55_579_658_158_080,
                4_464_618_504_192,
            ),
            (
                "llava-ov-qwen2.5-32b",
                63_066_603_520_000,
                266_631_569_735_680,
                262_573_580_615_680,
                6_378_026_434_560,
            ),
            (
                "llava-ov-qwen2.5-72b",
                141_736_017_920_000,
                597_172_252_835_840,
                589_056_274_595_840,
                10_204_842_295_296,
            ),
            (
                "llava-ov-llama3-8b",
                14_220_787_712_000,
                61_572_651_155_456,
                59_949_455_507_456,
                4_303_557_230_592,
            ),
            (
                "llava-ov-llama3-70b",
                138_212_802_560_000,
                582_741_162_721_280,
                574_625_184_481_280,
                8_607_114_461_184,
            ),
        ] {
            let llm = llm(name);
            assert_eq!(llm.layers_forward(&[1000], Attention::Causal), of_1000, "{name}");
            assert_eq!(llm.layers_forward(&[4096], Attention::Causal), of_4096, "{name}");
            assert_eq!(llm.layers_forward(&[1000, 3096], Attention::Causal), packed, "{name}");
            assert_eq!(llm.head_forward(4096), head, "{name}");
        }
    }

    /// Full attention adds `2 h s²` in each layer, for 28 layers of width 3584.
    #[test]
    fn full_attention_computes_twice_the_pairs() {
        let llm = llm("llava-ov-qwen2.5-7b");
        let causal = llm.layers_forward(&[4096], Attention::Causal);
        let full = llm.layers_forward(&[4096], Attention::Full);
        assert_eq!(full - causal, 28 * 2 * 3584 * 4096 * 4096);
    }

    #[test]
    fn training_is_three_passes_and_what_is_recomputed() {
        let llm = llm("llava-ov-qwen2.5-7b");
        let forward = llm.layers_forward(&[1000, 3096], Attention::Causal) + llm.head_forward(4096);
        let scores = 28 * 3584 * (1000 * 1000 + 3096 * 3096);
        for (recomputation, recomputed) in [
            (Recomputation::None, 0),
            (Recomputation::Scores, scores),
            (Recomputation::Layers, 55_579_658_158_080 + scores),
        ] {
            let training = llm.training(&[1000, 3096], Attention::Causal, recomputation);
            assert_eq!(training, TrainingFlops { forward, backward: 2 * forward, recomputed });
        }
    }

    #[test]
    fn absurd_dimensions_saturate() {
        let widest = u32::MAX;
        let spec = LlmSpec {
            layers: widest,
            hidden: widest,
            heads: widest,
            kv_heads: widest,
            head_dim: widest,
            ffn: widest,
            vocab: widest,
            details: LlmDetails::default(),
            experts: None,
            windows: None,
            latent: None,
            counts: None,
        };
        let llm = LlmFlops::new(&spec);
        assert_eq!(llm.layers_forward(&[widest; 3], Attention::Full), u128::MAX);
    }

    /// A frozen layer computes one backward product per forward product, and both attention products, which
    /// have no weights.
    #[test]
    fn a_frozen_llm_passes_gradients_through() {
        let all = llm("llava-ov-qwen2.5-7b");
        let frozen = all.gradients(Gradients::Inputs);
        let training = |llm: &LlmFlops| llm.training(&[1000, 3096], Attention::Causal, Recomputation::Layers);
        let (forward, pairs) = (training(&all).forward, 28 * 3584 * 2 * (1000 * 1000 + 3096 * 3096));
        assert_eq!(training(&frozen).forward, forward);
        assert_eq!(training(&frozen).backward, forward + pairs);
        assert_eq!(training(&frozen).recomputed, training(&all).recomputed);
        let none = all.gradients(Gradients::None);
        assert_eq!((training(&none).backward, training(&none).recomputed), (0, 0));
    }

    /// Slices have the FLOPs of the whole sequence, and each nearly its share.
    #[test]
    fn slices_add_up_to_the_sequence() {
        for name in ["llava-ov-qwen2.5-7b", "gemma3-12b", "qwen3-vl-30b-a3b"] {
            let llm = llm(name);
            for (tokens, ranks) in [(1, 8), (777, 2), (4_099, 4), (40_001, 8)] {
                let slices = ZigzagSlices::new(tokens, ranks);
                for recomputation in Recomputation::ALL {
                    let whole = llm.training(&[tokens], Attention::Causal, recomputation);
                    let parts = || (0..ranks).map(|rank| llm.slice(&slices, rank, recomputation).training);
                    assert_eq!(parts().map(|part| part.forward).sum::<u128>(), whole.forward, "{name}");
                    assert_eq!(parts().map(|part| part.backward).sum::<u128>(), whole.backward, "{name}");
                    let recomputed = parts().map(|part| part.recomputed).sum::<u128>();
                    assert!(whole.recomputed - recomputed <= u128::from(ranks), "{name}");
                    let most = parts().map(|part| part.total()).max().unwrap() as f64;
                    let share = whole.total() as f64 / f64::from(ranks);
                    assert!(tokens < 777 || most / share < 1.01, "{name} {tokens} {ranks}: {}", most / share);
                }
            }
        }
    }

    /// The steps of all passes are the attention of a model without windows.
    #[test]
    fn ring_steps_add_up_to_the_attention() {
        let llm = llm("llava-ov-qwen2.5-7b");
        let slices = ZigzagSlices::new(5_003, 4);
        for rank in 0..4 {
            for recomputation in Recomputation::ALL {
                let slice = llm.slice(&slices, rank, recomputation);
                let ring: u128 = slice.ring.iter().flat_map(|pass| &pass.steps).sum();
                let rows = Rows { tokens: slices.tokens(rank).into(), ..Rows::default() };
                let linear = llm.training_rows(&rows, Attention::Causal, recomputation).total();
                assert_eq!(slice.training.total() - linear, ring, "{rank} {recomputation:?}");
            }
        }
        let frozen = llm.gradients(Gradients::None).slice(&slices, 0, Recomputation::Layers);
        assert_eq!(frozen.ring.iter().map(|pass| pass.messages).collect::<Vec<_>>(), [1]);
        let passes = llm.slice(&slices, 0, Recomputation::Layers).ring;
        assert_eq!(passes.iter().map(|pass| pass.messages).collect::<Vec<_>>(), [1, 1, 2]);
    }
}
