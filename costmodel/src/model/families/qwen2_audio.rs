//! Qwen2-Audio, and the separate Whisper encoder, which gets Qwen2-Audio's projector and placeholders.

use super::fixed_resolution::{TowerSize, bare_tower, product};
use super::language_models::{self, QWEN_7B};
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{
    AudioSpec, EncoderDetails, EncoderSpec, FamilyId, LlmSpec, Mlp, ModelFamily, Preset, Projector,
};
use crate::tokens::audio::{AudioRule, AudioWindows, MEL_FRAMES_PER_SECOND};

pub(super) const FAMILY: FamilyId = FamilyId::new("qwen2_audio");

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&Qwen2Audio];

/// Qwen2-Audio.
#[derive(Debug)]
struct Qwen2Audio;

impl ModelFamily for Qwen2Audio {
    fn id(&self) -> FamilyId {
        FAMILY
    }

    fn model_types(&self) -> &[&str] {
        &["qwen2_audio", "qwen2_audio_encoder", "whisper"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        if files.config.text("model_type")? == Some("qwen2_audio") {
            return qwen2_audio(files);
        }
        whisper_alone(files)
    }

    fn presets(&self) -> &[Preset] {
        &PRESETS
    }
}

const PRESETS: [Preset; 1] =
    [Preset { name: "qwen2-audio-7b", vision: None, audio: Some(whisper_large(QWEN_7B)), llm: QWEN_7B }];

/// Builds Whisper-large-v3 as in Qwen2-Audio.
pub(super) const fn whisper_large(llm: LlmSpec) -> AudioSpec {
    let dimensions = TowerSize { layers: 32, hidden: 1280, heads: 20, ffn: 5120 };
    let projector = projector(1280, llm.hidden);
    let tower = whisper(dimensions, 128, 1500);
    AudioSpec { family: FAMILY, encoder: EncoderSpec { projector, ..tower }, rule: AudioRule::QWEN2_AUDIO }
}

/// Builds the Whisper encoder: two convolutions, fixed positions, keys without bias.
///
/// An encoder token takes two outputs from the first convolution (all mel bins, width 3) and one from the
/// second (all channels, width 3, stride 2).
pub(super) const fn whisper(size: TowerSize, mels: u32, positions: u32) -> EncoderSpec {
    let hidden = size.hidden;
    let details = EncoderDetails {
        class_tokens: 0,
        has_pooling_head: false,
        unused_layers: 0,
        stem_medium_inputs: mels.saturating_mul(6),
        layer_vectors: 8,
        layer_ffn_vectors: 1,
        // 2 stem biases, 2 norm vectors after the layers.
        outside_parameters: product(mels.saturating_mul(3), hidden)
            .saturating_add(product(hidden.saturating_mul(3), hidden))
            .saturating_add(product(positions, hidden))
            .saturating_add(product(4, hidden)),
    };
    let stem_inputs = details.stem_medium_inputs.saturating_add(hidden.saturating_mul(3));
    bare_tower(size, Mlp::Plain, stem_inputs, details)
}

/// Builds the Qwen2-Audio projector: token pairs are averaged, then a single matrix with a bias.
pub(crate) const fn projector(hidden: u32, llm_hidden: u32) -> Projector {
    Projector::new(2, hidden, None).vectors(llm_hidden as u64)
}

/// Feature extractor settings that the token rule assumes.
const EXTRACTOR: [(&str, u32); 2] = [("sampling_rate", 16_000), ("hop_length", 160)];
/// Mel frames per encoder token.
const STRIDE: u32 = 2;

/// # Source
/// `Qwen2AudioConfig` and `Qwen2AudioEncoderConfig` in transformers 4.57.1.
fn qwen2_audio(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let llm = language_models::text_config(&source.config.child_or_empty("text_config")?, "qwen2")?;
    let (encoder, rule) = encoder(source, &source.config.child_or_empty("audio_config")?, LARGE)?;
    if rule.window_tokens % 2 != 0 {
        let problem = format!("= {} must be even, tokens are pooled by 2", rule.window_tokens);
        return Err(source.config.invalid("audio_config.max_source_positions", problem));
    }
    let projector = projector(encoder.hidden, llm.hidden);
    let audio = audio_spec(EncoderSpec { projector, ..encoder }, rule);
    Ok(PartialModelSpec { family: FAMILY, vision: None, audio: Some(audio), llm: Some(llm) })
}

/// Reads the Whisper encoder, whose decoder is not part of a multimodal LLM, or the separate Qwen2-Audio
/// encoder.
///
/// # Source
/// `WhisperConfig` and `Qwen2AudioEncoderConfig` in transformers 4.57.1.
fn whisper_alone(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let is_whisper = source.config.text("model_type")? == Some("whisper");
    let (encoder, rule) = encoder(source, &source.config, if is_whisper { TINY } else { LARGE })?;
    let audio = Some(audio_spec(encoder, rule));
    Ok(PartialModelSpec { family: FAMILY, audio, ..PartialModelSpec::default() })
}

const fn audio_spec(encoder: EncoderSpec, rule: AudioWindows) -> AudioSpec {
    AudioSpec { family: FAMILY, encoder, rule: AudioRule::Windows(rule) }
}

/// Default mel bins, layers, width, heads and MLP width.
type Defaults = [u32; 5];

const TINY: Defaults = [80, 4, 384, 6, 1536];
const LARGE: Defaults = [128, 32, 1280, 20, 5120];

fn encoder(
    source: &CheckpointFields<'_>,
    fields: &ConfigFields<'_>,
    defaults: Defaults,
) -> Result<(EncoderSpec, AudioWindows)> {
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
    let rule = AudioWindows { window_tokens, ..AudioWindows::QWEN2_AUDIO };
    Ok((whisper(dimensions, mels, window_tokens), rule))
}

/// Fails if the feature extractor's output does not fit the encoder.
fn check_extractor(source: &CheckpointFields<'_>, mels: u32, window_tokens: u32) -> Result<()> {
    let Some(extractor) = &source.preprocessor else { return Ok(()) };
    check_spectrogram(extractor, mels)?;
    let seconds = extractor.count("chunk_length", 30)?;
    if seconds.checked_mul(MEL_FRAMES_PER_SECOND) != window_tokens.checked_mul(STRIDE) {
        let problem = format!("= {seconds} s do not fill the encoder's {window_tokens} positions");
        return Err(extractor.invalid("chunk_length", problem));
    }
    Ok(())
}

/// Fails if a feature extractor has a different rate or hop than the token rules, or a number of mel bins
/// other than `mels`.
pub(super) fn check_spectrogram(extractor: &ConfigFields<'_>, mels: u32) -> Result<()> {
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
    Ok(())
}
