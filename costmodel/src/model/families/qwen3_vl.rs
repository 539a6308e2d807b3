//! Qwen3-VL, dense and with experts: native resolution, learned positions, and projectors for earlier layers
//! whose outputs the LLM adds to its first layers.

use std::num::NonZeroU16;

use super::fixed_resolution::{TowerSize, bare_tower, patch_inputs, product};
use super::language_models::{self, QWEN2_5_7B};
use super::qwen_vl::{Patches, check_patches, pixel_range, require_width};
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{
    AttentionBias, EncoderDetails, EncoderSpec, ExpertsDetails, ExpertsSpec, FamilyId, LayerSet, LlmDetails,
    LlmSpec, Mlp, ModelFamily, Preset, Projector, VisionSpec,
};
use crate::tokens::native::{NativeResolution, PixelRange};
use crate::tokens::{TimedVideo, VisionRule};

const QWEN3_VL: FamilyId = FamilyId::new("qwen3_vl");
const QWEN3_VL_MOE: FamilyId = FamilyId::new("qwen3_vl_moe");

/// Multiply-adds per hidden unit and patch: two frames with 16 x 16 pixels in three colors.
const PATCH_INPUTS: u32 = 2 * 3 * 16 * 16;
/// Number of rows in the position table.
const POSITIONS: u32 = 2304;
/// Layers with a separate projector, if the configuration has none.
const DEEPSTACK: [u32; 3] = [8, 16, 24];

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&Qwen3Vl, &Qwen3VlMoe];

/// Qwen3-VL.
#[derive(Debug)]
struct Qwen3Vl;

impl ModelFamily for Qwen3Vl {
    fn id(&self) -> FamilyId {
        QWEN3_VL
    }

    fn model_types(&self) -> &[&str] {
        &["qwen3_vl"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        read(files, QWEN3_VL, "qwen3_vl_text")
    }

    fn presets(&self) -> &[Preset] {
        const fn preset(name: &'static str, tower: TowerSize, llm: LlmSpec) -> Preset {
            Preset { name, vision: Some(vision_with_tower(QWEN3_VL, tower, llm.hidden)), audio: None, llm }
        }
        const PRESETS: [Preset; 4] = [
            preset("qwen3-vl-2b", SMALL_TOWER, qwen3(28, 2048, [16, 8], 6144, true)),
            preset("qwen3-vl-4b", SMALL_TOWER, qwen3(36, 2560, [32, 8], 9728, true)),
            preset("qwen3-vl-8b", TOWER, qwen3(36, 4096, [32, 8], 12_288, false)),
            preset("qwen3-vl-32b", TOWER, qwen3(64, 5120, [64, 8], 25_600, false)),
        ];
        &PRESETS
    }
}

/// Qwen3-VL with a mixture of experts.
#[derive(Debug)]
struct Qwen3VlMoe;

impl ModelFamily for Qwen3VlMoe {
    fn id(&self) -> FamilyId {
        QWEN3_VL_MOE
    }

