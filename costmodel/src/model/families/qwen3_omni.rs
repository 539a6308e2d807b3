//! Qwen3-Omni: the thinker, with Qwen3-VL's image encoder and experts and an audio encoder over chunks.
//!
//! A whole checkpoint has the thinker under `thinker_config`. The talker and vocoder create speech from the
//! thinker's output; they are not part of the model here.

use super::fixed_resolution::{TowerSize, bare_tower, product};
use super::qwen2_5_omni::refuse_sound_of_videos;
use super::qwen2_audio::check_spectrogram;
use super::qwen3_vl::{QWEN3_30B_A3B, read as read_qwen3_vl, vision as vision_qwen3_vl};
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{
    AudioSpec, EncoderDetails, EncoderSpec, FamilyId, LlmSpec, Mlp, ModelFamily, Preset, Projector,
    VisionSpec,
};
use crate::tokens::VisionRule;
use crate::tokens::audio::{AudioChunks, AudioRule};
use crate::tokens::native::{NativeResolution, PixelRange};

/// Positions per second in the released checkpoints, one per audio token.
const POSITIONS_PER_SECOND: u32 = 13;
/// Tokens per full chunk, which the processor's count is based on.
const CHUNK_TOKENS: u64 = 13;
/// Number of mel bins in all published checkpoints, which does not follow from the stem's work.
const MELS: u32 = 128;
/// Mel bins after the convolutions.
const BINS: u64 = halved(halved(halved(MELS as u64)));
/// Number of weights in a 3 x 3 filter.
const FILTER: u64 = 9;
const FAMILY: FamilyId = FamilyId::new("qwen3_omni_moe");

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&Qwen3Omni];

/// Qwen3-Omni.
#[derive(Debug)]
struct Qwen3Omni;

impl ModelFamily for Qwen3Omni {
    fn id(&self) -> FamilyId {
        FAMILY
    }

    fn model_types(&self) -> &[&str] {
        &["qwen3_omni_moe", "qwen3_omni_moe_thinker"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        let is_thinker = files.config.text("model_type")? == Some("qwen3_omni_moe_thinker");
        let thinker =
            if is_thinker { files.config.clone() } else { files.config.child_or_empty("thinker_config")? };
        let found = thinker.count("position_id_per_seconds", 25)?;
        if found != POSITIONS_PER_SECOND {
            let problem = format!("must be {POSITIONS_PER_SECOND}, found {found}");
            return Err(thinker.invalid("position_id_per_seconds", problem));
        }
        // Image encoder fields are at the same place in the thinker's configuration as in Qwen3-VL's.
        let source = CheckpointFields { config: thinker, ..files.clone() };
        refuse_sound_of_videos(&source)?;
        let mut spec = read_qwen3_vl(&source, FAMILY, "qwen3_omni_moe_text")?;
        if let Some(VisionSpec { rule: VisionRule::Native(rule), .. }) = &mut spec.vision {
            *rule = frames_alone(*rule);
        }
        let hidden = spec.llm.map_or(0, |llm| llm.hidden);
        Ok(PartialModelSpec { audio: Some(audio(&source, hidden)?), ..spec })
    }

    fn presets(&self) -> &[Preset] {
        const PRESETS: [Preset; 1] = [Preset {
            name: "qwen3-omni-30b-a3b",
            vision: Some(VISION),
            audio: Some(AUDIO),
            llm: LlmSpec { ffn: 768, vocab: 152_064, ..QWEN3_30B_A3B },
        }];
        &PRESETS
    }
}

const VISION: VisionSpec = {
    let vision = vision_qwen3_vl(FAMILY, QWEN3_30B_A3B.hidden);
    let images = PixelRange { min: 56 * 56, max: 12_845_056 };
    let rule = frames_alone(NativeResolution { image: images, ..NativeResolution::QWEN3_VL });
    VisionSpec { rule: VisionRule::Native(rule), ..vision }
};

const AUDIO: AudioSpec = {
    let size = TowerSize { layers: 32, hidden: 1280, heads: 20, ffn: 5120 };
    let stem = Stem { channels: 480, frames: 100 };
    let encoder = encoder(size, stem, QWEN3_30B_A3B.hidden);
    AudioSpec { family: FAMILY, encoder, rule: AudioRule::Chunks(AudioChunks::QWEN3_OMNI) }
};

/// Processes video frames individually, without times. `Qwen3OmniMoeProcessor` in transformers 5.24.0 sets
/// the frame sizes itself, whatever the files have.
const fn frames_alone(mut rule: NativeResolution) -> NativeResolution {
    rule.timed_video = None;
    rule.frame = PixelRange { min: 128 * 32 * 32, max: 768 * 32 * 32 };
    rule
}

/// # Source
/// `Qwen3OmniMoeAudioEncoderConfig` in transformers 5.24.0.
fn audio(source: &CheckpointFields<'_>, llm_hidden: u32) -> Result<AudioSpec> {
    let fields = source.config.child_or_empty("audio_config")?;
    let hidden = fields.count("d_model", 1280)?;
    let heads = fields.count("encoder_attention_heads", 20)?;
    fields.require_multiple("d_model", hidden, "encoder_attention_heads", heads)?;
    if !hidden.is_multiple_of(2) || hidden < 4 {
        let problem = format!("= {hidden} must be even and at least 4, for sine and cosine of positions");
        return Err(fields.invalid("d_model", problem));
    }
    let outputs = fields.count("output_dim", 3584)?;
    if outputs != llm_hidden {
        let problem = format!("= {outputs}, but the language model is {llm_hidden} wide");
        return Err(fields.invalid("output_dim", problem));
    }
    let layers = fields.count("encoder_layers", 32)?;
    let size = TowerSize { layers, hidden, heads, ffn: fields.count("encoder_ffn_dim", 5120)? };
    let mels = fields.count("num_mel_bins", MELS)?;
    if mels != MELS {
        return Err(fields.invalid("num_mel_bins", format!("must be {MELS}, found {mels}")));
    }
    let channels = fields.count("downsample_hidden_size", 480)?;
    if let Some(extractor) = source.processor.child("feature_extractor")?.or(source.preprocessor.clone()) {
        check_spectrogram(&extractor, mels)?;
    }
    let rule = chunks(&fields)?;
    let encoder = encoder(size, Stem { channels, frames: rule.chunk_frames }, llm_hidden);
    Ok(AudioSpec { family: FAMILY, encoder, rule: AudioRule::Chunks(rule) })
}

/// Reads the chunks, which the processor counts as [`CHUNK_TOKENS`] each.
fn chunks(fields: &ConfigFields<'_>) -> Result<AudioChunks> {
    let half = fields.count("n_window", 50)?;
    let rule = AudioChunks { chunk_frames: half.saturating_mul(2), ..AudioChunks::QWEN3_OMNI };
    let tokens = rule.chunk_tokens();
    if tokens != CHUNK_TOKENS {
        let problem =
            format!("= {half} makes chunks of {tokens} tokens, the processor counts {CHUNK_TOKENS}");
        return Err(fields.invalid("n_window", problem));
    }
    let positions = fields.count("max_source_positions", 1500)?;
    if u64::from(positions) < tokens {
        let problem = format!("= {positions}, but a chunk has {tokens} tokens");
        return Err(fields.invalid("max_source_positions", problem));
    }
    let window = fields.count("n_window_infer", 800)?;
    if window < rule.chunk_frames {
        let problem = format!("= {window} frames, but a chunk has {}", rule.chunk_frames);
        return Err(fields.invalid("n_window_infer", problem));
    }
    let spectrogram_frames = u32::MAX / rule.chunk_frames * rule.chunk_frames;
    Ok(AudioChunks { window_chunks: window / rule.chunk_frames, spectrogram_frames, ..rule })
}

/// Convolutions over mel bins and time, three with stride 2, and the following matrix.
#[derive(Clone, Copy)]
struct Stem {
    channels: u32,
    /// Mel frames per full chunk.
    frames: u32,
}

impl Stem {
    /// Returns the convolutions' multiply-adds over a full chunk: the first convolution, and the other two.
    const fn multiply_adds(self) -> [u128; 2] {
        let channels = self.channels as u128;
        let (mut bins, mut frames, mut places) = (MELS as u64, self.frames as u64, [0_u128; 3]);
        let mut at = 0;
        while at < places.len() {
            (bins, frames) = (halved(bins), halved(frames));
            places[at] = bins as u128 * frames as u128;
            at += 1;
        }
        let filters = channels.saturating_mul(FILTER as u128);
        let further = (places[1] + places[2]).saturating_mul(filters).saturating_mul(channels);
        [places[0].saturating_mul(filters), further]
    }

