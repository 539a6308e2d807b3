//! Sizes and fields from which a family builds its blocks.

use dflop_costmodel::config::{CONFIG_FILE, ConfigFields, PartialModelSpec};
use dflop_costmodel::model::{AudioSpec, LlmSpec, VisionSpec};

use crate::error::{Error, Result};

/// Model sizes and, for a checkpoint, `config.json`.
///
/// Sizes come from the cost model. The fields are the ones that change results but no cost: epsilons,
/// activations, rotation frequencies. Without a checkpoint they have the family defaults.
#[derive(Debug, Clone)]
pub struct BlockSource<'a> {
    /// Module sizes.
    pub spec: PartialModelSpec,
    /// `config.json`; `None` for a model that is built only from sizes.
    pub config: Option<ConfigFields<'a>>,
}

impl<'a> BlockSource<'a> {
    /// Returns the fields in `config.json`; empty without a checkpoint.
    #[must_use]
    pub fn fields(&self) -> ConfigFields<'a> {
        self.config.clone().unwrap_or_else(|| ConfigFields::empty(CONFIG_FILE))
    }

    /// Returns the vision encoder.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] if there is none.
    pub fn vision(&self) -> Result<VisionSpec> {
        self.spec.vision.ok_or_else(|| missing("image encoder"))
    }

    /// Returns the audio encoder.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] if there is none.
    pub fn audio(&self) -> Result<AudioSpec> {
        self.spec.audio.ok_or_else(|| missing("audio encoder"))
    }

    /// Returns the language model.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] if there is none.
    pub fn llm(&self) -> Result<LlmSpec> {
        if let (None, Some(config)) = (self.spec.llm, &self.config) {
            let model_type = config.text("model_type")?.unwrap_or_default();
            let problem = format!("= \"{model_type}\" is not a language model");
            return Err(Error::ModelConfig { field: "model_type".to_owned(), problem });
        }
        self.spec.llm.ok_or_else(|| missing("language model"))
    }
}

/// Returns the error for a module that the model does not have.
pub(super) fn missing(module: &str) -> Error {
    Error::ModelConfig { field: "model_type".to_owned(), problem: format!("has no {module}") }
}
