//! Qwen2-VL and Qwen2.5-VL: images in native resolution, with the LLM fields at the top or in `text_config`.

use std::num::NonZeroU16;

use super::fixed_resolution::{PATCH_INPUTS, TowerSize, bare_tower, patch_inputs, product};
use super::language_models::{self, QWEN2_5_3B, QWEN2_5_7B};
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{
    EncoderDetails, EncoderSpec, FamilyId, LlmSpec, Mlp, ModelFamily, Preset, Projector, VisionSpec,
};
use crate::tokens::VisionRule;
use crate::tokens::native::{NativeResolution, PixelRange};

const QWEN2_VL: FamilyId = FamilyId::new("qwen2_vl");
const QWEN2_5_VL: FamilyId = FamilyId::new("qwen2_5_vl");

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&Qwen2Vl, &Qwen25Vl];

/// Qwen2-VL.
#[derive(Debug)]
struct Qwen2Vl;

impl ModelFamily for Qwen2Vl {
    fn id(&self) -> FamilyId {
        QWEN2_VL
    }

    fn model_types(&self) -> &[&str] {
        &["qwen2_vl"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        read_2(files)
    }

    fn presets(&self) -> &[Preset] {
        &[Preset { name: "qwen2-vl-7b", vision: Some(QWEN2_VL_VIT), audio: None, llm: QWEN2_5_7B }]
    }
}

/// Qwen2.5-VL.
#[derive(Debug)]
struct Qwen25Vl;

impl ModelFamily for Qwen25Vl {
    fn id(&self) -> FamilyId {
        QWEN2_5_VL
    }

