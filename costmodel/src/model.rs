//! Models: the dimensions that FLOPs follow from, the token rule, and presets by name.
//!
//! A [`ModelSpec`] is plain data, so a model that has no preset can be written down or read with serde.
//! Presets are a table of such data; their dimensions are those of the published configurations.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::tokens::VisionRule;
use crate::tokens::any_res::AnyRes;
use crate::tokens::dynamic_tiles::DynamicTiles;
use crate::tokens::native::NativeResolution;

/// A multimodal LLM: encoders, if any, and the LLM that reads their tokens.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Name in messages and reports.
    pub name: String,
    /// Encoder of pictures and videos; `None` for a model that cannot see.
    pub vision: Option<VisionSpec>,
    /// Encoder of audio; `None` for a model that cannot hear.
    pub audio: Option<AudioSpec>,
    /// The language model.
    pub llm: LlmSpec,
}

/// How a model sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct VisionSpec {
    /// The encoder and its projector.
    pub encoder: EncoderSpec,
    /// From pixels to encoder items and tokens.
    pub rule: VisionRule,
}

/// How a model hears; windows and tokens are those of [`crate::tokens::audio`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AudioSpec {
    /// The encoder and its projector.
    pub encoder: EncoderSpec,
}

/// A transformer encoder with the projector into the LLM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EncoderSpec {
    /// Transformer layers.
    pub layers: u32,
    /// Those of the layers whose attention is windowed; at most `layers`.
    pub windowed_layers: u32,
    /// Width of an encoder token.
    pub hidden: u32,
    /// Attention heads.
    pub heads: u32,
    /// Width between the matrices of the MLP.
    pub ffn: u32,
    /// Kind of MLP.
    pub mlp: Mlp,
    /// Multiply-adds per hidden unit with which the stem, patch embedding or convolutions, makes one
    /// encoder token: `3 * patch²` for pictures.
    pub stem_inputs: u32,
    /// The way into the LLM.
    pub projector: Projector,
}

/// The MLP of a transformer layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mlp {
    /// Two matrices.
    Plain,
    /// Three matrices, as in `SwiGLU`.
    Gated,
}

/// The projector from encoder tokens to the width of the LLM; charged to the encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Projector {
    /// Encoder tokens that become one projected token.
    pub merged_tokens: NonZeroU32,
    /// Width of a token that enters.
    pub input: u32,
    /// Width between the two matrices; `None` for a single matrix.
    pub middle: Option<u32>,
}

/// A decoder-only language model with grouped-query attention and gated MLPs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LlmSpec {
    /// Transformer layers.
    pub layers: u32,
    /// Width of a token.
    pub hidden: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Width between the matrices of the MLP.
    pub ffn: u32,
    /// Rows of the LM head, padding included.
    pub vocab: u32,
}

impl ModelSpec {
    /// Returns the preset of this name, one of [`ModelSpec::preset_names`].
    ///
    /// # Errors
    /// [`Error::UnknownModel`] with the known names, if there is none.
    ///
    /// # Source
    /// Dimensions: the published configurations. SigLIP-so400m has all its 27 layers, InternViT-6B the 45
    /// of the published model (48 less the 3 that are discarded); class tokens of encoders are not counted.
    /// `internvl3-8b` joins InternViT-300M with the LLM row of Qwen2.5-7B. `omni-7b` and `tiny` are
    /// compositions of this project, not published models.
    pub fn preset(name: &str) -> Result<Self> {
        for preset in PRESETS {
            if preset.name == name {
                return Ok(Self {
                    name: name.to_owned(),
                    vision: preset.vision,
                    audio: preset.audio,
                    llm: preset.llm,
                });
            }
        }
        Err(Error::UnknownModel { name: name.to_owned(), known: PRESET_NAMES.join(", ") })
    }

    /// Returns the names that [`ModelSpec::preset`] knows.
    #[must_use]
    pub const fn preset_names() -> &'static [&'static str] {
        &PRESET_NAMES
    }
}

/// A row of the preset table.
#[derive(Clone, Copy)]
struct Preset {
    name: &'static str,
    vision: Option<VisionSpec>,
    audio: Option<AudioSpec>,
    llm: LlmSpec,
}

