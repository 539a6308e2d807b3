//! Builds a global batch with synthetic samples and cuts it into microbatches.

use std::sync::Arc;

use dflop_device::Device;
use dflop_executor::pipeline::{MediumPlan, MicrobatchPlan};
use dflop_models::encoder::{EncoderConfig, EncoderInput, EncoderInputKind};
use dflop_models::{LlmConfig, MicrobatchContext, ModelConfig, ModuleKind, TextBatch};
use serde_json::{Value, json};

/// Number of layers in every LLM.
pub const LLM_LAYERS: usize = 4;
const MELS: usize = 8;
const FRAMES: usize = 40;
const PLACEHOLDER: i64 = 47;

/// Image with `[rows, columns]` patches, or audio clip with `frames` frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Item {
    /// An image.
    Image {
        /// Patch rows and columns, both even.
        grid: [u32; 2],
        /// Pixel seed.
        seed: u32,
    },
    /// An audio clip.
    Clip {
        /// Number of frames, at most 40.
        frames: u32,
        /// Spectrogram seed.
        seed: u32,
    },
}

/// Texts around media: `text[0] media[0] text[1] …`.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Token ids in each text.
    pub text: Vec<Vec<i64>>,
    /// Media between texts.
    pub media: Vec<Item>,
}

/// Sample indices per microbatch: `[rounds * D]`.
pub type Cut = Vec<Vec<usize>>;

fn draws(seed: u32) -> impl Iterator<Item = u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state >> 8
    })
}

fn floats(seed: u32, count: usize) -> Vec<f32> {
    draws(seed).take(count).map(|draw| draw as f32 / (1 << 23) as f32 - 1.0).collect()
}

impl Item {
    /// Returns the module that encodes the item.
    pub fn module(self) -> ModuleKind {
        match self {
            Self::Image { .. } => ModuleKind::Vision,
            Self::Clip { .. } => ModuleKind::Audio,
        }
    }

    /// Returns the number of LLM positions for the item.
    pub fn tokens(self) -> usize {
        match self {
            Self::Image { grid: [rows, columns], .. } => (rows * columns / 4) as usize,
            Self::Clip { frames, .. } => frames.div_ceil(2) as usize / 2,
        }
    }
}

/// Builds an encoder context from the media that belong to the module.
pub fn media_context<D: Device>(
    model: &ModelConfig,
    module: ModuleKind,
    media: &[Item],
    device: &D,
) -> MicrobatchContext<D> {
    let encoder = if module == ModuleKind::Vision { &model.vision } else { &model.audio };
    let encoder = encoder.as_ref().unwrap();
    let has_whole_clips = matches!(encoder.input_kind(), EncoderInputKind::Clips { .. });
    let (mut values, mut grids, mut frames_of) = (Vec::new(), Vec::new(), Vec::new());
    for &item in media {
        assert_eq!(item.module(), module);
        match item {
            Item::Image { grid: [rows, columns], seed } => {
                values.extend(floats(seed, (rows * columns) as usize * 24));
                grids.push([1, rows, columns]);
            }
            Item::Clip { frames, seed } => {
                let stored = if has_whole_clips { frames as usize } else { FRAMES };
                values.extend(floats(seed, MELS * stored));
                frames_of.push(frames);
            }
        }
    }
    let medium = match module {
        ModuleKind::Vision => EncoderInput::Patches { values: &values, grids: &grids },
        _ if has_whole_clips => EncoderInput::Clips { features: &values, frames: &frames_of },
        _ => EncoderInput::Windows { features: &values, frames: &frames_of },
    };
    encoder.context(device, &medium).unwrap()
}

/// Packs samples into a microbatch.
pub fn text_context<D: Device>(
    model: &ModelConfig,
    samples: &[&Sample],
    scale: f64,
    device: &D,
) -> MicrobatchContext<D> {
    let (mut ids, mut labels, mut positions) = (Vec::new(), Vec::new(), Vec::new());
    let (mut starts, mut places) = (vec![0], Vec::new());
    for sample in samples {
        for (index, text) in sample.text.iter().enumerate() {
            ids.extend(text);
            labels.extend(text);
            for _ in 0..sample.media.get(index).map_or(0, |item| item.tokens()) {
                places.push(ids.len() as u32);
                ids.push(PLACEHOLDER);
                labels.push(-100);
            }
        }
        let length = ids.len() as i32 - starts.last().unwrap();
        positions.extend(0..i64::from(length));
        starts.push(ids.len() as i32);
    }
    let positions = positions.repeat(model.llm.rope.axes());
    let batch = TextBatch {
        input_ids: &ids,
        labels: &labels,
        positions: &positions,
        cu_seqlens: &starts,
        media_places: &places,
        loss_scale: scale,
    };
    model.llm.context(device, &batch).unwrap()
}

impl Sample {
    /// Returns the number of LLM positions for texts and media.
    pub fn tokens(&self) -> usize {
        self.text.iter().map(Vec::len).sum::<usize>()
            + self.media.iter().map(|item| item.tokens()).sum::<usize>()
    }

    /// Returns the number of tokens in all texts but the first token in the sample, which nothing predicts.
    pub fn target_tokens(&self) -> u64 {
        self.text.iter().map(Vec::len).sum::<usize>() as u64 - 1
    }
}

