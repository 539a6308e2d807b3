//! Qwen2.5-Omni: the thinker, with Qwen2.5-VL's image encoder and Whisper over chunks with real lengths.
//!
//! A whole checkpoint has the thinker under `thinker_config`. The talker and vocoder create speech from the
//! thinker's output; they are not part of the model here.

use super::fixed_resolution::{TowerSize, product};
use super::language_models::{self, QWEN2_5_7B};
use super::qwen_vl::{self, QWEN2_5_VL_VIT};
use super::qwen2_audio::{self, whisper};
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{AudioSpec, EncoderSpec, FamilyId, LlmSpec, ModelFamily, Preset, VisionSpec};
use crate::tokens::VisionRule;
use crate::tokens::audio::{AudioChunks, AudioRule, MEL_FRAMES_PER_SECOND};
use crate::tokens::native::NativeResolution;

/// Positions per second, one per audio token.
const POSITIONS_PER_SECOND: u32 = 25;
const FAMILY: FamilyId = FamilyId::new("qwen2_5_omni");

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&Qwen25Omni];

/// Qwen2.5-Omni.
#[derive(Debug)]
struct Qwen25Omni;

impl ModelFamily for Qwen25Omni {
    fn id(&self) -> FamilyId {
        FAMILY
    }

    fn model_types(&self) -> &[&str] {
        &["qwen2_5_omni", "qwen2_5_omni_thinker"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        let thinker = thinker(&files.config)?;
        // Vision tower fields are at the same place in the thinker's configuration as in Qwen2.5-VL's.
        let source = CheckpointFields { config: thinker, ..files.clone() };
        check_time(&source)?;
        let llm = llm(&source.config)?;
        let (vision, audio) = (vision(&source, &llm)?, audio(&source, &llm)?);
        Ok(PartialModelSpec { family: FAMILY, vision: Some(vision), audio: Some(audio), llm: Some(llm) })
    }

    fn presets(&self) -> &[Preset] {
        &[Preset {
            name: "qwen2.5-omni-7b",
            vision: Some(VisionSpec { family: FAMILY, ..QWEN2_5_VL_VIT }),
            audio: Some(WHISPER),
            llm: QWEN2_5_7B,
        }]
    }
}

const WHISPER: AudioSpec = AudioSpec {
    family: FAMILY,
    encoder: encoder(TowerSize { layers: 32, hidden: 1280, heads: 20, ffn: 5120 }, 128, QWEN2_5_7B.hidden),
    rule: AudioRule::Chunks(AudioChunks::QWEN2_5_OMNI),
};

/// Returns the thinker's configuration: a part of the whole model's, or the document itself.
fn thinker<'a>(config: &ConfigFields<'a>) -> Result<ConfigFields<'a>> {
    if config.text("model_type")? == Some("qwen2_5_omni_thinker") {
        return Ok(config.clone());
    }
    config.child_or_empty("thinker_config")
}

/// Checks the assumptions for positions in time: 25 per second, and videos without sound, which is a separate
/// medium here.
fn check_time(source: &CheckpointFields<'_>) -> Result<()> {
    let (key, only) = ("position_id_per_seconds", POSITIONS_PER_SECOND);
    let found = source.config.count(key, only)?;
    if found != only {
        return Err(source.config.invalid(key, format!("must be {only}, found {found}")));
    }
    refuse_sound_of_videos(source)
}

/// Rejects a processor that reads a video's sound.
pub(super) fn refuse_sound_of_videos(source: &CheckpointFields<'_>) -> Result<()> {
    for key in ["load_audio_from_video", "use_audio_in_video"] {
        if source.processor.flag(key, false)? {
            let problem = "must be false: the sound of a video is not read, give it as a clip of its own";
            return Err(source.processor.invalid(key, problem));
        }
    }
    Ok(())
}

/// # Source
/// `Qwen2_5OmniThinkerConfig` and `Qwen2_5OmniTextConfig` in transformers 5.24.0, in which the thinker's
/// field decides on tied embeddings.
fn llm(thinker: &ConfigFields<'_>) -> Result<LlmSpec> {
    let text = thinker.child_or_empty("text_config")?;
    let mut llm = language_models::text_config(&text, "qwen2_5_omni_text")?;
    llm.details.has_tied_embeddings = thinker.flag("tie_word_embeddings", false)?;
    Ok(llm)
}

