//! Lists published models by name.

use crate::error::{Error, Result};
use crate::model::towers::{self, InternVitOptions, SquareInput, TowerSize};
use crate::model::{
    AttentionBias, AudioSpec, EncoderSpec, LlmDetails, LlmSpec, ModelSpec, Projector, VisionSpec,
};
use crate::tokens::VisionRule;
use crate::tokens::any_res::AnyRes;
use crate::tokens::audio::AudioRule;
use crate::tokens::dynamic_tiles::DynamicTiles;
use crate::tokens::native::NativeResolution;

impl ModelSpec {
    /// Returns the preset of this name, one of [`ModelSpec::preset_names`].
    ///
    /// # Errors
    /// [`Error::UnknownModel`] with the known names, if there is none.
    ///
    /// # Source
    /// Sizes: the published configurations. SigLIP-so400m has all its 27 layers and no pooling head,
    /// InternViT-6B the 45 layers of the published model (48 less the 3 that are discarded). `internvl3-8b`
    /// joins InternViT-300M with the LLM of Qwen2.5-7B. `omni-7b` and `tiny` are compositions of this
    /// project, not published models.
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

/// Row of the preset table.
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
    Preset { name: "qwen2-audio-7b", vision: None, audio: Some(whisper_large(QWEN_7B)), llm: QWEN_7B },
    Preset {
        name: "omni-7b",
        vision: Some(siglip(QWEN2_5_7B)),
        audio: Some(whisper_large(QWEN2_5_7B)),
        llm: QWEN2_5_7B,
    },
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

/// Qwen2.5-7B; Qwen2-7B has the same sizes.
const QWEN2_5_7B: LlmSpec = qwen2(28, 3584, [28, 4, 128], 18_944, 152_064);
const QWEN2_5_32B: LlmSpec = qwen2(64, 5120, [40, 8, 128], 27_648, 152_064);
const QWEN2_5_72B: LlmSpec = qwen2(80, 8192, [64, 8, 128], 29_568, 152_064);
const LLAMA3_8B: LlmSpec = llama(32, 4096, [32, 8, 128], 14_336, 128_256);
const LLAMA3_70B: LlmSpec = llama(80, 8192, [64, 8, 128], 28_672, 128_256);
/// The LLM of Qwen2-Audio.
const QWEN_7B: LlmSpec = qwen2(32, 4096, [32, 32, 128], 11_008, 156_032);
const TINY_LLM: LlmSpec = llama(4, 256, [4, 2, 64], 1024, 4096);

/// Makes a Llama; `heads` are query heads, key and value heads, and the width of one head.
const fn llama(layers: u32, hidden: u32, heads: [u32; 3], ffn: u32, vocab: u32) -> LlmSpec {
    let [heads, kv_heads, head_dim] = heads;
    let details = LlmDetails {
        attention_bias: AttentionBias::None,
        has_mlp_bias: false,
        has_qk_norm: false,
        has_tied_embeddings: false,
    };
    LlmSpec { layers, hidden, heads, kv_heads, head_dim, ffn, vocab, details }
}

const fn qwen2(layers: u32, hidden: u32, heads: [u32; 3], ffn: u32, vocab: u32) -> LlmSpec {
    let mut spec = llama(layers, hidden, heads, ffn, vocab);
    spec.details.attention_bias = AttentionBias::Qkv;
    spec
}

const PATCH_INPUTS: u32 = 3 * 14 * 14;

const fn vision(encoder: EncoderSpec, projector: Projector, rule: VisionRule) -> VisionSpec {
    VisionSpec { encoder: EncoderSpec { projector, ..encoder }, rule }
}

/// Makes SigLIP-so400m as in LLaVA-OneVision, whose projector is as wide as the LLM and has a newline
/// embedding.
const fn siglip(llm: LlmSpec) -> VisionSpec {
    let dimensions = TowerSize { layers: 27, hidden: 1152, heads: 16, ffn: 4304 };
    let tower = towers::siglip(dimensions, SquareInput { patch_inputs: PATCH_INPUTS, patches: 729 }, false);
    let mut projector = towers::llava_projector(1152, llm.hidden, true);
    projector.vector_parameters += llm.hidden as u64;
    vision(tower, projector, VisionRule::AnyRes(AnyRes::LLAVA_ONEVISION))
}

const TILE: SquareInput = SquareInput { patch_inputs: PATCH_INPUTS, patches: 1024 };

const INTERN_VIT_300M: VisionSpec = vision(
    towers::intern_vit(
        TowerSize { layers: 24, hidden: 1024, heads: 16, ffn: 4096 },
        TILE,
        InternVitOptions::SMALL,
    ),
    towers::intern_vl_projector(1024, 4, QWEN2_5_7B.hidden),
    VisionRule::DynamicTiles(DynamicTiles::INTERN_VL),
);

const INTERN_VIT_6B: VisionSpec = vision(
    towers::intern_vit(
        TowerSize { layers: 45, hidden: 3200, heads: 25, ffn: 12_800 },
        TILE,
        InternVitOptions::LARGE,
    ),
    towers::intern_vl_projector(3200, 4, QWEN2_5_72B.hidden),
    VisionRule::DynamicTiles(DynamicTiles::INTERN_VL),
);

const QWEN2_VL_VIT: VisionSpec = vision(
    towers::qwen2_vl(TowerSize { layers: 32, hidden: 1280, heads: 16, ffn: 5120 }, 2 * PATCH_INPUTS),
    towers::qwen_merger(1280, 4, 2, QWEN2_5_7B.hidden),
    VisionRule::Native(NativeResolution::QWEN2_VL),
);

/// Qwen2.5-VL's tower, with full attention in layers 7, 15, 23 and 31 and windows in the others.
const QWEN2_5_VL_VIT: VisionSpec = vision(
    towers::qwen2_5_vl(TowerSize { layers: 32, hidden: 1280, heads: 16, ffn: 3420 }, 2 * PATCH_INPUTS, 28),
    towers::qwen_merger(1280, 4, 1, QWEN2_5_7B.hidden),
    VisionRule::Native(NativeResolution::QWEN2_5_VL),
);

/// Makes Whisper-large-v3 as in Qwen2-Audio.
const fn whisper_large(llm: LlmSpec) -> AudioSpec {
    let dimensions = TowerSize { layers: 32, hidden: 1280, heads: 20, ffn: 5120 };
    let projector = towers::qwen2_audio_projector(1280, llm.hidden);
    let tower = towers::whisper(dimensions, 128, 1500);
    AudioSpec { encoder: EncoderSpec { projector, ..tower }, rule: AudioRule::QWEN2_AUDIO }
}

const TINY: TowerSize = TowerSize { layers: 4, hidden: 256, heads: 4, ffn: 1024 };

const TINY_VIT: VisionSpec = vision(
    towers::siglip(TINY, SquareInput { patch_inputs: PATCH_INPUTS, patches: 256 }, false),
    towers::intern_vl_projector(256, 4, TINY_LLM.hidden),
    VisionRule::DynamicTiles(DynamicTiles {
        tile_pixels: 224,
        tile_patches: 256,
        tile_tokens: 64,
        tiles_max: 4,
        frames_max: 8,
        marker_tokens: 2,
    }),
);

const TINY_WHISPER: AudioSpec = AudioSpec {
    encoder: EncoderSpec {
        projector: towers::qwen2_audio_projector(256, TINY_LLM.hidden),
        ..towers::whisper(TINY, 80, 1500)
    },
    rule: AudioRule::QWEN2_AUDIO,
};

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
    fn a_specification_without_details_is_read() {
        let mut json = serde_json::to_value(ModelSpec::preset("qwen2-audio-7b").unwrap()).unwrap();
        json["audio"].as_object_mut().unwrap().remove("rule");
        json["audio"]["encoder"].as_object_mut().unwrap().remove("details");
        json["llm"].as_object_mut().unwrap().remove("details");
        let spec: ModelSpec = serde_json::from_value(json).unwrap();
        assert_eq!(spec.audio.unwrap().rule, AudioRule::QWEN2_AUDIO);
        assert_eq!(spec.llm.details, LlmDetails::default());
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
