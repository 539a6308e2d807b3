//! CLIP and SigLIP, with one square per image: as separate encoders, and as the towers of other families. As
//! in LLaVA, CLIP's class token is dropped.

use super::fixed_resolution::{
    SquareInput, SquareTower, TowerSize, alone, bare_tower, product, square_tower, vision_fields,
};
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{EncoderDetails, EncoderSpec, FamilyId, Mlp, ModelFamily};

/// Families in this file.
pub(super) const FAMILIES: &[&dyn ModelFamily] = &[&Clip, &Siglip];

/// CLIP.
#[derive(Debug)]
struct Clip;

impl ModelFamily for Clip {
    fn id(&self) -> FamilyId {
        FamilyId::new("clip")
    }

    fn model_types(&self) -> &[&str] {
        &["clip", "clip_vision_model"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        alone(files, self.id(), &clip_tower(&vision_fields(&files.config)?)?, "crop_size", true)
    }
}

/// # Source
/// `CLIPVisionConfig` in transformers 4.57.1.
fn clip_tower(fields: &ConfigFields<'_>) -> Result<SquareTower> {
    square_tower(fields, 32, clip_encoder)
}

/// Builds CLIP: a class token, no stem bias, norms before and after the layers.
pub(crate) const fn clip_encoder(size: TowerSize, square: SquareInput) -> EncoderSpec {
    let hidden = size.hidden;
    let details = EncoderDetails {
        class_tokens: 1,
        has_pooling_head: false,
        unused_layers: 0,
        stem_medium_inputs: square.patch_inputs,
        layer_vectors: 9,
        layer_ffn_vectors: 1,
        // Class token, its position, 2 norms.
        outside_parameters: product(square.patch_inputs, hidden)
            .saturating_add(product(square.patches, hidden))
            .saturating_add(product(6, hidden)),
    };
    bare_tower(size, Mlp::Plain, square.patch_inputs, details)
}

/// SigLIP.
#[derive(Debug)]
struct Siglip;

impl ModelFamily for Siglip {
    fn id(&self) -> FamilyId {
        FamilyId::new("siglip")
    }

    fn model_types(&self) -> &[&str] {
        &["siglip", "siglip_vision_model"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        alone(files, self.id(), &siglip_tower(&vision_fields(&files.config)?)?, "size", false)
    }
}

/// # Source
/// `SiglipVisionConfig` in transformers 4.57.1; `vision_use_head` as read by `SiglipVisionTransformer`.
fn siglip_tower(fields: &ConfigFields<'_>) -> Result<SquareTower> {
    let has_head = fields.flag("vision_use_head", true)?;
    square_tower(fields, 16, |dimensions, square| siglip_encoder(dimensions, square, has_head))
}

/// Builds SigLIP: biases everywhere, positions, a norm after the layers, optionally the pooling head.
pub(crate) const fn siglip_encoder(
    size: TowerSize,
    square: SquareInput,
    has_pooling_head: bool,
) -> EncoderSpec {
    let hidden = size.hidden;
    let stem = product(square.patch_inputs, hidden).saturating_add(product(1, hidden));
    let details = EncoderDetails {
        class_tokens: 0,
        has_pooling_head,
        unused_layers: 0,
        stem_medium_inputs: square.patch_inputs,
        layer_vectors: 9, // 4 biases of the attention, 2 norms, 1 bias of the MLP
        layer_ffn_vectors: 1,
        outside_parameters: stem
            .saturating_add(product(square.patches, hidden))
            .saturating_add(product(2, hidden)),
    };
    bare_tower(size, Mlp::Plain, square.patch_inputs, details)
}

/// Reads the tower of a `vision_config`; without a `model_type`, it is SigLIP.
pub(super) fn tower(fields: &ConfigFields<'_>) -> Result<SquareTower> {
    tower_or(fields, "siglip_vision_model")
}

/// Reads the tower of a `vision_config`; without a `model_type`, it is that of `default_type`.
pub(super) fn tower_or(fields: &ConfigFields<'_>, default_type: &str) -> Result<SquareTower> {
    match fields.text("model_type")?.unwrap_or(default_type) {
        "siglip_vision_model" => siglip_tower(fields),
        "clip_vision_model" => clip_tower(fields),
        unknown => {
            let problem =
                format!("= \"{unknown}\" is unknown, known are clip_vision_model, siglip_vision_model");
            Err(fields.invalid("model_type", problem))
        }
    }
}
