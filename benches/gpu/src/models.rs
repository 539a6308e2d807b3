//! Trained models, with the sizes of published and of miniature configurations.
//!
//! Fast random weights for large models.

use super::Result;
use dflop_costmodel::random::SplitMix64;
use dflop_device::Device;
use dflop_models::weights::{Init, ParameterSpec, Seed, WeightSource};
use dflop_models::{Activations, BlockStage, FrozenModules, ModelConfig, ModuleKind, StageRange};
use serde_json::{Value, json};

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
}