/// Reads the Qwen2.5-VL tower. `Qwen2_5OmniProcessor` in transformers 5.24.0 sets the video frame sizes
/// itself, whatever the files have.
fn vision(source: &CheckpointFields<'_>, llm: &LlmSpec) -> Result<VisionSpec> {
    let mut vision = qwen_vl::vision_2_5(source, FAMILY, llm)?;
    if let VisionRule::Native(rule) = &mut vision.rule {
        rule.frame = NativeResolution::QWEN2_5_VL.frame;
    }
    Ok(vision)
}

/// # Source
/// `Qwen2_5OmniAudioEncoderConfig` in transformers 5.24.0.
fn audio(source: &CheckpointFields<'_>, llm: &LlmSpec) -> Result<AudioSpec> {
    let fields = source.config.child_or_empty("audio_config")?;
    let hidden = fields.count("d_model", 1280)?;
    let heads = fields.count("encoder_attention_heads", 20)?;
    fields.require_multiple("d_model", hidden, "encoder_attention_heads", heads)?;
    if !hidden.is_multiple_of(2) || hidden < 4 {
        let problem = format!("= {hidden} must be even and at least 4, for sine and cosine of positions");
        return Err(fields.invalid("d_model", problem));
    }
    let outputs = fields.count("output_dim", 3584)?;
    if outputs != llm.hidden {
        let problem = format!("= {outputs}, but the language model is {} wide", llm.hidden);
        return Err(fields.invalid("output_dim", problem));
    }
    let size = TowerSize {
        layers: fields.count("encoder_layers", 32)?,
        hidden,
        heads,
        ffn: fields.count("encoder_ffn_dim", 5120)?,
    };
    let mels = fields.count("num_mel_bins", 128)?;
    let chunk_frames = chunk_frames(&fields)?;
    let spectrogram_frames = spectrogram_frames(source, mels, chunk_frames)?;
    let rule = AudioChunks { chunk_frames, spectrogram_frames, ..AudioChunks::QWEN2_5_OMNI };
    let encoder = encoder(size, mels, llm.hidden);
    Ok(AudioSpec { family: FAMILY, encoder, rule: AudioRule::Chunks(rule) })
}

/// Builds Whisper with computed positions; the projector averages token pairs. The tower has a clip's begin
/// and end marks in an embedding, which the thinker does not read.
const fn encoder(size: TowerSize, mels: u32, llm_hidden: u32) -> EncoderSpec {
    let mut spec = whisper(size, mels, 0);
    let marks = product(2, llm_hidden);
    spec.details.outside_parameters = spec.details.outside_parameters.saturating_add(marks);
    spec.projector = qwen2_audio::projector(size.hidden, llm_hidden);
    spec
}

/// Returns the mel frames per chunk, twice the number of tokens that attend to each other.
fn chunk_frames(fields: &ConfigFields<'_>) -> Result<u32> {
    let window = fields.count("n_window", 100)?;
    let positions = fields.count("max_source_positions", 1500)?;
    if window > positions {
        let problem = format!("= {window} tokens, but there are {positions} positions");
        return Err(fields.invalid("n_window", problem));
    }
    Ok(2 * window)
}

/// Returns the mel frames per spectrogram, where the feature extractor cuts off a clip.
fn spectrogram_frames(source: &CheckpointFields<'_>, mels: u32, chunk_frames: u32) -> Result<u32> {
    let nested = source.processor.child("feature_extractor")?;
    let Some(extractor) = nested.or_else(|| source.preprocessor.clone()) else {
        return Ok(AudioChunks::QWEN2_5_OMNI.spectrogram_frames.next_multiple_of(chunk_frames));
    };
    qwen2_audio::check_spectrogram(&extractor, mels)?;
    let seconds = extractor.count("chunk_length", 30)?;
    match seconds.checked_mul(MEL_FRAMES_PER_SECOND) {
        Some(frames) if frames.is_multiple_of(chunk_frames) => Ok(frames),
        _ => {
            let problem = format!("= {seconds} s must be a multiple of the {chunk_frames} frames of a chunk");
            Err(extractor.invalid("chunk_length", problem))
        }
    }
}
