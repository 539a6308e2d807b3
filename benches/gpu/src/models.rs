//! Trained decoders, with the sizes of published and of miniature configurations, and what they learn.
//!
//! Weights are random and fast to draw; inputs are seeded packs of uneven sequences that a decoder can learn.

use std::path::Path;

use dflop_costmodel::random::SplitMix64;
use dflop_device::Device;
use dflop_models::weights::{Init, ParameterSpec, Seed, WeightSource};
use dflop_models::{
    Activations, BlockStage, FrozenModules, LlmConfig, MicrobatchContext, ModelConfig, ModuleKind,
    StageRange, TextBatch,
};
use serde_json::{Value, json};

use crate::Result;

/// Returns `config.json` for the decoder whose tokens per second count: the Qwen2.5-1.5B sizes.
pub(crate) fn large() -> Value {
    json!({"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151_936, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": true})
}

/// Returns `config.json` for the decoder whose losses are compared with PyTorch.
pub(crate) fn medium() -> Value {
    json!({"model_type": "qwen2", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 2048, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "tie_word_embeddings": false})
}

/// Returns `config.json` for a decoder that a stand-in runs in a second.
pub(crate) fn tiny() -> Value {
    json!({"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "tie_word_embeddings": true})
}

/// Returns `config.json` for a decoder that ranks on one device can divide in every way.
pub(crate) fn shared() -> Value {
    json!({"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "tie_word_embeddings": false})
}

/// Builds a model module as one stage.
pub(crate) fn whole<D: Device>(
    config: &ModelConfig,
    module: ModuleKind,
    device: &D,
    activations: Activations,
    source: &dyn WeightSource,
) -> Result<BlockStage<D>> {
    let range = StageRange { module, layers: 0..config.layers(module) };
    Ok(config.stage(device, &range, FrozenModules::default(), activations, source)?)
}

/// Draws uniform numbers with a given deviation; for weights whose values only have to be plausible.
pub(crate) struct Uniform(pub(crate) u64);

impl WeightSource for Uniform {
    fn values(&self, spec: &ParameterSpec) -> dflop_models::Result<Vec<f32>> {
        let Init::Normal(deviation) = spec.init else { return Seed(self.0).values(spec) };
        let name = spec.name.bytes().fold(self.0, |hash, byte| hash.rotate_left(5) ^ u64::from(byte));
        let mut random = SplitMix64::new(name);
        // a uniform distribution with width w has the deviation w / sqrt(12)
        let width = (deviation * 12.0_f64.sqrt()) as f32;
        let mut number = || ((random.next_u64() >> 40) as f32 / (1 << 24) as f32 - 0.5) * width;
        Ok((0..spec.elements()).map(|_| number()).collect())
    }
}

/// Number of choices for the next token: a model that knows the rule reaches the logarithm of this number as
/// loss.
const CHOICES: usize = 4;

/// A pack of sequences.
pub(crate) struct Pack {
    pub(crate) lengths: Vec<usize>,
    pub(crate) tokens: Vec<i64>,
}

impl Pack {
    /// Draws the pack for a step: lengths from a 128th to a half of the pack, short sequences more often.
    pub(crate) fn new(seed: u64, step: usize, tokens: usize, vocabulary: usize) -> Self {
        let mut random = SplitMix64::new(seed ^ (step as u64 + 1).wrapping_mul(0x9e37_79b9));
        let mut lengths = Vec::new();
        let mut left = tokens;
        while left > 0 {
            // evenly distributed logarithms: 2^-7 to 2^-1 of the pack
            let share = (-1.0 - 6.0 * random.fraction()).exp2();
            let length = ((tokens as f64 * share) as usize).clamp(2, left.max(2));
            // a rest that is too short for a sequence belongs to the last sequence
            let length = if left - length.min(left) < 2 { left } else { length };
            lengths.push(length);
            left -= length;
        }
        let mut ids = Vec::with_capacity(tokens);
        for &length in &lengths {
            let mut token = random.below(vocabulary);
            for _ in 0..length {
                ids.push(token as i64);
                token = (5 * token + 1 + random.below(CHOICES)) % vocabulary;
            }
        }
        Self { lengths, tokens: ids }
    }

    /// Returns the number of predicted tokens.
    pub(crate) fn targets(&self) -> usize {
        self.tokens.len() - self.lengths.len()
    }

    /// Uploads the pack; the loss is the mean over all targets.
    pub(crate) fn context<D: Device>(&self, llm: &LlmConfig, device: &D) -> Result<MicrobatchContext<D>> {
        let positions: Vec<i64> = self.lengths.iter().flat_map(|&length| 0..length as i64).collect();
        let positions = positions.repeat(llm.rope.axes());
        let ends = self.lengths.iter().scan(0, |end, &length| {
            *end += length as i32;
            Some(*end)
        });
        let cu_seqlens: Vec<i32> = std::iter::once(0).chain(ends).collect();
        let batch = TextBatch {
            input_ids: &self.tokens,
            labels: &self.tokens,
            positions: &positions,
            cu_seqlens: &cu_seqlens,
            media_places: &[],
            loss_scale: 1.0 / self.targets() as f64,
        };
        Ok(llm.context(device, &batch)?)
    }
}

/// Writes packs for the PyTorch side: `packs.json`, with lengths and tokens for every step.
pub(crate) fn write_packs(directory: &Path, packs: &[Pack]) -> Result<()> {
    let packs: Vec<_> =
        packs.iter().map(|pack| json!({"lengths": pack.lengths, "tokens": pack.tokens})).collect();
    Ok(std::fs::write(directory.join("packs.json"), json!(packs).to_string())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_device::Cpu;
    use dflop_models::weights::ParameterSpec;

    #[test]
    fn the_large_decoder_has_one_and_a_half_billion_parameters() {
        let parameters = |document| {
            let specs = ModelConfig::from_config(&document).unwrap().parameters::<Cpu>().unwrap();
            specs.iter().filter(|spec| spec.shares.is_none()).map(ParameterSpec::elements).sum::<usize>()
        };
        assert_eq!(parameters(large()), 1_543_714_304);
        assert!((10_000_000..30_000_000).contains(&parameters(medium())));
    }

    #[test]
    fn sequences_fill_the_pack_and_follow_the_rule() {
        for (step, tokens) in [(0, 8192), (1, 8192), (2, 48), (3, 3), (4, 49)] {
            let pack = Pack::new(1, step, tokens, 64);
            assert_eq!(pack.lengths.iter().sum::<usize>(), tokens);
            assert_eq!(pack.tokens.len(), tokens);
            assert!(pack.lengths.iter().all(|&length| length >= 2), "{:?}", pack.lengths);
            let mut first = 0;
            for &length in &pack.lengths {
                let sequence = &pack.tokens[first..first + length];
                assert!(sequence.windows(2).all(|pair| (pair[1] - 5 * pair[0] - 1).rem_euclid(64) < 4));
                first += length;
            }
        }
        let lengths = Pack::new(1, 0, 8192, 64).lengths;
        assert!(lengths.len() > 4 && lengths.iter().max() > lengths.iter().min(), "{lengths:?}");
        assert_ne!(lengths, Pack::new(1, 1, 8192, 64).lengths);
    }
}
