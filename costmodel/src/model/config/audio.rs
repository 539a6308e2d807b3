//! Reads Qwen2-Audio, and the encoder of Whisper alone.

use super::{CheckpointFields, Fields, PartialModelSpec, llm};
use crate::error::Result;
use crate::model::towers::{self, TowerSize};
use crate::model::{AudioSpec, EncoderSpec};
use crate::tokens::audio::AudioRule;

/// Settings of the feature extractor that the token rule assumes.
const EXTRACTOR: [(&str, u32); 2] = [("sampling_rate", 16_000), ("hop_length", 160)];
const MEL_FRAMES_PER_SECOND: u32 = 100;
/// Mel frames of an encoder token.
const STRIDE: u32 = 2;

/// # Source
/// `Qwen2AudioConfig` and `Qwen2AudioEncoderConfig` of transformers 4.57.1.
pub(super) fn qwen2_audio(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let llm = llm::text_config(&source.config.child_or_empty("text_config")?, "qwen2")?;
    let audio = encoder(source, &source.config.child_or_empty("audio_config")?, LARGE)?;
    if audio.rule.window_tokens % 2 != 0 {
        let problem = format!("= {} must be even, tokens are pooled by 2", audio.rule.window_tokens);
        return Err(source.config.invalid("audio_config.max_source_positions", problem));
    }
    let projector = towers::qwen2_audio_projector(audio.encoder.hidden, llm.hidden);
    let audio = AudioSpec { encoder: EncoderSpec { projector, ..audio.encoder }, ..audio };
    Ok(PartialModelSpec { vision: None, audio: Some(audio), llm: Some(llm) })
}

/// Reads the encoder of Whisper, whose decoder is not part of a multimodal LLM, or of Qwen2-Audio alone.
///
/// # Source
/// `WhisperConfig` and `Qwen2AudioEncoderConfig` of transformers 4.57.1.
pub(super) fn whisper(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let is_whisper = source.config.text("model_type")? == Some("whisper");
    let audio = encoder(source, &source.config, if is_whisper { TINY } else { LARGE })?;
    Ok(PartialModelSpec { audio: Some(audio), ..PartialModelSpec::default() })
}

/// Default mel bins, layers, width, heads and width of the MLP.
type Defaults = [u32; 5];

const TINY: Defaults = [80, 4, 384, 6, 1536];
const LARGE: Defaults = [128, 32, 1280, 20, 5120];

fn encoder(source: &CheckpointFields<'_>, fields: &Fields<'_>, defaults: Defaults) -> Result<AudioSpec> {
    let [mels, layers, hidden, heads, ffn] = defaults;
    let hidden = fields.count("d_model", hidden)?;
    let heads = fields.count("encoder_attention_heads", heads)?;
    fields.require_multiple("d_model", hidden, "encoder_attention_heads", heads)?;
    let mels = fields.count("num_mel_bins", mels)?;
    let window_tokens = fields.count("max_source_positions", 1500)?;
    let dimensions = TowerSize {
        layers: fields.count("encoder_layers", layers)?,
        hidden,
        heads,
        ffn: fields.count("encoder_ffn_dim", ffn)?,
    };
    check_extractor(source, mels, window_tokens)?;
    let encoder = towers::whisper(dimensions, mels, window_tokens);
    Ok(AudioSpec { encoder, rule: AudioRule { window_tokens, ..AudioRule::QWEN2_AUDIO } })
}

/// Fails if the feature extractor does not make what the encoder takes.
fn check_extractor(source: &CheckpointFields<'_>, mels: u32, window_tokens: u32) -> Result<()> {
    let Some(extractor) = &source.preprocessor else { return Ok(()) };
    for (key, only) in EXTRACTOR {
        let found = extractor.count(key, only)?;
        if found != only {
            return Err(extractor.invalid(key, format!("must be {only}, found {found}")));
        }
    }
    let bins = extractor.count("feature_size", 80)?;
    if bins != mels {
        return Err(
            extractor.invalid("feature_size", format!("= {bins}, but the encoder takes {mels} mel bins"))
        );
    }
    let seconds = extractor.count("chunk_length", 30)?;
    if seconds.checked_mul(MEL_FRAMES_PER_SECOND) != window_tokens.checked_mul(STRIDE) {
        let problem = format!("= {seconds} s do not fill the encoder's {window_tokens} positions");
        return Err(extractor.invalid("chunk_length", problem));
    }
    Ok(())
}