    fn model_types(&self) -> &[&str] {
        &["qwen2_5_vl"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        read_2_5(files)
    }

    fn presets(&self) -> &[Preset] {
        &[
            Preset { name: "qwen2.5-vl-3b", vision: Some(QWEN2_5_VL_3B_VIT), audio: None, llm: QWEN2_5_3B },
            Preset { name: "qwen2.5-vl-7b", vision: Some(QWEN2_5_VL_VIT), audio: None, llm: QWEN2_5_7B },
        ]
    }
}

const QWEN2_VL_VIT: VisionSpec = VisionSpec {
    family: QWEN2_VL,
    encoder: EncoderSpec {
        projector: merger(1280, 4, 2, QWEN2_5_7B.hidden),
        ..qwen2_vl(TowerSize { layers: 32, hidden: 1280, heads: 16, ffn: 5120 }, 2 * PATCH_INPUTS)
    },
    rule: VisionRule::Native(NativeResolution::QWEN2_VL),
};

/// Qwen2.5-VL's tower, with full attention in layers 7, 15, 23 and 31 and windows in the others.
pub(super) const QWEN2_5_VL_VIT: VisionSpec = VisionSpec {
    family: QWEN2_5_VL,
    encoder: EncoderSpec {
        projector: merger(1280, 4, 1, QWEN2_5_7B.hidden),
        ..qwen2_5_vl(TowerSize { layers: 32, hidden: 1280, heads: 16, ffn: 3420 }, 2 * PATCH_INPUTS, 28)
    },
    rule: VisionRule::Native(NativeResolution::QWEN2_5_VL),
};

const QWEN2_5_VL_3B_VIT: VisionSpec = VisionSpec {
    encoder: EncoderSpec { projector: merger(1280, 4, 1, QWEN2_5_3B.hidden), ..QWEN2_5_VL_VIT.encoder },
    ..QWEN2_5_VL_VIT
};

/// Builds the Qwen2-VL tower: rotary positions, no stem bias. `patch_inputs` covers the frames in a patch.
pub(super) const fn qwen2_vl(size: TowerSize, patch_inputs: u32) -> EncoderSpec {
    let details = EncoderDetails {
        class_tokens: 0,
        has_pooling_head: false,
        unused_layers: 0,
        stem_medium_inputs: patch_inputs,
        layer_vectors: 9,
        layer_ffn_vectors: 1,
        outside_parameters: product(patch_inputs, size.hidden),
    };
    bare_tower(size, Mlp::Plain, patch_inputs, details)
}

/// Builds the Qwen2.5-VL tower: the Qwen2-VL tower with norms without bias, gated MLPs and windows.
const fn qwen2_5_vl(size: TowerSize, patch_inputs: u32, windowed_layers: u32) -> EncoderSpec {
    let mut spec = qwen2_vl(size, patch_inputs);
    spec.mlp = Mlp::Gated;
    spec.windowed_layers = windowed_layers;
    spec.details.layer_vectors = 7;
    spec.details.layer_ffn_vectors = 2;
    spec
}

/// Builds the Qwen2-VL and Qwen2.5-VL merger: a norm with `norm_vectors` vectors per encoder token, then two
/// matrices with biases over `merged_tokens` concatenated tokens.
const fn merger(hidden: u32, merged_tokens: u32, norm_vectors: u32, llm_hidden: u32) -> Projector {
    let width = hidden.saturating_mul(merged_tokens);
    let vectors =
        product(norm_vectors, hidden).saturating_add(width as u64).saturating_add(llm_hidden as u64);
    Projector::new(merged_tokens, width, Some(width)).vectors(vectors)
}

/// Settings with the same names in both towers.
pub(super) struct Patches {
    pub(super) pixels: u32,
    pub(super) merge: u32,
    pub(super) frames: u32,
    /// Multiply-adds per hidden unit and patch.
    pub(super) inputs: u32,
}

/// # Source
/// `Qwen2VLConfig` and `Qwen2VLVisionConfig` in transformers 4.57.1, in which `hidden_size` is the LLM width.
fn read_2(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let llm = language_models::qwen_vl(&source.config, "qwen2_vl_text")?;
    let fields = source.config.child_or_empty("vision_config")?;
    let hidden = fields.count("embed_dim", 1280)?;
    let ffn = f64::from(hidden) * fields.number("mlp_ratio", 4.0)?;
    if !(1.0..=f64::from(u32::MAX)).contains(&ffn) {
        return Err(fields.invalid("mlp_ratio", format!("makes an MLP {ffn} wide")));
    }
    let dimensions = dimensions(&fields, "embed_dim", hidden, ffn as u32)?;
    let patches = patches(&fields)?;
    let out_hidden = fields.count("hidden_size", 3584)?;
    require_width(&fields, "hidden_size", out_hidden, &llm)?;
    let tower = qwen2_vl(dimensions, patches.inputs);
    let vision = vision(source, (QWEN2_VL, tower), &patches, 2, &llm, None)?;
    Ok(PartialModelSpec { family: QWEN2_VL, vision: Some(vision), audio: None, llm: Some(llm) })
}

/// # Source
/// `Qwen2_5_VLConfig` in transformers 4.57.1.
fn read_2_5(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let llm = language_models::qwen_vl(&source.config, "qwen2_5_vl_text")?;
    let vision = vision_2_5(source, QWEN2_5_VL, &llm)?;
    Ok(PartialModelSpec { family: QWEN2_5_VL, vision: Some(vision), audio: None, llm: Some(llm) })
}

/// Reads the Qwen2.5-VL tower from `vision_config`.
///
/// # Source
/// `Qwen2_5_VLVisionConfig` in transformers 4.57.1.
pub(super) fn vision_2_5(
    source: &CheckpointFields<'_>,
    family: FamilyId,
    llm: &LlmSpec,
) -> Result<VisionSpec> {
    let fields = source.config.child_or_empty("vision_config")?;
    let hidden = fields.count("hidden_size", 3584)?;
    let ffn = fields.count("intermediate_size", 3420)?;
    let dimensions = dimensions(&fields, "hidden_size", hidden, ffn)?;
    let patches = patches(&fields)?;
    let out_hidden = fields.count("out_hidden_size", 3584)?;
    require_width(&fields, "out_hidden_size", out_hidden, llm)?;
    let windowed = dimensions.layers - full_layers(&fields, dimensions.layers)?;
    let window = window_patches(&fields, &patches)?;
    let tower = qwen2_5_vl(dimensions, patches.inputs, windowed);
    vision(source, (family, tower), &patches, 1, llm, Some(window))
}

fn dimensions(fields: &ConfigFields<'_>, width: &str, hidden: u32, ffn: u32) -> Result<TowerSize> {
    let heads = fields.count("num_heads", 16)?;
    fields.require_multiple(width, hidden, "num_heads", heads)?;
    Ok(TowerSize { layers: fields.count("depth", 32)?, hidden, heads, ffn })
}

fn patches(fields: &ConfigFields<'_>) -> Result<Patches> {
    let pixels = fields.count("patch_size", 14)?;
    let frames = fields.count("temporal_patch_size", 2)?;
    let inputs = patch_inputs(fields, fields.count("in_channels", 3)?, pixels, frames)?;
    Ok(Patches { pixels, merge: fields.count("spatial_merge_size", 2)?, frames, inputs })
}

/// Checks that the merger's output is as wide as the LLM.
pub(super) fn require_width(fields: &ConfigFields<'_>, key: &str, width: u32, llm: &LlmSpec) -> Result<()> {
    if width == llm.hidden {
        return Ok(());
    }
    Err(fields.invalid(key, format!("= {width}, but the language model is {} wide", llm.hidden)))
}

/// Counts the layers with full attention; an index after the last layer names none.
fn full_layers(fields: &ConfigFields<'_>, layers: u32) -> Result<u32> {
    let key = "fullatt_block_indexes";
    let mut indices = fields.whole_numbers(key)?.unwrap_or_else(|| vec![7, 15, 23, 31]);
    indices.sort_unstable();
    indices.dedup();
    Ok(indices.iter().filter(|index| **index < layers).count() as u32)
}

/// Returns a window's side in patches, rounded down to whole merged tokens as in the tower.
fn window_patches(fields: &ConfigFields<'_>, patches: &Patches) -> Result<NonZeroU16> {
    let pixels = fields.count("window_size", 112)?;
    let window = pixels / patches.merge / patches.pixels * patches.merge;
    match u16::try_from(window).ok().and_then(NonZeroU16::new) {
        Some(window) => Ok(window),
        None => {
            Err(fields.invalid("window_size", format!("= {pixels} pixels make windows of {window} patches")))
        }
    }
}

/// Joins a tower with the merger and the token rule.
pub(super) fn vision(
    source: &CheckpointFields<'_>,
    (family, tower): (FamilyId, EncoderSpec),
    patches: &Patches,
    norm_vectors: u32,
    llm: &LlmSpec,
    window_patches: Option<NonZeroU16>,
) -> Result<VisionSpec> {
    let merged = patches.merge.saturating_mul(patches.merge);
    let projector = merger(tower.hidden, merged, norm_vectors, llm.hidden);
    let encoder = EncoderSpec { projector, ..tower };
    Ok(VisionSpec { family, encoder, rule: VisionRule::Native(rule(source, patches, window_patches)?) })
}

/// # Source
/// `Qwen2VLImageProcessorFast` and `Qwen2VLVideoProcessor` in transformers 4.57.1; the slow image processor
/// does not read `size`. Without files, the ranges are the released checkpoints' ranges.
fn rule(
    source: &CheckpointFields<'_>,
    patches: &Patches,
    window_patches: Option<NonZeroU16>,
) -> Result<NativeResolution> {
    let released = NativeResolution::QWEN2_VL;
    let mut rule = NativeResolution { window_patches, ..released };
    let config = &source.config;
    let side = |key, value: u32| {
        let side = u16::try_from(value).ok().and_then(NonZeroU16::new);
        side.ok_or_else(|| config.invalid(key, format!("= {value} is out of range")))
    };
    rule.patch_pixels = side("vision_config.patch_size", patches.pixels)?;
    rule.merge = side("vision_config.spatial_merge_size", patches.merge)?;
    rule.frames_per_patch = side("vision_config.temporal_patch_size", patches.frames)?;
    if let Some(image) = &source.preprocessor {
        check_patches(image, patches, 14)?;
        rule.image = pixel_range(image, PixelRange { min: 56 * 56, max: 28 * 28 * 1280 })?;
    }
    if let Some(video) = &source.video_preprocessor {
        check_patches(video, patches, 14)?;
        rule.frame = pixel_range(video, released.frame)?;
        rule.frames_max = source.frames_max(video.count("max_frames", released.frames_max)?)?;
    }
    Ok(rule)
}

/// Checks that a processor cuts patches that fit the tower; without a size in the processor file, patches
/// have `pixels` pixels per side.
pub(super) fn check_patches(processor: &ConfigFields<'_>, patches: &Patches, pixels: u32) -> Result<()> {
    for (key, of_tower, default) in [
        ("patch_size", patches.pixels, pixels),
        ("merge_size", patches.merge, 2),
        ("temporal_patch_size", patches.frames, 2),
    ] {
        let found = processor.count(key, default)?;
        if found != of_tower {
            return Err(processor.invalid(key, format!("= {found}, but the vision tower takes {of_tower}")));
        }
    }
    Ok(())
}

pub(super) fn pixel_range(processor: &ConfigFields<'_>, default: PixelRange) -> Result<PixelRange> {
    let size = processor.child_or_empty("size")?;
    for (edge, pixels) in [("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")] {
        // Older processors wrote `size` with other keys, and the limits a second time.
        let is_given = [&size, processor].iter().zip([edge, pixels]).any(|(of, key)| of.value(key).is_some());
        if processor.value("size").is_some() && !is_given {
            let problem = format!("must have `{edge}`, or `{pixels}` must be given next to it");
            return Err(processor.invalid("size", problem));
        }
    }
    let min = size.count("shortest_edge", default.min)?;
    let max = size.count("longest_edge", default.max)?;
    let range =
        PixelRange { min: processor.count("min_pixels", min)?, max: processor.count("max_pixels", max)? };
    if range.min > range.max {
        let problem = format!("= {} is more than the most pixels, {}", range.min, range.max);
        return Err(processor.invalid("min_pixels", problem));
    }
    Ok(range)
}
