//! Pixtral and Mistral Small 3: images in native resolution up to a longest side, in rows of patches.

use std::num::NonZeroU16;

use super::fixed_resolution::{
    PATCH_INPUTS, TowerSize, bare_tower, dimensions, feature_layers, patch_inputs, product,
};
use super::language_models::{self, language_model};
use super::llava_onevision::projector;
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{
    EncoderDetails, EncoderSpec, FamilyId, LlmSpec, Mlp, ModelFamily, Preset, Projector, VisionSpec,
};
use crate::tokens::VisionRule;
use crate::tokens::longest_edge::LongestEdge;

const PIXTRAL: FamilyId = FamilyId::new("pixtral");
const MISTRAL3: FamilyId = FamilyId::new("mistral3");

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&Pixtral, &Mistral3];

/// Pixtral 12B, whose checkpoints [`super::llava`] passes on.
#[derive(Debug)]
struct Pixtral;

impl ModelFamily for Pixtral {
    fn id(&self) -> FamilyId {
        PIXTRAL
    }

    fn model_types(&self) -> &[&str] {
        &[]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        read_llava(files)
    }

    fn presets(&self) -> &[Preset] {
        &[Preset { name: "pixtral-12b", vision: Some(PIXTRAL_VIT), audio: None, llm: MISTRAL_NEMO_12B }]
    }
}

/// Mistral Small 3.1 and 3.2, Ministral 3.
#[derive(Debug)]
struct Mistral3;

impl ModelFamily for Mistral3 {
    fn id(&self) -> FamilyId {
        MISTRAL3
    }