const PRESETS: [Preset; 12] = [
    Preset { name: "llava-ov-qwen2.5-7b", vision: Some(siglip(QWEN2_5_7B)), audio: None, llm: QWEN2_5_7B },
    Preset { name: "llava-ov-qwen2.5-32b", vision: Some(siglip(QWEN2_5_32B)), audio: None, llm: QWEN2_5_32B },
    Preset { name: "llava-ov-qwen2.5-72b", vision: Some(siglip(QWEN2_5_72B)), audio: None, llm: QWEN2_5_72B },
    Preset { name: "llava-ov-llama3-8b", vision: Some(siglip(LLAMA3_8B)), audio: None, llm: LLAMA3_8B },
    Preset { name: "llava-ov-llama3-70b", vision: Some(siglip(LLAMA3_70B)), audio: None, llm: LLAMA3_70B },
    Preset { name: "internvl2.5-qwen2.5-72b", vision: Some(INTERN_VIT_6B), audio: None, llm: QWEN2_5_72B },
    Preset { name: "internvl3-8b", vision: Some(INTERN_VIT_300M), audio: None, llm: QWEN2_5_7B },
    Preset { name: "qwen2-vl-7b", vision: Some(QWEN2_VL_VIT), audio: None, llm: QWEN2_5_7B },
    Preset { name: "qwen2.5-vl-7b", vision: Some(QWEN2_5_VL_VIT), audio: None, llm: QWEN2_5_7B },
    Preset { name: "qwen2-audio-7b", vision: None, audio: Some(WHISPER_LARGE), llm: QWEN_7B },
    Preset { name: "omni-7b", vision: Some(siglip(QWEN2_5_7B)), audio: Some(WHISPER_LARGE), llm: QWEN2_5_7B },
    Preset { name: "tiny", vision: Some(TINY_VIT), audio: Some(TINY_WHISPER), llm: TINY_LLM },
];

const PRESET_NAMES: [&str; PRESETS.len()] = {
    let mut names = [""; PRESETS.len()];
    let mut preset = 0;
    while preset < PRESETS.len() {
        names[preset] = PRESETS[preset].name;
        preset += 1;
    }
    names
};

/// Qwen2-7B has the same dimensions.
const QWEN2_5_7B: LlmSpec = llm(28, 3584, [28, 4, 128], 18_944, 152_064);
const QWEN2_5_32B: LlmSpec = llm(64, 5120, [40, 8, 128], 27_648, 152_064);
const QWEN2_5_72B: LlmSpec = llm(80, 8192, [64, 8, 128], 29_568, 152_064);
const LLAMA3_8B: LlmSpec = llm(32, 4096, [32, 8, 128], 14_336, 128_256);
const LLAMA3_70B: LlmSpec = llm(80, 8192, [64, 8, 128], 28_672, 128_256);
/// The LLM of Qwen2-Audio.
const QWEN_7B: LlmSpec = llm(32, 4096, [32, 32, 128], 11_008, 156_032);
const TINY_LLM: LlmSpec = llm(4, 256, [4, 2, 64], 1024, 4096);

/// `heads` are query heads, key and value heads, and the width of one.
const fn llm(layers: u32, hidden: u32, heads: [u32; 3], ffn: u32, vocab: u32) -> LlmSpec {
    let [heads, kv_heads, head_dim] = heads;
    LlmSpec { layers, hidden, heads, kv_heads, head_dim, ffn, vocab }
}

/// SigLIP-so400m as in LLaVA-OneVision, whose projector is as wide as the LLM.
const fn siglip(llm: LlmSpec) -> VisionSpec {
    VisionSpec {
        encoder: EncoderSpec {
            layers: 27,
            windowed_layers: 0,
            hidden: 1152,
            heads: 16,
            ffn: 4304,
            mlp: Mlp::Plain,
            stem_inputs: 3 * 14 * 14,
            projector: projector(1, 1152, Some(llm.hidden)),
        },
        rule: VisionRule::AnyRes(AnyRes::LLAVA_ONEVISION),
    }
}

const INTERN_VIT_300M: VisionSpec = VisionSpec {
    encoder: EncoderSpec {
        layers: 24,
        windowed_layers: 0,
        hidden: 1024,
        heads: 16,
        ffn: 4096,
        mlp: Mlp::Plain,
        stem_inputs: 3 * 14 * 14,
        projector: projector(4, 4 * 1024, Some(QWEN2_5_7B.hidden)),
    },
    rule: VisionRule::DynamicTiles(DynamicTiles::INTERN_VL),
};

const INTERN_VIT_6B: VisionSpec = VisionSpec {
    encoder: EncoderSpec {
        layers: 45,
        windowed_layers: 0,
        hidden: 3200,
        heads: 25,
        ffn: 12_800,
        mlp: Mlp::Plain,
        stem_inputs: 3 * 14 * 14,
        projector: projector(4, 4 * 3200, Some(QWEN2_5_72B.hidden)),
    },
    rule: VisionRule::DynamicTiles(DynamicTiles::INTERN_VL),
};

