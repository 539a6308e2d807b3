//! Language models, separate or as a multimodal model's `text_config`: a table of architectures.
//!
//! [`architecture`] has the fields and defaults for an architecture, [`dense`] and [`sparse`] list the known
//! architectures, and [`experts`] and [`windows`] read optional features.

mod architecture;
mod dense;
mod experts;
mod sparse;
mod windows;

use self::architecture::Architecture;
use super::DESCRIBE;
use crate::error::Result;
use crate::model::config::{CheckpointFields, ConfigFields, PartialModelSpec};
use crate::model::{FamilyId, LlmSpec, ModelFamily};
pub(super) use dense::{
    LLAMA3_8B, LLAMA3_70B, QWEN_7B, QWEN2_5_3B, QWEN2_5_7B, QWEN2_5_32B, QWEN2_5_72B, QWEN3_8B,
    QWEN3_30B_A3B, QWEN3_32B, QWEN3_235B_A22B, TINY_LLM, llama,
};

/// Language model without encoders, in the architecture with this name.
#[derive(Debug)]
pub(super) struct LanguageModel([&'static str; 1]);

impl ModelFamily for LanguageModel {
    fn id(&self) -> FamilyId {
        FamilyId::new(self.0[0])
    }

    fn model_types(&self) -> &[&str] {
        &self.0
    }

    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec> {
        let llm = text_config(&files.config, "")?;
        Ok(PartialModelSpec { family: self.id(), llm: Some(llm), ..PartialModelSpec::default() })
    }
}

/// Language models in all known architectures.
pub(super) static ALL: [LanguageModel; dense::ARCHITECTURES.len() + sparse::ARCHITECTURES.len()] = {
    let mut all = [const { LanguageModel([""]) }; dense::ARCHITECTURES.len() + sparse::ARCHITECTURES.len()];
    let mut at = 0;
    while at < all.len() {
        let dense = dense::ARCHITECTURES.len();
        let known = if at < dense { &dense::ARCHITECTURES[at] } else { &sparse::ARCHITECTURES[at - dense] };
        all[at] = LanguageModel([known.name]);
        at += 1;
    }
    all
};

impl LlmSpec {
    /// Reads a language model from its own `config.json` or from a `text_config`, as a family does for the
    /// decoder inside its checkpoints; a missing `model_type` is `default_type`, such as `"qwen2"`.
    ///
    /// # Errors
    /// [`Error::Configuration`](crate::Error::Configuration) if a field is invalid or the `model_type` is not
    /// a known language model.
    pub fn from_fields(fields: &ConfigFields<'_>, default_type: &str) -> Result<Self> {
        text_config(fields, default_type)
    }
}

/// Reads a language model from some fields; `model_type` defaults to `default_type`.
pub(super) fn text_config(fields: &ConfigFields<'_>, default_type: &str) -> Result<LlmSpec> {
    let model_type = fields.text("model_type")?.unwrap_or(default_type);
    let Some(architecture) = architectures().find(|known| known.name == model_type) else {
        let known = architectures().map(|known| known.name).collect::<Vec<_>>().join(", ");
        let problem =
            format!("= \"{model_type}\" is not a known language model: {DESCRIBE}; known are {known}");
        return Err(fields.invalid("model_type", problem));
    };
    architecture.read(fields)
}

/// Reads the language model of a model of the LLaVA kind, whose embeddings are tied if either of two files'
/// parts states it.
pub(super) fn language_model(config: &ConfigFields<'_>, default_type: &str) -> Result<LlmSpec> {
    let mut llm = LlmSpec::from_fields(&config.child_or_empty("text_config")?, default_type)?;
    llm.details.has_tied_embeddings |= config.flag("tie_word_embeddings", false)?;
    Ok(llm)
}

/// Reads the language model of Qwen2-VL and Qwen2.5-VL, whose fields are at the top in older files.
pub(super) fn qwen_vl(config: &ConfigFields<'_>, text_type: &'static str) -> Result<LlmSpec> {
    match config.child("text_config")? {
        Some(text) => text_config(&text, text_type),
        None => Architecture { name: text_type, ..dense::QWEN2_VL }.read(config),
    }
}

/// Reads a Qwen3 model whose `model_type` is an alternative name.
pub(super) fn qwen3_named(fields: &ConfigFields<'_>, name: &str) -> Result<LlmSpec> {
    let found = fields.text("model_type")?.unwrap_or(name);
    if found != name && found != dense::QWEN3.name {
        let problem = format!("must be \"{name}\" or \"{}\", found \"{found}\"", dense::QWEN3.name);
        return Err(fields.invalid("model_type", problem));
    }
    dense::QWEN3.read(fields)
}

fn architectures() -> impl Iterator<Item = &'static Architecture> {
    dense::ARCHITECTURES.iter().chain(&sparse::ARCHITECTURES)
}

#[cfg(test)]
mod tests;
