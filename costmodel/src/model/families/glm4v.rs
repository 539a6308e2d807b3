//! GLM-4.1V and GLM-4.5V: images in native resolution, merged by a convolution and a gated MLP.

use std::num::NonZeroU16;

use super::fixed_resolution::{PATCH_INPUTS, TowerSize, bare_tower, patch_inputs, product};
use super::language_models::{self, language_model};
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{
    AttentionBias, EncoderDetails, EncoderSpec, ExpertsDetails, ExpertsSpec, FamilyId, LayerSet, LlmSpec,
    Mlp, ModelFamily, Preset, Projector, VisionSpec,
};
use crate::tokens::VisionRule;
use crate::tokens::native::{NativeResolution, PixelRange};

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&Glm4v::DENSE, &Glm4v::EXPERTS];

/// GLM-4.1V, or GLM-4.5V with experts, under this name.
#[derive(Debug)]
struct Glm4v([&'static str; 1], &'static [Preset]);

impl Glm4v {
    const DENSE: Self = Self(["glm4v"], &[GLM_4_1V]);
    const EXPERTS: Self = Self(["glm4v_moe"], &[GLM_4_5V]);
}

impl ModelFamily for Glm4v {
    fn id(&self) -> FamilyId {
        FamilyId::new(self.0[0])
    }

    fn model_types(&self) -> &[&str] {
        &self.0
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        let text = if self.id() == FamilyId::new("glm4v") { "glm4v_text" } else { "glm4v_moe_text" };
        read(files, self.id(), language_model(&files.config, text)?)
    }

    fn presets(&self) -> &[Preset] {
        self.1
    }
}

/// GLM-4-9B-0414.
const GLM4_9B: LlmSpec = {
    let mut spec = language_models::llama(40, 4096, [32, 2, 128], 13_696, 151_552);
    spec.details.attention_bias = AttentionBias::Qkv;
    spec.details.has_post_norms = true;
    spec
};

/// GLM-4.5-Air.
const GLM4_5_AIR: LlmSpec = {
    let mut spec = language_models::llama(46, 4096, [96, 8, 128], 10_944, 151_552);
    spec.details.attention_bias = AttentionBias::Qkv;
    spec.experts = Some(ExpertsSpec {
        layers: LayerSet::range(1, 46),
        experts: 128,
        experts_per_token: 8,
        ffn: 1408,
        shared_ffn: 1408,
        details: ExpertsDetails::NONE,
    });
    spec
};

const GLM_4_1V: Preset =
    Preset { name: "glm-4.1v-9b", vision: Some(vision("glm4v", 13_696)), audio: None, llm: GLM4_9B };

/// # Source
/// `config.json` in zai-org/GLM-4.5V, `vision_config.intermediate_size`, and the shape of
/// `model.visual.merger.gate_proj.weight` in its checkpoint, 10,944 x 4096. Defaults in transformers have
/// GLM-4.1V's width.
const GLM_4_5V: Preset =
    Preset { name: "glm-4.5v", vision: Some(vision("glm4v_moe", 10_944)), audio: None, llm: GLM4_5_AIR };

/// Builds the common tower, with the given projector MLP width.
const fn vision(family: &'static str, projector_ffn: u32) -> VisionSpec {
    let size = TowerSize { layers: 24, hidden: 1536, heads: 12, ffn: 4096 };
    VisionSpec {
        family: FamilyId::new(family),
        encoder: EncoderSpec {
            projector: merger(1536, 4, 4096, projector_ffn),
            ..encoder(size, 2 * PATCH_INPUTS, 576, false)
        },
        // The pixel limits are over the two frames that an image counts as.
        rule: VisionRule::Native(NativeResolution {
            image: PixelRange { min: 12_544 / 2, max: 9_633_792 / 2 },
            frames_max: 0,
            enlarges_thin: true,
            ..NativeResolution::QWEN2_VL
        }),
    }
}

/// Builds the tower: gated MLPs without biases, a stem bias, learned positions, and norms without biases
/// before and after the layers and two in each.
const fn encoder(size: TowerSize, patch_inputs: u32, positions: u32, has_qkv_bias: bool) -> EncoderSpec {
    let hidden = size.hidden;
    let details = EncoderDetails {
        class_tokens: 0,
        has_pooling_head: false,
        unused_layers: 0,
        stem_medium_inputs: patch_inputs,
        layer_vectors: if has_qkv_bias { 5 } else { 2 },
        layer_ffn_vectors: 0,
        outside_parameters: product(patch_inputs, hidden)
            .saturating_add(product(positions, hidden))
            .saturating_add(product(3, hidden)),
    };
    bare_tower(size, Mlp::Gated, patch_inputs, details)
}

/// Builds the projector: a convolution over `merged_tokens` tokens to the LLM width, a matrix, a norm, and a
/// gated MLP.
const fn merger(hidden: u32, merged_tokens: u32, llm_hidden: u32, ffn: u32) -> Projector {
    Projector::new(merged_tokens, hidden.saturating_mul(merged_tokens), Some(llm_hidden))
        .further(product(3, llm_hidden).saturating_mul(ffn as u64))
        .vectors(product(3, llm_hidden))
}

/// # Source
/// `Glm4vConfig`, `Glm4vProcessor` and `Glm4vImageProcessor` in transformers 5.24.0. The tower's MLPs have
/// the width `out_hidden_size`, the projector's MLP has `intermediate_size`.
fn read(source: &CheckpointFields<'_>, family: FamilyId, llm: LlmSpec) -> Result<PartialModelSpec> {
    let fields = source.config.child_or_empty("vision_config")?;
    let out_hidden = fields.count("out_hidden_size", 4096)?;
    if out_hidden != llm.hidden {
        let problem = format!("= {out_hidden}, but the language model is {} wide", llm.hidden);
        return Err(fields.invalid("out_hidden_size", problem));
    }
    let hidden = fields.count("hidden_size", 1536)?;
    let heads = fields.count("num_heads", 12)?;
    fields.require_multiple("hidden_size", hidden, "num_heads", heads)?;
    let size = TowerSize { layers: fields.count("depth", 24)?, hidden, heads, ffn: out_hidden };
    let patch = fields.square_side("patch_size", 14)?;
    let frames = fields.count("temporal_patch_size", 2)?;
    let inputs = patch_inputs(&fields, fields.count("in_channels", 3)?, patch, frames)?;
    let side = fields.square_side("image_size", 336)? / patch;
    let merge = fields.count("spatial_merge_size", 2)?;
    let has_qkv_bias = fields.flag("attention_bias", false)?;
    let projector_ffn = fields.count("intermediate_size", 13_696)?;
    let projector = merger(hidden, merge.saturating_mul(merge), out_hidden, projector_ffn);
    let tower = encoder(size, inputs, side.saturating_mul(side), has_qkv_bias);
    let encoder = EncoderSpec { projector, ..tower };
    let rule = VisionRule::Native(rule(source, &fields, [patch, merge, frames])?);
    let vision = Some(VisionSpec { family, encoder, rule });
    Ok(PartialModelSpec { family, vision, audio: None, llm: Some(llm) })
}

/// Reads the token rule; `sides` are the patch in pixels, a token's square in patches, and the frames per
/// patch.
fn rule(
    source: &CheckpointFields<'_>,
    vision: &ConfigFields<'_>,
    sides: [u32; 3],
) -> Result<NativeResolution> {
    let image = source.image();
    let keys = ["patch_size", "merge_size", "temporal_patch_size"];
    for ((key, of_tower), default) in keys.into_iter().zip(sides).zip([14, 2, 2]) {
        let found = image.count(key, default)?;
        if found != of_tower && source.preprocessor.is_some() {
            return Err(image.invalid(key, format!("= {found}, but the vision tower takes {of_tower}")));
        }
    }
    let size = image.child_or_empty("size")?;
    let [patch, merge, frames] = sides;
    let limit = |key: &str, default: u32| {
        let pixels = size.count(key, default)?;
        // A limit over all frames is a limit over each, since an image is repeated in all frames.
        if pixels.is_multiple_of(frames) {
            return Ok(pixels / frames);
        }
        Err(size.invalid(key, format!("= {pixels} must be a multiple of {frames}, the frames of a patch")))
    };
    let range =
        PixelRange { min: limit("shortest_edge", 112 * 112)?, max: limit("longest_edge", 28 * 28 * 15_000)? };
    if range.min > range.max {
        return Err(size.invalid("shortest_edge", "is more than `longest_edge`"));
    }
    let side = |key: &str, value: u32| {
        let side = u16::try_from(value).ok().and_then(NonZeroU16::new);
        side.ok_or_else(|| vision.invalid(key, format!("= {value} is out of range")))
    };
    Ok(NativeResolution {
        patch_pixels: side("patch_size", patch)?,
        merge: side("spatial_merge_size", merge)?,
        frames_per_patch: side("temporal_patch_size", frames)?,
        image: range,
        frames_max: 0,
        enlarges_thin: true,
        ..NativeResolution::QWEN2_VL
    })
}
