//! Forward FLOPs of encoder, projector and LLM, as exact integers.
//!
//! One multiply-add is two FLOPs; matrix products are counted, element-wise work is not. A specification is
//! folded once into FLOPs per token and per query-key pair, after which a sample costs a few
//! multiplications. All sums saturate at the largest integer.
//!
//! # Source
//! Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, arXiv:2104.04473,
//! appendix, extended to grouped-query attention and gated MLPs. Per layer and token of width `h`:
//! `4h² (1 + kv/a)` for the projections of `a` query and `kv` key heads, `6hf` for a gated MLP of width
//! `f`, `4hf` for a plain one; `4h` per query-key pair; `2hV` a token for the LM head.

use crate::model::{EncoderSpec, LlmSpec, Mlp};
use crate::tokens::EncoderWork;

/// Forward and backward take this many times the FLOPs of forward alone: a backward pass takes two
/// products, for the gradients of inputs and of weights, where forward takes one.
pub const FORWARD_AND_BACKWARD: u32 = 3;

/// Which query-key pairs of a sequence the LLM's attention computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Attention {
    /// Each token sees those before it: half of all pairs.
    Causal,
    /// Each token sees all; what profilers such as `PyTorch`'s `FlopCounter` count.
    Full,
}

/// FLOPs of an encoder and its projector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EncoderFlops {
    per_token: u64,
    per_attention_pair: u64,
    per_window_pair: u64,
    per_projected_token: u64,
    merged_tokens: u64,
}

/// FLOPs of an LLM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LlmFlops {
    per_token: u64,
    per_causal_square: u64,
    head_per_token: u64,
}

impl EncoderFlops {
    /// Folds an encoder that feeds an LLM of width `llm_hidden`.
    #[must_use]
    pub fn new(spec: &EncoderSpec, llm_hidden: u32) -> Self {
        let mlp_matrices = match spec.mlp {
            Mlp::Plain => 2,
            Mlp::Gated => 3,
        };
        let layer_weights =
            sum([product([4, spec.hidden, spec.hidden]), product([mlp_matrices, spec.hidden, spec.ffn])]);
        let stem_weights = product([spec.stem_inputs, spec.hidden]);
        let full_layers = spec.layers.saturating_sub(spec.windowed_layers);
        let projector = spec.projector;
        let projector_weights = match projector.middle {
            Some(middle) => sum([product([projector.input, middle]), product([middle, llm_hidden])]),
            None => product([projector.input, llm_hidden]),
        };
        Self {
            per_token: flops(sum([layer_weights.saturating_mul(u128::from(spec.layers)), stem_weights])),
            per_attention_pair: flops(product([2, full_layers, spec.hidden])),
            per_window_pair: flops(product([2, spec.layers - full_layers, spec.hidden])),
            per_projected_token: flops(projector_weights),
            merged_tokens: u64::from(projector.merged_tokens.get()),
        }
    }

    /// Returns the FLOPs of one forward pass over this work, stem and projector included.
    #[must_use]
    pub fn forward(&self, work: &EncoderWork) -> u128 {
        let projected_tokens = work.encoder_tokens / self.merged_tokens;
        sum([
            wide_product(self.per_token, work.encoder_tokens),
            wide_product(self.per_attention_pair, work.attention_pairs),
            wide_product(self.per_window_pair, work.window_pairs),
            wide_product(self.per_projected_token, projected_tokens),
        ])
    }
}

impl LlmFlops {
    /// Folds an LLM.
    #[must_use]
    pub fn new(spec: &LlmSpec) -> Self {
        let projections = product([2, spec.hidden, spec.head_dim])
            .saturating_mul(u128::from(spec.heads) + u128::from(spec.kv_heads));
        let layer_weights = sum([projections, product([3, spec.hidden, spec.ffn])]);
        Self {
            per_token: flops(layer_weights.saturating_mul(u128::from(spec.layers))),
            per_causal_square: flops(product([spec.layers, spec.heads, spec.head_dim])),
            head_per_token: flops(product([spec.hidden, spec.vocab])),
        }
    }

    /// Returns the forward FLOPs of all layers, without LM head, over samples packed into one sequence.
    ///
    /// `sample_tokens`: tokens of each sample; attention stays within a sample, so it takes the sum of their
    /// squares.
    #[must_use]
    pub fn layers_forward(&self, sample_tokens: &[u32], attention: Attention) -> u128 {
        let mut tokens = 0u64;
        let mut squares = 0u64;
        for &sample in sample_tokens {
            tokens = tokens.saturating_add(u64::from(sample));
            squares = squares.saturating_add(u64::from(sample) * u64::from(sample));
        }
        let causal = wide_product(self.per_causal_square, squares);
        let pairs = match attention {
            Attention::Causal => causal,
            Attention::Full => causal.saturating_mul(2),
        };
        sum([wide_product(self.per_token, tokens), pairs])
    }

