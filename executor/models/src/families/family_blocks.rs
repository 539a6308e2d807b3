//! Trait that every model family implements.

use std::fmt::Debug;

use dflop_costmodel::FamilyId;

use super::language_models;
use super::source::{BlockSource, missing};
use crate::encoder::EncoderConfig;
use crate::error::Result;
use crate::llm::LlmConfig;

/// Model family: builds encoder and decoder blocks, with the checkpoint tensor names.
///
/// Implement this trait for a family outside this crate and pass the family to
/// [`BlockFamilies::with`](super::BlockFamilies::with).
pub trait FamilyBlocks: Debug + Send + Sync {
    /// Returns the id used in all modules of the family.
    fn id(&self) -> FamilyId;

    /// Returns the `model_type` values in checkpoints with these tensor names.
    fn model_types(&self) -> &[&str];

    /// Builds the image encoder. Default: the family has none.
    ///
    /// # Errors
    /// [`Error::ModelConfig`](crate::Error::ModelConfig) or
    /// [`Error::CostModel`](crate::Error::CostModel) if a field is invalid or not supported.
    fn vision(&self, source: &BlockSource<'_>) -> Result<EncoderConfig> {
        let _ = source;
        Err(missing("image encoder"))
    }

    /// Builds the audio encoder. Default: the family has none.
    ///
    /// # Errors
    /// As [`vision`](Self::vision).
    fn audio(&self, source: &BlockSource<'_>) -> Result<EncoderConfig> {
        let _ = source;
        Err(missing("audio encoder"))
    }

    /// Builds the decoder. Default: a Llama or a Qwen2 with the names in language model checkpoints.
    ///
    /// # Errors
    /// As [`vision`](Self::vision).
    fn llm(&self, source: &BlockSource<'_>) -> Result<LlmConfig> {
        language_models::alone(source)
    }
}
