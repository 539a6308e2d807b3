//! Joins modules from several checkpoints to a single model, and has presets that join encoders from several
//! families, composed for this project.

use super::clip_siglip::siglip_encoder;
use super::fixed_resolution::{PATCH_INPUTS, SquareInput, TowerSize};
use super::language_models::{QWEN2_5_7B, TINY_LLM};
use super::llava_onevision::siglip_so400m;
use super::qwen2_audio::{whisper, whisper_large};
use super::{intern_vit, llava_onevision, qwen2_audio};
use crate::error::{Error, Result};
use crate::model::config::{CheckpointFields, PartialModelSpec};
use crate::model::{AudioSpec, EncoderSpec, FamilyId, ModelFamily, ModelSpec, Preset, VisionSpec};
use crate::tokens::VisionRule;
use crate::tokens::audio::AudioRule;
use crate::tokens::dynamic_tiles::DynamicTiles;

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&Composed];

/// Models whose encoders belong to several families; no checkpoint has this family.
#[derive(Debug)]
struct Composed;

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
        ..siglip_encoder(TINY, SquareInput { patch_inputs: PATCH_INPUTS, patches: 256 }, false)
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

impl ModelSpec {
    /// Joins modules to a model: one language model, at most one encoder per modality.
    ///
    /// A vision encoder without a language model gets LLaVA's projector (two matrices, as wide as the LLM),
    /// an audio encoder gets Qwen2-Audio's projector (pooling by 2, a single matrix). The family is the
    /// encoders' common family, the language model's without encoders, or else [`FamilyId::COMPOSED`].
    ///
    /// # Errors
    /// [`Error::Composition`] if there is no language model, or two modules of a kind.
    pub fn compose(name: &str, parts: &[PartialModelSpec]) -> Result<Self> {
        let invalid =
            |problem: &str| Error::Composition { name: name.to_owned(), problem: problem.to_owned() };
        let only = |found: Vec<usize>, kind: &str| match found[..] {
            [] => Ok(None),
            [only] => Ok(Some(parts[only])),
            _ => Err(invalid(&format!("it has {} {kind}", found.len()))),
        };
        let having =
            |has: fn(&PartialModelSpec) -> bool| (0..parts.len()).filter(|&at| has(&parts[at])).collect();
        let llm = only(having(|part| part.llm.is_some()), "language models")?;
        let Some((llm, llm_family)) = llm.and_then(|part| Some((part.llm?, part.family))) else {
            return Err(invalid("it is an encoder; join it with a language model"));
        };
        let vision = only(having(|part| part.vision.is_some()), "encoders of images")?;
        let audio = only(having(|part| part.audio.is_some()), "encoders of audio")?;
        let vision = vision.and_then(|part| part.vision.map(|vision| (vision, part.llm.is_some())));
        let audio = audio.and_then(|part| part.audio.map(|audio| (audio, part.llm.is_some())));
        let encoders = [vision.map(|(vision, _)| vision.family), audio.map(|(audio, _)| audio.family)];
        let family = match encoders {
            [Some(vision), Some(audio)] if vision != audio => FamilyId::COMPOSED,
            [Some(family), _] | [None, Some(family)] => family,
            [None, None] => llm_family,
        };
        Ok(Self {
            name: name.to_owned(),
            family,
            vision: vision.map(|(mut vision, has_projector)| {
                if !has_projector {
                    let hidden = vision.encoder.hidden;
                    vision.encoder.projector = llava_onevision::projector(hidden, llm.hidden, true);
                }
                vision
            }),
            audio: audio.map(|(mut audio, has_projector)| {
                if !has_projector {
                    let hidden = audio.encoder.hidden;
                    audio.encoder.projector = qwen2_audio::projector(hidden, llm.hidden);
                }
                audio
            }),
            llm,
        })
    }
}
