//! Language models without encoders.
//!
//! # Source
//! GLM-4.5: `modeling_glm4_moe.py` of transformers 5.24.0.

use dflop_costmodel::FamilyId;

use super::language_models::{DecoderDefaults, decoder};
use super::{BlockSource, FamilyBlocks};
use crate::error::Result;
use crate::llm::LlmConfig;

/// Families in this file.
pub(super) const FAMILIES: &[&dyn FamilyBlocks] = &[
    &LanguageModel(["llama"]),
    &LanguageModel(["qwen2"]),
    &LanguageModel(["qwen3"]),
    &LanguageModel(["qwen2_moe"]),
    &LanguageModel(["qwen3_moe"]),
    &LanguageModel(["mixtral"]),
    &LanguageModel(["deepseek_v2"]),
    &LanguageModel(["deepseek_v3"]),
    &Glm4Moe,
    &LanguageModel(["gpt_oss"]),
];

/// Language model without encoders, for the architecture with this name.
#[derive(Debug)]
struct LanguageModel([&'static str; 1]);

impl FamilyBlocks for LanguageModel {
    fn id(&self) -> FamilyId {
        FamilyId::new(self.0[0])
    }

    fn model_types(&self) -> &[&str] {
        &self.0
    }
}

/// GLM-4.5 without encoders: experts as in DeepSeek-V3, and partially rotated heads.
#[derive(Debug)]
struct Glm4Moe;

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
