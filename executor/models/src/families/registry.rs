//! Finds the family for a checkpoint or a model spec, among built-in and user-defined families.

use std::sync::Arc;

use dflop_costmodel::config::{CONFIG_FILE, ConfigFields, Documents, PartialModelSpec};
use dflop_costmodel::model::description::Description;
use dflop_costmodel::{FamilyId, ModelFamilies, ModelSpec};
use serde_json::Value;

use super::{BUILT_IN, BlockSource, FamilyBlocks, language_models};
use crate::encoder::EncoderConfig;
use crate::error::{Error, Result};
use crate::llm::LlmConfig;

/// Model families by `model_type` and by [`FamilyId`]: built-in and user-defined.
#[derive(Debug, Clone, Default)]
pub struct BlockFamilies {
    own: Vec<Arc<dyn FamilyBlocks>>,
    sizes: ModelFamilies,
}

impl BlockFamilies {
    /// Adds a family; for duplicate names, the family added last has precedence.
    #[must_use]
    pub fn with(mut self, family: impl FamilyBlocks + 'static) -> Self {
        self.own.insert(0, Arc::new(family));
        self
    }

    /// Sets the families that read sizes. Default: the built-in families.
    #[must_use]
    pub fn sizes(mut self, families: ModelFamilies) -> Self {
        self.sizes = families;
        self
    }

    /// Returns the family with an id.
    #[must_use]
    pub fn get(&self, id: FamilyId) -> Option<&dyn FamilyBlocks> {
        self.iter().find(|family| family.id() == id)
    }

    /// Reads checkpoint sizes.
    ///
    /// # Errors
    /// [`Error::CostModel`](crate::Error::CostModel) if a field is invalid.
    pub fn read_sizes(&self, document: &Value) -> Result<PartialModelSpec> {
        Ok(self.sizes.read(&Documents { config: document.clone(), ..Documents::default() })?)
    }

    /// Reads the image encoder from a checkpoint configuration, if the model has one.
    ///
    /// # Errors
    /// [`Error::ModelConfig`](crate::Error::ModelConfig) or
    /// [`Error::CostModel`](crate::Error::CostModel) if a field is invalid, or the `model_type` has an image
    /// encoder that is not supported.
    pub fn vision(&self, document: &Value) -> Result<Option<EncoderConfig>> {
        let spec = self.read_sizes(document);
        if spec.as_ref().is_ok_and(|spec| spec.vision.is_none()) {
            return Ok(None);
        }
        let (family, config) = self.document_family(document)?;
        family.vision(&BlockSource { spec: spec?, config: Some(config) }).map(Some)
    }

    /// Reads the audio encoder from a checkpoint configuration, if the model has one.
    ///
    /// # Errors
    /// As [`vision`](Self::vision).
    pub fn audio(&self, document: &Value) -> Result<Option<EncoderConfig>> {
        let spec = self.read_sizes(document);
        if spec.as_ref().is_ok_and(|spec| spec.audio.is_none()) {
            return Ok(None);
        }
        let (family, config) = self.document_family(document)?;
        family.audio(&BlockSource { spec: spec?, config: Some(config) }).map(Some)
    }

    /// Reads the decoder from a checkpoint configuration.
    ///
    /// # Errors
    /// [`Error::ModelConfig`](crate::Error::ModelConfig) or [`Error::CostModel`](crate::Error::CostModel) if
    /// a field is invalid, or the `model_type` is not supported or is not a language model.
    pub fn llm(&self, document: &Value) -> Result<LlmConfig> {
        let spec = self.read_sizes(document)?;
        let (family, config) = self.document_family(document)?;
        let source = BlockSource { spec, config: Some(config) };
        source.llm()?;
        family.llm(&source)
    }

    /// Builds the image encoder of a model only from sizes, if the model has one.
    ///
    /// # Errors
    /// [`Error::ModelConfig`](crate::Error::ModelConfig) if no family has the encoder id.
    pub fn vision_from_spec(&self, model: &ModelSpec) -> Result<Option<EncoderConfig>> {
        let Some(vision) = &model.vision else { return Ok(None) };
        self.known(vision.family)?.vision(&source_from_sizes(model)).map(Some)
    }

