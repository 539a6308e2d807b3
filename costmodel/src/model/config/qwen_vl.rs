//! Reads Qwen2-VL and Qwen2.5-VL, with the fields of the LLM at the top or in `text_config`.

use std::num::NonZeroU16;

use super::vision::patch_inputs;
use super::{CheckpointFields, Fields, PartialModelSpec, llm};
use crate::error::Result;
use crate::model::towers::{self, TowerSize};
use crate::model::{EncoderSpec, LlmSpec, VisionSpec};
use crate::tokens::VisionRule;
use crate::tokens::native::{NativeResolution, PixelRange};

/// Settings that both towers have under the same names.
struct Patches {
    pixels: u32,
    merge: u32,
    frames: u32,
    /// Multiply-adds per hidden unit and patch.
    inputs: u32,
}

/// # Source
/// `Qwen2VLConfig` and `Qwen2VLVisionConfig` of transformers 4.57.1, in which `hidden_size` is the width of
/// the LLM.
pub(super) fn read_2(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let llm = llm::qwen_vl(&source.config, "qwen2_vl_text")?;
    let fields = source.config.child_or_empty("vision_config")?;
    let hidden = fields.count("embed_dim", 1280)?;
    let ffn = f64::from(hidden) * fields.ratio("mlp_ratio", 4.0)?;
    if !(1.0..=f64::from(u32::MAX)).contains(&ffn) {
        return Err(fields.invalid("mlp_ratio", format!("makes an MLP {ffn} wide")));
    }
    let dimensions = dimensions(&fields, "embed_dim", hidden, ffn as u32)?;
    let patches = patches(&fields)?;
    let out_hidden = fields.count("hidden_size", 3584)?;
    require_width(&fields, "hidden_size", out_hidden, &llm)?;
    let tower = towers::qwen2_vl(dimensions, patches.inputs);
    compose(source, tower, &patches, 2, llm, None)
}

/// # Source
/// `Qwen2_5_VLConfig` and `Qwen2_5_VLVisionConfig` of transformers 4.57.1.
pub(super) fn read_2_5(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let llm = llm::qwen_vl(&source.config, "qwen2_5_vl_text")?;
    let fields = source.config.child_or_empty("vision_config")?;
    let hidden = fields.count("hidden_size", 3584)?;
    let ffn = fields.count("intermediate_size", 3420)?;
    let dimensions = dimensions(&fields, "hidden_size", hidden, ffn)?;
    let patches = patches(&fields)?;
    let out_hidden = fields.count("out_hidden_size", 3584)?;
    require_width(&fields, "out_hidden_size", out_hidden, &llm)?;
    let windowed = dimensions.layers - full_layers(&fields, dimensions.layers)?;
    let window = window_patches(&fields, &patches)?;
    let tower = towers::qwen2_5_vl(dimensions, patches.inputs, windowed);
    compose(source, tower, &patches, 1, llm, Some(window))
}

fn dimensions(fields: &Fields<'_>, width: &str, hidden: u32, ffn: u32) -> Result<TowerSize> {
    let heads = fields.count("num_heads", 16)?;
    fields.require_multiple(width, hidden, "num_heads", heads)?;
    Ok(TowerSize { layers: fields.count("depth", 32)?, hidden, heads, ffn })
}

fn patches(fields: &Fields<'_>) -> Result<Patches> {
    let pixels = fields.count("patch_size", 14)?;
    let frames = fields.count("temporal_patch_size", 2)?;
    let inputs = patch_inputs(fields, fields.count("in_channels", 3)?, pixels, frames)?;
    Ok(Patches { pixels, merge: fields.count("spatial_merge_size", 2)?, frames, inputs })
}

/// Checks that the merger's output is as wide as the LLM.
fn require_width(fields: &Fields<'_>, key: &str, width: u32, llm: &LlmSpec) -> Result<()> {
    if width == llm.hidden {
        return Ok(());
    }
    Err(fields.invalid(key, format!("= {width}, but the language model is {} wide", llm.hidden)))
}

/// Counts the layers of full attention; an index after the last layer names none.
fn full_layers(fields: &Fields<'_>, layers: u32) -> Result<u32> {
    let key = "fullatt_block_indexes";
    let mut indices = vec![7, 15, 23, 31];
    if let Some(value) = fields.value(key) {
        let Some(listed) = value.as_array() else {
            return Err(fields.invalid(key, "must be a list of layers"));
        };
        let index = |index| fields.whole_number(key, index, 0);
        indices = listed.iter().map(index).collect::<Result<Vec<u32>>>()?;
    }
    indices.sort_unstable();
    indices.dedup();
    Ok(indices.iter().filter(|index| **index < layers).count() as u32)
}

/// Returns the side of a window in patches, rounded down to whole merged tokens as the tower does.
fn window_patches(fields: &Fields<'_>, patches: &Patches) -> Result<NonZeroU16> {
    let pixels = fields.count("window_size", 112)?;
    let window = pixels / patches.merge / patches.pixels * patches.merge;
    match u16::try_from(window).ok().and_then(NonZeroU16::new) {
        Some(window) => Ok(window),
        None => {
            Err(fields.invalid("window_size", format!("= {pixels} pixels make windows of {window} patches")))
        }
    }
}

fn compose(
    source: &CheckpointFields<'_>,
    tower: EncoderSpec,
    patches: &Patches,
    norm_vectors: u32,
    llm: LlmSpec,
    window_patches: Option<NonZeroU16>,
) -> Result<PartialModelSpec> {
    let merged = patches.merge.saturating_mul(patches.merge);
    let projector = towers::qwen_merger(tower.hidden, merged, norm_vectors, llm.hidden);
    let encoder = EncoderSpec { projector, ..tower };
    let rule = VisionRule::Native(rule(source, patches, window_patches)?);
    Ok(PartialModelSpec { vision: Some(VisionSpec { encoder, rule }), audio: None, llm: Some(llm) })
}

/// # Source
/// `Qwen2VLImageProcessorFast` and `Qwen2VLVideoProcessor` of transformers 4.57.1; the slow image processor
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
        check_patches(image, patches)?;
        rule.image = pixel_range(image, PixelRange { min: 56 * 56, max: 28 * 28 * 1280 })?;
    }
    if let Some(video) = &source.video_preprocessor {
        check_patches(video, patches)?;
        rule.frame = pixel_range(video, released.frame)?;
        rule.frames_max = source.frames_max(video.count("max_frames", released.frames_max)?)?;
    }
    Ok(rule)
}

/// Checks that a processor cuts the patches that the tower takes.
fn check_patches(processor: &Fields<'_>, patches: &Patches) -> Result<()> {
    for (key, of_tower, default) in [
        ("patch_size", patches.pixels, 14),
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

fn pixel_range(processor: &Fields<'_>, default: PixelRange) -> Result<PixelRange> {
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