    fn model_types(&self) -> &[&str] {
        &["qwen3_vl_moe"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        read(files, QWEN3_VL_MOE, "qwen3_vl_moe_text")
    }

    fn presets(&self) -> &[Preset] {
        const fn preset(name: &'static str, llm: LlmSpec) -> Preset {
            Preset { name, vision: Some(vision(QWEN3_VL_MOE, llm.hidden)), audio: None, llm }
        }
        const PRESETS: [Preset; 2] = [
            preset("qwen3-vl-30b-a3b", QWEN3_30B_A3B),
            preset("qwen3-vl-235b-a22b", experts(qwen3(94, 4096, [64, 4], 12_288, false), 1536)),
        ];
        &PRESETS
    }
}

/// Qwen3-VL-30B-A3B LLM.
pub(super) const QWEN3_30B_A3B: LlmSpec = experts(qwen3(48, 2048, [32, 4], 6144, false), 768);

const TOWER: TowerSize = TowerSize { layers: 27, hidden: 1152, heads: 16, ffn: 4304 };
const SMALL_TOWER: TowerSize = TowerSize { layers: 24, hidden: 1024, heads: 16, ffn: 4096 };

/// Builds the LLM, with head width 128; `heads` are query heads, then key and value heads.
const fn qwen3(layers: u32, hidden: u32, heads: [u32; 2], ffn: u32, has_tied_embeddings: bool) -> LlmSpec {
    let attention_bias = AttentionBias::None;
    let details = LlmDetails { attention_bias, has_qk_norm: true, has_tied_embeddings, ..QWEN2_5_7B.details };
    let [heads, kv_heads] = heads;
    LlmSpec { layers, hidden, heads, kv_heads, ffn, vocab: 151_936, details, ..QWEN2_5_7B }
}

/// Replaces every MLP by 128 experts, 8 of which process a token.
const fn experts(llm: LlmSpec, ffn: u32) -> LlmSpec {
    let details = ExpertsDetails { has_router_bias: false, has_biases: false, has_shared_gate: false };
    let layers = LayerSet::range(0, llm.layers);
    let experts = ExpertsSpec { layers, experts: 128, experts_per_token: 8, ffn, shared_ffn: 0, details };
    LlmSpec { experts: Some(experts), ..llm }
}

/// Builds the larger models' encoder.
pub(super) const fn vision(family: FamilyId, llm_hidden: u32) -> VisionSpec {
    vision_with_tower(family, TOWER, llm_hidden)
}

const fn vision_with_tower(family: FamilyId, tower: TowerSize, llm_hidden: u32) -> VisionSpec {
    let encoder = EncoderSpec {
        projector: projector(tower.hidden, 4, DEEPSTACK.len() as u32, llm_hidden),
        ..encoder(tower, PATCH_INPUTS, POSITIONS)
    };
    VisionSpec { family, encoder, rule: VisionRule::Native(NativeResolution::QWEN3_VL) }
}

/// Builds the tower: rotary and learned positions, a stem bias. `patch_inputs` covers the frames in a patch.
const fn encoder(size: TowerSize, patch_inputs: u32, positions: u32) -> EncoderSpec {
    let vectors = product(positions, size.hidden).saturating_add(size.hidden as u64);
    let details = EncoderDetails {
        class_tokens: 0,
        has_pooling_head: false,
        unused_layers: 0,
        stem_medium_inputs: patch_inputs,
        layer_vectors: 9,
        layer_ffn_vectors: 1,
        outside_parameters: product(patch_inputs, size.hidden).saturating_add(vectors),
    };
    bare_tower(size, Mlp::Plain, patch_inputs, details)
}

/// Builds the projectors: the last projector normalizes encoder tokens before it merges them, earlier layers'
/// projectors after that.
const fn projector(hidden: u32, merged_tokens: u32, deepstack: u32, llm_hidden: u32) -> Projector {
    let width = hidden.saturating_mul(merged_tokens);
    let biases = (width as u64).saturating_add(llm_hidden as u64);
    let last = Projector::new(merged_tokens, width, Some(width)).vectors(product(2, hidden) + biases);
    last.deepstacked(deepstack, product(2, width) + biases)
}

/// # Source
/// `Qwen3VLConfig`, `Qwen3VLVisionConfig`, `Qwen3VLMoeConfig` and `Qwen3VLMoeVisionConfig` in transformers
/// 5.24.0.
pub(super) fn read(
    files: &CheckpointFields<'_>,
    family: FamilyId,
    text_type: &str,
) -> Result<PartialModelSpec> {
    let text = files.config.child_or_empty("text_config")?;
    let mut llm = language_models::text_config(&text, text_type)?;
    // As in transformers, the outer field counts.
    llm.details.has_tied_embeddings = files.config.flag("tie_word_embeddings", false)?;
    let fields = files.config.child_or_empty("vision_config")?;
    let hidden = fields.count("hidden_size", 1152)?;
    let heads = fields.count("num_heads", 16)?;
    fields.require_multiple("hidden_size", hidden, "num_heads", heads)?;
    let layers = fields.count("depth", 27)?;
    let size = TowerSize { layers, hidden, heads, ffn: fields.count("intermediate_size", 4304)? };
    let (pixels, frames) =
        (fields.square_side("patch_size", 16)?, fields.square_side("temporal_patch_size", 2)?);
    let inputs = patch_inputs(&fields, fields.count("in_channels", 3)?, pixels, frames)?;
    let patches = Patches { pixels, merge: fields.count("spatial_merge_size", 2)?, frames, inputs };
    require_width(&fields, "out_hidden_size", fields.count("out_hidden_size", 3584)?, &llm)?;
    let deepstack = deepstack_layers(&fields, layers, llm.layers)?.len() as u32;
    let merged = patches.merge.saturating_mul(patches.merge);
    let encoder = EncoderSpec {
        projector: projector(hidden, merged, deepstack, llm.hidden),
        ..encoder(size, inputs, fields.count("num_position_embeddings", POSITIONS)?)
    };
    let rule = VisionRule::Native(rule(files, &patches)?);
    let vision = Some(VisionSpec { family, encoder, rule });
    Ok(PartialModelSpec { family, vision, audio: None, llm: Some(llm) })
}

/// Reads the layers with a separate projector, in ascending order.
///
/// # Errors
/// [`Error::Configuration`](crate::Error::Configuration) if a layer is repeated, out of order or beyond the
/// last, or the LLM has fewer layers than there are projectors.
pub fn deepstack_layers(fields: &ConfigFields<'_>, layers: u32, llm_layers: u32) -> Result<Vec<u32>> {
    let key = "deepstack_visual_indexes";
    let indices = fields.whole_numbers(key)?.unwrap_or_else(|| DEEPSTACK.to_vec());
    if indices.windows(2).any(|pair| pair[0] >= pair[1]) {
        return Err(fields.invalid(key, format!("= {indices:?} must ascend")));
    }
    if let Some(beyond) = indices.iter().find(|index| **index >= layers) {
        return Err(fields.invalid(key, format!("has layer {beyond}, but the encoder has {layers} layers")));
    }
    if indices.len() > llm_layers as usize {
        let problem =
            format!("has {} layers, more than the {llm_layers} of the language model", indices.len());
        return Err(fields.invalid(key, problem));
    }
    Ok(indices)
}

/// Returns the token rule; without files, the ranges are the released checkpoints' ranges.
///
/// # Source
/// `Qwen2VLImageProcessor` and `Qwen3VLVideoProcessor` in transformers 5.24.0.
fn rule(files: &CheckpointFields<'_>, patches: &Patches) -> Result<NativeResolution> {
    let released = NativeResolution::QWEN3_VL;
    let mut rule = released;
    let side = |key, value: u32| {
        let side = u16::try_from(value).ok().and_then(NonZeroU16::new);
        side.ok_or_else(|| files.config.invalid(key, format!("= {value} is out of range")))
    };
    rule.patch_pixels = side("vision_config.patch_size", patches.pixels)?;
    rule.merge = side("vision_config.spatial_merge_size", patches.merge)?;
    rule.frames_per_patch = side("vision_config.temporal_patch_size", patches.frames)?;
    if let Some(image) = &files.preprocessor {
        check_patches(image, patches, 14)?;
        rule.image = pixel_range(image, PixelRange { min: 56 * 56, max: 28 * 28 * 1280 })?;
    }
    if let Some(video) = &files.video_preprocessor {
        check_patches(video, patches, 16)?;
        let size = video.child_or_empty("size")?;
        let pixels = PixelRange {
            min: size.count("shortest_edge", 128 * 32 * 32)?,
            max: size.count("longest_edge", 768 * 32 * 32)?,
        };
        let is_capped = video.flag("cap_pixels_per_frame", false)?;
        let frame_tokens_max = video.count("max_video_tokens", 768)?;
        let frame_tokens_max = Some(frame_tokens_max).filter(|_| is_capped);
        rule.timed_video = Some(TimedVideo { pixels, frame_tokens_max });
        rule.frames_max = files.frames_max(video.count("max_frames", released.frames_max)?)?;
    }
    Ok(rule)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::model::ModelSpec;
    use crate::model::config::Documents;

    fn config() -> Value {
        json!({
            "model_type": "qwen3_vl",
            "text_config": {
                "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128
            },
            "vision_config": {"out_hidden_size": 4096}
        })
    }

    fn model(config: Value) -> Result<ModelSpec> {
        ModelSpec::compose(
            "qwen3-vl-8b",
            &[PartialModelSpec::from_hugging_face(&Documents { config, ..Documents::default() })?],
        )
    }

    #[test]
    fn a_configuration_with_the_published_sizes_is_the_preset() {
        assert_eq!(model(config()), ModelSpec::preset("qwen3-vl-8b"));
    }

    #[test]
    fn wrong_fields_are_refused_by_name() {
        for (field, value, message) in [
            (
                "deepstack_visual_indexes",
                json!([8, 8]),
                "`vision_config.deepstack_visual_indexes` = [8, 8] must ascend",
            ),
            (
                "deepstack_visual_indexes",
                json!([8, 27]),
                "`vision_config.deepstack_visual_indexes` has layer 27, but the encoder has 27 layers",
            ),
            (
                "out_hidden_size",
                json!(3584),
                "`vision_config.out_hidden_size` = 3584, but the language model is 4096 wide",
            ),
            ("patch_size", json!([16, 14]), "`vision_config.patch_size` must be a square, found 16 x 14"),
            (
                "num_heads",
                json!(7),
                "`vision_config.hidden_size` = 1152 must be a multiple of `vision_config.num_heads` = 7",
            ),
        ] {
            let mut config = config();
            config["vision_config"][field] = value;
            assert_eq!(model(config).unwrap_err().to_string(), format!("`config.json`: {message}"));
        }
        let mut few = config();
        few["text_config"]["num_hidden_layers"] = json!(2);
        let error = model(few).unwrap_err().to_string();
        assert!(error.ends_with("has 3 layers, more than the 2 of the language model"), "{error}");
    }

    #[test]
    fn the_files_of_the_processors_set_the_ranges() {
        let files = Documents {
            config: config(),
            preprocessor: Some(
                json!({"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 131_072}}),
            ),
            video_preprocessor: Some(json!({
                "size": {"shortest_edge": 4096, "longest_edge": 1_048_576},
                "max_frames": 64, "cap_pixels_per_frame": true, "max_video_tokens": 100
            })),
            ..Documents::default()
        };
        let vision = PartialModelSpec::from_hugging_face(&files).unwrap().vision.unwrap();
        let timed =
            TimedVideo { pixels: PixelRange { min: 4096, max: 1_048_576 }, frame_tokens_max: Some(100) };
        let image = PixelRange { min: 65_536, max: 131_072 };
        let expected = NativeResolution {
            image,
            frames_max: 64,
            timed_video: Some(timed),
            ..NativeResolution::QWEN3_VL
        };
        assert_eq!(vision.rule, VisionRule::Native(expected));
    }
}