    /// Builds the audio encoder of a model only from sizes, if the model has one.
    ///
    /// # Errors
    /// [`Error::ModelConfig`](crate::Error::ModelConfig) if no family has the encoder id.
    pub fn audio_from_spec(&self, model: &ModelSpec) -> Result<Option<EncoderConfig>> {
        let Some(audio) = &model.audio else { return Ok(None) };
        self.known(audio.family)?.audio(&source_from_sizes(model)).map(Some)
    }

    /// Builds the decoder of a model only from sizes; a family without blocks gets a Llama decoder.
    ///
    /// # Errors
    /// [`Error::ModelConfig`](crate::Error::ModelConfig) if the sizes are not supported.
    pub fn llm_from_spec(&self, model: &ModelSpec) -> Result<LlmConfig> {
        let source = source_from_sizes(model);
        self.get(model.family).map_or_else(|| language_models::alone(&source), |family| family.llm(&source))
    }

    fn iter(&self) -> impl Iterator<Item = &dyn FamilyBlocks> {
        let built_in = BUILT_IN.iter().copied().flatten().copied();
        self.own.iter().map(|family| &**family).chain(built_in)
    }

    fn known(&self, id: FamilyId) -> Result<&dyn FamilyBlocks> {
        self.get(id).ok_or_else(|| {
            let known: Vec<String> = self.iter().map(|family| family.id().to_string()).collect();
            let problem = format!("`{id}` has no blocks, known are {}", known.join(", "));
            Error::ModelConfig { field: "family".to_owned(), problem }
        })
    }

    /// Returns the family of a checkpoint, and the fields in `config.json`.
    fn document_family<'a>(&self, document: &'a Value) -> Result<(&dyn FamilyBlocks, ConfigFields<'a>)> {
        let config = ConfigFields::new(CONFIG_FILE, document)?;
        if Description::is_format(document) {
            let problem = "is a description, which has counts and no blocks: training needs a `config.json`";
            return Err(config.invalid("format", problem).into());
        }
        let model_type = config.text("model_type")?.unwrap_or_default();
        let Some(family) = self.iter().find(|family| family.model_types().contains(&model_type)) else {
            let known: Vec<&str> = self.iter().flat_map(FamilyBlocks::model_types).copied().collect();
            let problem = format!("= \"{model_type}\" is not supported, known are {}", known.join(", "));
            return Err(config.invalid("model_type", problem).into());
        };
        Ok((family, config))
    }
}

fn source_from_sizes(model: &ModelSpec) -> BlockSource<'static> {
    BlockSource { spec: model.clone().into(), config: None }
}

impl EncoderConfig {
    /// Reads the image encoder in a built-in family, if any: LLaVA-OneVision, InternVL, Qwen2-VL or
    /// Qwen2.5-VL, or a separate CLIP or SigLIP. [`BlockFamilies::vision`] also supports added families.
    ///
    /// # Errors
    /// [`Error::ModelConfig`](crate::Error::ModelConfig) or
    /// [`Error::CostModel`](crate::Error::CostModel) if a field is invalid or not supported.
    pub fn vision(document: &Value) -> Result<Option<Self>> {
        BlockFamilies::default().vision(document)
    }

    /// Reads the audio encoder in a built-in family, if any: Qwen2-Audio. [`BlockFamilies::audio`] also
    /// supports added families.
    ///
    /// # Errors
    /// [`Error::ModelConfig`](crate::Error::ModelConfig) or
    /// [`Error::CostModel`](crate::Error::CostModel) if a field is invalid or not supported.
    pub fn audio(document: &Value) -> Result<Option<Self>> {
        BlockFamilies::default().audio(document)
    }
}

impl LlmConfig {
    /// Reads the decoder in a built-in family from a checkpoint `config.json`. [`BlockFamilies::llm`] also
    /// supports added families.
    ///
    /// # Errors
    /// [`Error::ModelConfig`](crate::Error::ModelConfig) or
    /// [`Error::CostModel`](crate::Error::CostModel) if a field is invalid or not supported.
    pub fn from_config(document: &Value) -> Result<Self> {
        BlockFamilies::default().llm(document)
    }
}