    /// Returns the forward FLOPs of the LM head, which the last pipeline stage alone computes.
    #[must_use]
    pub fn head_forward(&self, tokens: u64) -> u128 {
        wide_product(self.head_per_token, tokens)
    }
}

/// FLOPs from multiply-adds, saturating.
fn flops(multiply_adds: u128) -> u64 {
    u64::try_from(multiply_adds.saturating_mul(2)).unwrap_or(u64::MAX)
}

fn product<const N: usize>(factors: [u32; N]) -> u128 {
    factors.into_iter().fold(1, |product, factor| product.saturating_mul(u128::from(factor)))
}

fn wide_product(factor: u64, count: u64) -> u128 {
    u128::from(factor) * u128::from(count)
}

fn sum<const N: usize>(terms: [u128; N]) -> u128 {
    terms.into_iter().fold(0, u128::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelSpec;
    use crate::shape::{AudioLength, ImageSize};
    use crate::tokens::audio::whisper_windows;

    fn llm(name: &str) -> LlmFlops {
        LlmFlops::new(&ModelSpec::preset(name).unwrap().llm)
    }

    /// Layers over one sample of 1000 and one of 4096 tokens, over both samples of a pack of 4096, and the LM
    /// head over 4096; from `2 L s h² ((2 kv/a + 1) + s/h + 1) + 6 L s h f` and `2 s h V` in Python.
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

    /// Of 28 layers of width 3584, full attention adds `2 h s²` each.
    #[test]
    fn full_attention_computes_twice_the_pairs() {
        let llm = llm("llava-ov-qwen2.5-7b");
        let causal = llm.layers_forward(&[4096], Attention::Causal);
        let full = llm.layers_forward(&[4096], Attention::Full);
        assert_eq!(full - causal, 28 * 2 * 3584 * 4096 * 4096);
    }

    /// Encoder, stem and projector of one tile; InternVL's projector sees 256 tokens of 4 merged ones.
    #[test]
    fn tile_encoders_follow_the_closed_formula() {
        for (name, tokens, layers, stem, projector) in [
            ("llava-ov-qwen2.5-7b", 729, 665_460_499_968, 987_614_208, 24_747_835_392),
            ("internvl3-8b", 1024, 721_554_505_728, 1_233_125_376, 14_092_861_440),
            ("internvl2.5-qwen2.5-72b", 1024, 11_928_600_576_000, 3_853_516_800, 88_046_829_568),
        ] {
            let spec = ModelSpec::preset(name).unwrap();
            let encoder = EncoderFlops::new(&spec.vision.unwrap().encoder, spec.llm.hidden);
            let work = EncoderWork {
                items: 1,
                encoder_tokens: tokens,
                tokens,
                attention_pairs: tokens * tokens,
                window_pairs: tokens * tokens,
            };
            assert_eq!(encoder.forward(&work), layers + stem + projector, "{name}");
            let three_tiles = encoder.forward(&work.repeat(3));
            assert_eq!(three_tiles, 3 * (layers + stem + projector), "{name}");
        }
    }

    /// A picture of 640 x 480: 1564 patches, 92,560 pairs inside windows, 391 merged tokens.
    #[test]
    fn native_encoders_follow_the_closed_formula_with_and_without_windows() {
        for (name, layers) in [("qwen2-vl-7b", 2_368_735_805_440), ("qwen2.5-vl-7b", 2_033_895_342_080)] {
            let spec = ModelSpec::preset(name).unwrap();
            let vision = spec.vision.unwrap();
            let work = vision.rule.images(&[ImageSize { width: 640, height: 480 }]).unwrap();
            let encoder = EncoderFlops::new(&vision.encoder, spec.llm.hidden);
            let stem_and_projector = 4_708_515_840 + 34_849_423_360;
            assert_eq!(encoder.forward(&work), layers + stem_and_projector, "{name}");
        }
    }

    #[test]
    fn audio_encoder_costs_the_same_however_full_the_window() {
        let spec = ModelSpec::preset("qwen2-audio-7b").unwrap();
        let encoder = EncoderFlops::new(&spec.audio.unwrap().encoder, spec.llm.hidden);
        for (frames, windows) in [(1, 1), (480_000, 1), (480_001, 2)] {
            let work = whisper_windows(AudioLength { frames, sample_rate_hz: 16_000 }).unwrap();
            let window = 2_256_076_800_000 + 17_694_720_000 + 7_864_320_000;
            assert_eq!(encoder.forward(&work), windows * window);
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
        };
        let llm = LlmFlops::new(&spec);
        assert_eq!(llm.layers_forward(&[widest; 3], Attention::Full), u128::MAX);
    }
}
