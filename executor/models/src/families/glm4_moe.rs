//! GLM-4.5: experts as in DeepSeek-V3, and partially rotated heads.
//!
//! # Source
//! `modeling_glm4_moe.py` of transformers 5.24.0.

use dflop_costmodel::FamilyId;

use super::family_blocks::FamilyBlocks;
use super::language_models::{DecoderDefaults, decoder};
use super::source::BlockSource;
use crate::error::Result;
use crate::llm::LlmConfig;

/// GLM-4.5 without encoders.
#[derive(Debug)]
pub(super) struct Glm4Moe;

impl FamilyBlocks for Glm4Moe {
    fn id(&self) -> FamilyId {
        FamilyId::new("glm4_moe")
    }

    fn model_types(&self) -> &[&str] {
        &["glm4_moe"]
    }

    fn llm(&self, source: &BlockSource<'_>) -> Result<LlmConfig> {
        let alone = DecoderDefaults::ALONE;
        decoder(source, &DecoderDefaults { epsilon: 1e-5, rotated_part: Some(0.5), ..alone })
    }
}