    fn model_types(&self) -> &[&str] {
        &["mistral3"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        read_mistral3(files)
    }

    fn presets(&self) -> &[Preset] {
        &[Preset {
            name: "mistral-small-3.1-24b",
            vision: Some(MISTRAL3_VIT),
            audio: None,
            llm: MISTRAL_SMALL_24B,
        }]
    }
}

const MISTRAL_NEMO_12B: LlmSpec = language_models::llama(40, 5120, [32, 8, 128], 14_336, 131_072);
const MISTRAL_SMALL_24B: LlmSpec = language_models::llama(40, 5120, [32, 8, 128], 32_768, 131_072);
const SIZE: TowerSize = TowerSize { layers: 24, hidden: 1024, heads: 16, ffn: 4096 };

const PIXTRAL_VIT: VisionSpec = VisionSpec {
    family: PIXTRAL,
    encoder: EncoderSpec {
        projector: projector(SIZE.hidden, MISTRAL_NEMO_12B.hidden, true),
        ..encoder(SIZE, 3 * 16 * 16)
    },
    rule: VisionRule::LongestEdge(LongestEdge {
        patch_pixels: NonZeroU16::new(16).unwrap(),
        merge: NonZeroU16::MIN,
        side_max: NonZeroU16::new(1024).unwrap(),
    }),
};

const MISTRAL3_VIT: VisionSpec = VisionSpec {
    family: MISTRAL3,
    encoder: EncoderSpec {
        projector: merger(SIZE.hidden, 4, MISTRAL_SMALL_24B.hidden, false),
        ..encoder(SIZE, PATCH_INPUTS)
    },
    rule: VisionRule::LongestEdge(LongestEdge {
        patch_pixels: NonZeroU16::new(14).unwrap(),
        merge: NonZeroU16::new(2).unwrap(),
        side_max: NonZeroU16::new(1540).unwrap(),
    }),
};

/// Builds the tower: no biases, rotary positions, a norm before the layers, two in each, none after them.
const fn encoder(size: TowerSize, patch_inputs: u32) -> EncoderSpec {
    let details = EncoderDetails {
        class_tokens: 0,
        has_pooling_head: false,
        unused_layers: 0,
        stem_medium_inputs: patch_inputs,
        layer_vectors: 2,
        layer_ffn_vectors: 0,
        outside_parameters: product(patch_inputs, size.hidden).saturating_add(size.hidden as u64),
    };
    bare_tower(size, Mlp::Gated, patch_inputs, details)
}

/// Builds the Mistral Small 3 projector: a norm, a matrix from `merged_tokens` concatenated tokens to a
/// single token's width, and two matrices as wide as the LLM.
const fn merger(hidden: u32, merged_tokens: u32, llm_hidden: u32, has_bias: bool) -> Projector {
    let biases = if has_bias { product(2, llm_hidden) } else { 0 };
    Projector::new(merged_tokens, hidden.saturating_mul(merged_tokens), Some(hidden))
        .further(product(llm_hidden, llm_hidden))
        .vectors(biases.saturating_add(hidden as u64))
}

/// Tower with patch and image sides.
struct Tower {
    encoder: EncoderSpec,
    patch_pixels: u32,
    image_pixels: u32,
}

/// Reads the tower; `image` and `patch` are the sides without the fields.
///
/// # Source
/// `PixtralVisionConfig` in transformers 5.24.0.
fn tower(fields: &ConfigFields<'_>, image: u32, patch: u32) -> Result<Tower> {
    let size = dimensions(fields, [SIZE.layers, SIZE.hidden, SIZE.heads, SIZE.ffn])?;
    let patch_pixels = fields.square_side("patch_size", patch)?;
    let inputs = patch_inputs(fields, fields.count("num_channels", 3)?, patch_pixels, 1)?;
    let image_pixels = fields.square_side("image_size", image)?;
    Ok(Tower { encoder: encoder(size, inputs), patch_pixels, image_pixels })
}

/// Reads Pixtral 12B in the LLaVA form.
///
/// # Source
/// `LlavaConfig`, `PixtralProcessor` and `PixtralImageProcessor` in transformers 5.24.0.
pub(super) fn read_llava(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let config = &source.config;
    let llm = language_model(config, "llama")?;
    let tower = tower(&config.child_or_empty("vision_config")?, 1024, 16)?;
    let key = "vision_feature_select_strategy";
    if let Some(strategy) = config.text(key)?.filter(|strategy| *strategy != "full") {
        let problem = format!("= \"{strategy}\", but the vision tower has no class token, expected \"full\"");
        return Err(config.invalid(key, problem));
    }
    let (used_layers, features) = feature_layers(config, tower.encoder.layers, -2)?;
    let has_bias = config.flag("multimodal_projector_bias", true)?;
    let input = tower.encoder.hidden.saturating_mul(features);
    let projector = projector(input, llm.hidden, has_bias);
    compose(source, PIXTRAL, &tower, 1, used_layers, projector, llm)
}

/// Without `tie_word_embeddings` the embeddings are separate, as in the Mistral Small 3 checkpoints;
/// `Mistral3Config` ties them by default.
///
/// # Source
/// `Mistral3Config`, `PixtralProcessor` and `PixtralImageProcessor` in transformers 5.24.0.
fn read_mistral3(source: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
    let config = &source.config;
    let llm = language_model(config, "mistral")?;
    let vision = config.child("vision_config")?;
    let tower = match &vision {
        Some(fields) => {
            let key = "model_type";
            if let Some(other) = fields.text(key)?.filter(|name| *name != "pixtral") {
                return Err(fields.invalid(key, format!("= \"{other}\" is unknown, known is pixtral")));
            }
            tower(fields, 1024, 16)?
        }
        None => tower(&config.child_or_empty("vision_config")?, 1540, 14)?,
    };
    let merge = config.count("spatial_merge_size", 2)?;
    let (used_layers, features) = feature_layers(config, tower.encoder.layers, -1)?;
    if features > 1 {
        return Err(config.invalid("vision_feature_layer", "names several layers, the norm takes one"));
    }
    let has_bias = config.flag("multimodal_projector_bias", false)?;
    let projector = merger(tower.encoder.hidden, merge.saturating_mul(merge), llm.hidden, has_bias);
    compose(source, MISTRAL3, &tower, merge, used_layers, projector, llm)
}

fn compose(
    source: &CheckpointFields<'_>,
    family: FamilyId,
    tower: &Tower,
    merge: u32,
    used_layers: u32,
    projector: Projector,
    llm: LlmSpec,
) -> Result<PartialModelSpec> {
    let rule = VisionRule::LongestEdge(rule(source, tower, merge)?);
    let mut encoder = EncoderSpec { projector, ..tower.encoder };
    encoder.details.unused_layers = encoder.layers - used_layers;
    let vision = Some(VisionSpec { family, encoder, rule });
    Ok(PartialModelSpec { family, vision, audio: None, llm: Some(llm) })
}

/// Reads the token rule; without an image processor's file, the longest side is the tower's.
fn rule(source: &CheckpointFields<'_>, tower: &Tower, merge: u32) -> Result<LongestEdge> {
    let (config, processor) = (&source.config, &source.processor);
    if processor.has("patch_size") || processor.has("spatial_merge_size") {
        for (key, default, expected) in
            [("patch_size", 16, tower.patch_pixels), ("spatial_merge_size", 1, merge)]
        {
            let found = processor.count(key, default)?;
            if found != expected {
                let problem = format!("= {found}, but the model takes {expected}");
                return Err(processor.invalid(key, problem));
            }
        }
    }
    let side = |key: &str, value: u32| {
        let side = u16::try_from(value).ok().and_then(NonZeroU16::new);
        side.ok_or_else(|| config.invalid(key, format!("= {value} is out of range")))
    };
    let image = source.image();
    let side_max = if image.has("size") {
        let size = image.child_or_empty("size")?;
        let [height, width] = [size.optional_count("height")?, size.optional_count("width")?];
        let longest = size.optional_count("longest_edge")?.or(height.filter(|_| height == width));
        let longest = longest.and_then(|side| NonZeroU16::new(u16::try_from(side).ok()?));
        let problem = "must have `longest_edge`, or equal height and width, of at most 65535 pixels";
        longest.ok_or_else(|| image.invalid("size", problem))?
    } else {
        side("vision_config.image_size", tower.image_pixels)?
    };
    Ok(LongestEdge {
        patch_pixels: side("vision_config.patch_size", tower.patch_pixels)?,
        merge: side("spatial_merge_size", merge)?,
        side_max,
    })
}
