//! SigLIP as a separate encoder, with one square per image.

use super::squares::{SquareTower, alone, square_tower, vision_fields};
use super::tower::{SquareInput, TowerSize, bare_tower, product};
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{EncoderDetails, EncoderSpec, FamilyId, Mlp, ModelFamily};

/// SigLIP.
#[derive(Debug)]
pub(super) struct Siglip;

impl ModelFamily for Siglip {
    fn id(&self) -> FamilyId {
        FamilyId::new("siglip")
    }

    fn model_types(&self) -> &[&str] {
        &["siglip", "siglip_vision_model"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        alone(files, self.id(), &tower(&vision_fields(&files.config)?)?, "size", false)
    }
}

/// # Source
/// `SiglipVisionConfig` in transformers 4.57.1; `vision_use_head` as read by `SiglipVisionTransformer`.
pub(super) fn tower(fields: &ConfigFields<'_>) -> Result<SquareTower> {
    let has_head = fields.flag("vision_use_head", true)?;
    square_tower(fields, 16, |dimensions, square| encoder(dimensions, square, has_head))
}

/// Builds SigLIP: biases everywhere, positions, a norm after the layers, optionally the pooling head.
pub(crate) const fn encoder(size: TowerSize, square: SquareInput, has_pooling_head: bool) -> EncoderSpec {
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
