//! Presets that join encoders from several families, composed for this project.

use super::language_models::{QWEN2_5_7B, TINY_LLM};
use super::llava_onevision::siglip_so400m;
use super::qwen2_audio::{self, whisper, whisper_large};
use super::tower::{PATCH_INPUTS, SquareInput, TowerSize};
use super::{intern_vit, siglip};
use crate::error::Result;
use crate::model::config::{CheckpointFields, PartialModelSpec};
use crate::model::{AudioSpec, EncoderSpec, FamilyId, ModelFamily, Preset, VisionSpec};
use crate::tokens::VisionRule;
use crate::tokens::audio::AudioRule;
use crate::tokens::dynamic_tiles::DynamicTiles;

/// Models whose encoders belong to several families; no checkpoint has this family.
#[derive(Debug)]
pub(super) struct Composed;

impl ModelFamily for Composed {
    fn id(&self) -> FamilyId {
        FamilyId::COMPOSED
    }

    fn model_types(&self) -> &[&str] {
        &[]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        Err(files.config.invalid("model_type", "is not that of one checkpoint"))
    }

    fn presets(&self) -> &[Preset] {
        &PRESETS
    }
}

const PRESETS: [Preset; 2] = [
    Preset {
        name: "omni-7b",
        vision: Some(siglip_so400m(QWEN2_5_7B)),
        audio: Some(whisper_large(QWEN2_5_7B)),
        llm: QWEN2_5_7B,
    },
    Preset { name: "tiny", vision: Some(TINY_VIT), audio: Some(TINY_WHISPER), llm: TINY_LLM },
];

const TINY: TowerSize = TowerSize { layers: 4, hidden: 256, heads: 4, ffn: 1024 };

const TINY_VIT: VisionSpec = VisionSpec {
    family: intern_vit::FAMILY,
    encoder: EncoderSpec {
        projector: intern_vit::projector(256, 4, TINY_LLM.hidden),
        ..siglip::encoder(TINY, SquareInput { patch_inputs: PATCH_INPUTS, patches: 256 }, false)
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
    family: qwen2_audio::FAMILY,
    encoder: EncoderSpec {
        projector: qwen2_audio::projector(256, TINY_LLM.hidden),
        ..whisper(TINY, 80, 1500)
    },
    rule: AudioRule::QWEN2_AUDIO,
};
