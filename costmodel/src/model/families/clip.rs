//! CLIP as a separate encoder, with one square per image; as in LLaVA, the class token is dropped.

use super::squares::{SquareTower, alone, square_tower, vision_fields};
use super::tower::{SquareInput, TowerSize, bare_tower, product};
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{EncoderDetails, EncoderSpec, FamilyId, Mlp, ModelFamily};

/// CLIP.
#[derive(Debug)]
pub(super) struct Clip;

impl ModelFamily for Clip {
    fn id(&self) -> FamilyId {
        FamilyId::new("clip")
    }

    fn model_types(&self) -> &[&str] {
        &["clip", "clip_vision_model"]
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        alone(files, self.id(), &tower(&vision_fields(&files.config)?)?, "crop_size", true)
    }
}

/// # Source
/// `CLIPVisionConfig` in transformers 4.57.1.
pub(super) fn tower(fields: &ConfigFields<'_>) -> Result<SquareTower> {
    square_tower(fields, 32, encoder)
}

/// Builds CLIP: a class token, no stem bias, norms before and after the layers.
pub(crate) const fn encoder(size: TowerSize, square: SquareInput) -> EncoderSpec {
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