    /// Returns the number of parameters: three convolutions with biases, and the matrix.
    const fn parameters(self, hidden: u32) -> u64 {
        let channels = self.channels as u64;
        let square = channels.saturating_mul(channels).saturating_mul(2 * FILTER);
        let convolutions = square.saturating_add(channels.saturating_mul(FILTER + 3));
        let matrix = channels.saturating_mul(BINS).saturating_mul(hidden as u64);
        convolutions.saturating_add(matrix)
    }
}

/// Returns the number of output places for a convolution with stride 2.
const fn halved(places: u64) -> u64 {
    places.div_ceil(2)
}

/// Builds the encoder: convolutions over a chunk, computed positions, layers, a norm, and a projector of two
/// matrices.
///
/// The convolution work over a full chunk is shared evenly by the chunk's tokens; a clip's last chunk is
/// padded to this number of tokens.
const fn encoder(size: TowerSize, stem: Stem, llm_hidden: u32) -> EncoderSpec {
    let hidden = size.hidden;
    let tokens = halved(halved(halved(stem.frames as u64)));
    let [first, further] = stem.multiply_adds();
    let medium = per_token(first, tokens, hidden);
    let matrix = (stem.channels as u64).saturating_mul(BINS);
    let inputs = per_token(first.saturating_add(further), tokens, hidden).saturating_add(matrix);
    let details = EncoderDetails {
        class_tokens: 0,
        has_pooling_head: false,
        unused_layers: 0,
        stem_medium_inputs: saturate(medium),
        // 4 attention biases, 1 MLP bias, 2 norms.
        layer_vectors: 9,
        layer_ffn_vectors: 1,
        outside_parameters: stem.parameters(hidden).saturating_add(product(2, hidden)),
    };
    let mut spec = bare_tower(size, Mlp::Plain, saturate(inputs), details);
    let biases = hidden as u64 + llm_hidden as u64;
    spec.projector = Projector::new(1, hidden, Some(hidden)).vectors(biases);
    spec
}

/// Returns multiply-adds per token and hidden unit, rounded to the nearest integer.
const fn per_token(multiply_adds: u128, tokens: u64, hidden: u32) -> u64 {
    let units = tokens as u128 * hidden as u128;
    match (multiply_adds + units / 2).checked_div(units) {
        Some(inputs) => inputs as u64,
        None => 0,
    }
}

const fn saturate(count: u64) -> u32 {
    if count > u32::MAX as u64 { u32::MAX } else { count as u32 }
}