/// Creates samples with uneven text lengths and without media.
pub fn texts(count: usize) -> Vec<Sample> {
    let text = |seed: usize| {
        let length = 2 + (7 * seed + 3) % 11;
        vec![draws(seed as u32 + 1).take(length).map(|draw| i64::from(draw % 40)).collect()]
    };
    (0..count).map(|seed| Sample { text: text(seed), media: Vec::new() }).collect()
}

/// Creates a sample with media between three-token texts.
pub fn sample(seed: u32, media: Vec<Item>) -> Sample {
    let mut ids = draws(seed + 100).map(|draw| i64::from(draw % 40));
    let text = (0..=media.len()).map(|_| ids.by_ref().take(3).collect()).collect();
    Sample { text, media }
}

/// Plans the microbatches in a cut.
pub fn plan_microbatches(samples: &[Sample], cut: &Cut) -> Vec<MicrobatchPlan> {
    let microbatch = |of: &Vec<usize>| {
        let media = of.iter().flat_map(|&sample| &samples[sample].media).map(|item| {
            let cost_ns = 1000 + 100 * (item.tokens() as u64).pow(2);
            MediumPlan { module: item.module(), tokens: item.tokens(), cost_ns }
        });
        let tokens = of.iter().map(|&sample| samples[sample].tokens()).sum();
        MicrobatchPlan { tokens, media: media.collect() }
    };
    cut.iter().map(microbatch).collect()
}

/// Assigns samples round robin to `microbatches` microbatches.
pub fn round_robin(samples: usize, microbatches: usize) -> Cut {
    (0..microbatches).map(|microbatch| (microbatch..samples).step_by(microbatches).collect()).collect()
}

fn qwen2(layers: usize, is_tied: bool) -> Value {
    json!({"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48, "tie_word_embeddings": is_tied})
}

/// Returns a language model without encoders.
pub fn language_model(is_tied: bool) -> Arc<ModelConfig> {
    Arc::new(ModelConfig::from_config(&qwen2(LLM_LAYERS, is_tied)).unwrap())
}

/// Returns a language model with experts in all layers.
pub fn with_experts() -> Arc<ModelConfig> {
    let config = json!({"model_type": "qwen3_moe", "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": LLM_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "vocab_size": 48, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
        "norm_topk_prob": true, "tie_word_embeddings": false});
    Arc::new(ModelConfig::from_config(&config).unwrap())
}

/// Returns a language model with small Qwen2-VL and Qwen2-Audio encoders.
pub fn with_encoders(has_vision: bool, has_audio: bool) -> Arc<ModelConfig> {
    let text = qwen2(LLM_LAYERS, true);
    let vision = json!({"model_type": "qwen2_vl", "text_config": text, "vision_config": {"depth": 2, "embed_dim": 16,
        "hidden_act": "quick_gelu", "hidden_size": 16, "in_channels": 3, "mlp_ratio": 2, "num_heads": 2,
        "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}});
    let audio = json!({"model_type": "qwen2_audio", "text_config": text, "audio_config": {"model_type":
        "qwen2_audio_encoder", "d_model": 12, "encoder_attention_heads": 3, "encoder_ffn_dim": 20,
        "encoder_layers": 2, "max_source_positions": FRAMES / 2, "num_mel_bins": MELS}});
    Arc::new(ModelConfig {
        vision: has_vision.then(|| EncoderConfig::vision(&vision).unwrap().unwrap()),
        audio: has_audio.then(|| EncoderConfig::audio(&audio).unwrap().unwrap()),
        llm: LlmConfig::from_config(&text).unwrap(),
        frozen: Arc::default(),
    })
}

/// Returns a language model with a small Qwen3-VL encoder, whose first layer has a separate projector.
pub fn with_deepstack() -> Arc<ModelConfig> {
    let text = qwen2(LLM_LAYERS, true);
    let of_vision = json!({"model_type": "qwen2", "hidden_size": 16, "num_attention_heads": 4,
        "num_key_value_heads": 4});
    let vision = json!({"model_type": "qwen3_vl", "text_config": of_vision, "vision_config": {"depth": 2,
        "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "patch_size": 2, "out_hidden_size": 16,
        "num_position_embeddings": 9, "deepstack_visual_indexes": [0]}});
    Arc::new(ModelConfig {
        vision: EncoderConfig::vision(&vision).unwrap(),
        audio: None,
        llm: LlmConfig { deepstack: 1, ..LlmConfig::from_config(&text).unwrap() },
        frozen: Arc::default(),
    })
}

/// Returns the thinker in a small Qwen2.5-Omni: images in windows, clips in chunks with 10 frames.
pub fn omni() -> Arc<ModelConfig> {
    let mut text = qwen2(LLM_LAYERS, true);
    text["model_type"] = "qwen2_5_omni_text".into();
    text["rope_parameters"] =
        json!({"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]});
    let vision = json!({"depth": 2, "hidden_size": 16, "out_hidden_size": 16, "num_heads": 2, "intermediate_size": 20,
        "patch_size": 2, "window_size": 8, "fullatt_block_indexes": [1]});
    let audio = json!({"d_model": 12, "encoder_attention_heads": 3, "encoder_ffn_dim": 20, "encoder_layers": 2,
        "n_window": 5, "num_mel_bins": MELS, "output_dim": 16});
    let config = json!({"model_type": "qwen2_5_omni_thinker", "tie_word_embeddings": true, "text_config": text,
        "vision_config": vision, "audio_config": audio});
    Arc::new(ModelConfig::from_config(&config).unwrap())
}
