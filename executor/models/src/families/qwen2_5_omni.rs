//! Qwen2.5-Omni: the thinker, with the Qwen2.5-VL image encoder and Whisper over chunks.
//!
//! Tensors in a full checkpoint start with `thinker.`; talker and vocoder tensors, which generate speech,
//! stay unchanged.
//!
//! # Source
//! Xu et al.: "Qwen2.5-Omni Technical Report", 2025, arXiv:2503.20215.

use dflop_costmodel::FamilyId;
use dflop_costmodel::tokens::audio::AudioRule;

use super::language_models::{DecoderDefaults, decoder};
use super::qwen_vl::{VisionNames, qwen2_5_vl};
use super::qwen2_audio::{AudioNames, whisper};
use super::{BlockSource, FamilyBlocks};
use crate::encoder::{Arrangement, AudioPositions, EncoderConfig};
use crate::error::{Error, Result};
use crate::layers::DimensionFields;
use crate::llm::LlmConfig;

/// Default base for the decoder rotation frequencies.
const THETA: f64 = 1e6;

/// Families in this file.
pub(super) const FAMILIES: &[&dyn FamilyBlocks] = &[&Qwen25Omni];

/// Qwen2.5-Omni.
#[derive(Debug)]
struct Qwen25Omni;

/// Tensor and field names in a checkpoint form.
struct Names {
    vision: VisionNames,
    audio: AudioNames,
    /// Audio projector name.
    audio_projector: &'static str,
    /// Name of the begin and end marks for a clip, which the thinker does not read.
    audio_marks: &'static str,
    decoder: DecoderDefaults,
    /// Prefixes of tensors that do not belong to the thinker.
    others: &'static [&'static str],
}

/// A thinker-only checkpoint.
const THINKER: Names = Names {
    vision: VisionNames { prefix: "visual.", has_fused_qkv: false },
    audio: AudioNames { prefix: "audio_tower.", last_norm: "ln_post", fields: &FIELDS[0] },
    audio_projector: "audio_tower.proj",
    audio_marks: "audio_tower.audio_bos_eos_token.",
    decoder: DecoderDefaults { theta: THETA, ..DecoderDefaults::ALONE },
    others: &[],
};

/// A full checkpoint.
const WHOLE: Names = Names {
    vision: VisionNames { prefix: "thinker.visual.", has_fused_qkv: false },
    audio: AudioNames { prefix: "thinker.audio_tower.", last_norm: "ln_post", fields: &FIELDS[1] },
    audio_projector: "thinker.audio_tower.proj",
    audio_marks: "thinker.audio_tower.audio_bos_eos_token.",
    decoder: DecoderDefaults {
        prefix: "thinker.model.",
        head: "thinker.lm_head.weight",
        theta: THETA,
        ..DecoderDefaults::ALONE
    },
    others: &["talker.", "token2wav."],
};

const FIELDS: [DimensionFields; 2] = [
    DimensionFields {
        heads: "audio_config.encoder_attention_heads",
        kv_heads: "audio_config.encoder_attention_heads",
        mlp: "audio_config.encoder_ffn_dim",
    },
    DimensionFields {
        heads: "thinker_config.audio_config.encoder_attention_heads",
        kv_heads: "thinker_config.audio_config.encoder_attention_heads",
        mlp: "thinker_config.audio_config.encoder_ffn_dim",
    },
];

impl FamilyBlocks for Qwen25Omni {
    fn id(&self) -> FamilyId {
        FamilyId::new("qwen2_5_omni")
    }

    fn model_types(&self) -> &[&str] {
        &["qwen2_5_omni", "qwen2_5_omni_thinker"]
    }

    fn vision(&self, source: &BlockSource<'_>) -> Result<EncoderConfig> {
        let (thinker, names) = thinker(source)?;
        let ignored = names.others.iter().map(|&prefix| prefix.to_owned()).collect();
        Ok(EncoderConfig { ignored, ..qwen2_5_vl(&thinker, &names.vision)? })
    }

    fn audio(&self, source: &BlockSource<'_>) -> Result<EncoderConfig> {
        let (thinker, names) = thinker(source)?;
        let AudioRule::Chunks(rule) = thinker.audio()?.rule else {
            let problem = "must be that of chunks".to_owned();
            return Err(Error::ModelConfig { field: "audio rule".to_owned(), problem });
        };
        let frames = rule.chunk_frames.max(1) as usize;
        let positions = AudioPositions::Computed(frames.div_ceil(2));
        let projector = (names.audio_projector.to_owned(), thinker.llm()?.hidden);
        let encoder =
            whisper(&thinker, &names.audio, projector, (positions, Arrangement::Chunks { frames }))?;
        Ok(EncoderConfig { ignored: vec![names.audio_marks.to_owned()], ..encoder })
    }

    fn llm(&self, source: &BlockSource<'_>) -> Result<LlmConfig> {
        let (thinker, names) = thinker(source)?;
        decoder(&thinker, &names.decoder)
    }
}

/// Returns the sizes with the thinker fields, and the tensor names; without a checkpoint the names in the
/// full model.
fn thinker<'a>(source: &BlockSource<'a>) -> Result<(BlockSource<'a>, &'static Names)> {
    let Some(config) = &source.config else { return Ok((source.clone(), &WHOLE)) };
    if config.text("model_type")? == Some("qwen2_5_omni_thinker") {
        return Ok((source.clone(), &THINKER));
    }
    let config = Some(config.child_or_empty("thinker_config")?);
    Ok((BlockSource { config, ..source.clone() }, &WHOLE))
}
