//! CLIP and SigLIP without an LLM; the output is the last hidden state.

use dflop_costmodel::FamilyId;

use super::fixed_resolution::square_tower;
use super::{BlockSource, FamilyBlocks};
use crate::encoder::{EncoderConfig, TailSpec, TileRule};
use crate::error::Result;

/// Families in this file.
pub(super) const FAMILIES: &[&dyn FamilyBlocks] = &[&Clip, &Siglip];

/// CLIP.
#[derive(Debug)]
struct Clip;

/// SigLIP.
#[derive(Debug)]
struct Siglip;

impl FamilyBlocks for Clip {
    fn id(&self) -> FamilyId {
        FamilyId::new("clip")
    }

    fn model_types(&self) -> &[&str] {
        &["clip_vision_model"]
    }

    /// The norm after the layers applies only to the pooled row.
    fn vision(&self, source: &BlockSource<'_>) -> Result<EncoderConfig> {
        let tower = square_tower(&source.fields(), &source.vision()?, "", TileRule::All)?;
        Ok(tower.joined(None, None))
    }
}

impl FamilyBlocks for Siglip {
    fn id(&self) -> FamilyId {
        FamilyId::new("siglip")
    }

    fn model_types(&self) -> &[&str] {
        &["siglip_vision_model"]
    }

    fn vision(&self, source: &BlockSource<'_>) -> Result<EncoderConfig> {
        let tower = square_tower(&source.fields(), &source.vision()?, "", TileRule::All)?;
        let tail = tower.last_norm.clone().map(|norm| TailSpec { before: Some(norm), after: None });
        Ok(tower.joined(tail, None))
    }
}