const QWEN2_VL_VIT: VisionSpec = VisionSpec {
    encoder: EncoderSpec {
        layers: 32,
        windowed_layers: 0,
        hidden: 1280,
        heads: 16,
        ffn: 5120,
        mlp: Mlp::Plain,
        stem_inputs: 2 * 3 * 14 * 14,
        projector: projector(4, 4 * 1280, Some(4 * 1280)),
    },
    rule: VisionRule::Native(NativeResolution::QWEN2_VL),
};

/// Full attention in layers 7, 15, 23 and 31, windows in the others.
const QWEN2_5_VL_VIT: VisionSpec = VisionSpec {
    encoder: EncoderSpec { windowed_layers: 28, ffn: 3420, mlp: Mlp::Gated, ..QWEN2_VL_VIT.encoder },
    rule: VisionRule::Native(NativeResolution::QWEN2_5_VL),
};

/// Whisper-large-v3 as in Qwen2-Audio. One encoder token takes two outputs of the first convolution (128 mel
/// bins, width 3) and one of the second (1280 channels, width 3).
const WHISPER_LARGE: AudioSpec = AudioSpec {
    encoder: EncoderSpec {
        layers: 32,
        windowed_layers: 0,
        hidden: 1280,
        heads: 20,
        ffn: 5120,
        mlp: Mlp::Plain,
        stem_inputs: 2 * 3 * 128 + 3 * 1280,
        projector: projector(2, 1280, None),
    },
};

const TINY_VIT: VisionSpec = VisionSpec {
    encoder: EncoderSpec {
        layers: 4,
        windowed_layers: 0,
        hidden: 256,
        heads: 4,
        ffn: 1024,
        mlp: Mlp::Plain,
        stem_inputs: 3 * 14 * 14,
        projector: projector(4, 4 * 256, Some(TINY_LLM.hidden)),
    },
    rule: VisionRule::DynamicTiles(DynamicTiles {
        tile_pixels: 224,
        tile_patches: 256,
        tile_tokens: 64,
        tiles_max: 4,
        frames_max: 8,
        marker_tokens: 2,
    }),
};

const TINY_WHISPER: AudioSpec = AudioSpec {
    encoder: EncoderSpec {
        stem_inputs: 2 * 3 * 80 + 3 * 256,
        projector: projector(2, 256, None),
        ..TINY_VIT.encoder
    },
};

const fn projector(merged_tokens: u32, input: u32, middle: Option<u32>) -> Projector {
    let merged_tokens = match NonZeroU32::new(merged_tokens) {
        Some(merged_tokens) => merged_tokens,
        None => NonZeroU32::MIN,
    };
    Projector { merged_tokens, input, middle }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_name_leads_to_its_preset() {
        for name in ModelSpec::preset_names() {
            let spec = ModelSpec::preset(name).unwrap();
            assert_eq!(spec.name, *name);
            assert!(spec.vision.is_some() || spec.audio.is_some());
        }
    }

    #[test]
    fn heads_divide_the_width_of_every_preset() {
        for preset in PRESETS {
            assert_eq!(preset.llm.heads * preset.llm.head_dim, preset.llm.hidden, "{}", preset.name);
            assert_eq!(preset.llm.heads % preset.llm.kv_heads, 0, "{}", preset.name);
            let encoders = [preset.vision.map(|v| v.encoder), preset.audio.map(|a| a.encoder)];
            for encoder in encoders.into_iter().flatten() {
                assert_eq!(encoder.hidden % encoder.heads, 0, "{}", preset.name);
                assert!(encoder.windowed_layers <= encoder.layers);
            }
        }
    }

    #[test]
    fn presets_survive_json() {
        for name in ModelSpec::preset_names() {
            let spec = ModelSpec::preset(name).unwrap();
            let json = serde_json::to_string(&spec).unwrap();
            assert_eq!(serde_json::from_str::<ModelSpec>(&json).unwrap(), spec);
        }
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let error = ModelSpec::preset("gpt-5").unwrap_err();
        let message = error.to_string();
        assert!(message.starts_with("unknown model `gpt-5`, known are llava-ov-qwen2.5-7b, "), "{message}");
        for name in ModelSpec::preset_names() {
            assert!(message.contains(name));
        }
    }
}
