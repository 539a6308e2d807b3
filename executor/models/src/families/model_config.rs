//! Configuration of a complete model: modules, and the blocks in each stage.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use dflop_costmodel::ModelSpec;
use dflop_costmodel::config::PartialModelSpec;
use serde_json::Value;

use super::BlockFamilies;
use crate::block::{StageBlocks, TensorParallel, single_layers};
use crate::encoder::{EncoderConfig, FrozenEncoder};
use crate::error::{Error, Result};
use crate::llm::LlmConfig;
use crate::parameters::weights::{Checkpoint, ParameterSpec};
use dflop_device::{Cpu, Device};

/// Model module, which a pipeline divides into stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ModuleKind {
    /// Images and videos.
    Vision,
    /// Audio clips.
    Audio,
    /// The language model.
    Llm,
}

/// Frozen modules and parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct FrozenModules {
    /// Image encoder and projector.
    pub vision: FrozenEncoder,
    /// Audio encoder and projector.
    pub audio: FrozenEncoder,
    /// The language model.
    pub is_llm_frozen: bool,
}

/// Layer range in a module, for one stage.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StageRange {
    /// The module.
    pub module: ModuleKind,
    /// Transformer layers, including the blocks before the first and after the last layer.
    pub layers: Range<usize>,
}

/// Configurations for all modules in a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Image and video encoder.
    pub vision: Option<EncoderConfig>,
    /// Audio encoder.
    pub audio: Option<EncoderConfig>,
    /// The language model.
    pub llm: LlmConfig,
    /// Names of parameters that are not trained, also in modules that are.
    pub frozen: Arc<BTreeSet<String>>,
}

impl ModelConfig {
    /// Maximum number of transformer layers in a module, above every published model.
    pub const LAYERS_MAX: u32 = 10_000;

    /// Reads a model in a built-in family from a checkpoint `config.json`; [`BlockFamilies::model`] also
    /// supports added families.
    ///
    /// # Errors
    /// [`Error::CostModel`] or [`Error::ModelConfig`] if a field is invalid or not supported, or there are
    /// more than [`LAYERS_MAX`](Self::LAYERS_MAX) layers.
    pub fn from_config(document: &Value) -> Result<Self> {
        BlockFamilies::default().model(document)
    }

    /// Builds a model in a built-in family only from sizes, such as preset sizes; epsilons and activations
    /// have the family defaults. [`BlockFamilies::model_from_spec`] also supports added families.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] that names the family without blocks.
    pub fn from_spec(spec: &ModelSpec) -> Result<Self> {
        BlockFamilies::default().model_from_spec(spec)
    }

    fn encoder(&self, module: ModuleKind) -> Result<&EncoderConfig> {
        let encoder = if module == ModuleKind::Vision { &self.vision } else { &self.audio };
        encoder.as_ref().ok_or_else(|| Error::ModelConfig {
            field: "model_type".to_owned(),
            problem: format!("has no module {module:?}"),
        })
    }

    /// Returns the number of transformer layers in a module; 0 if the model does not have the module.
    #[must_use]
    pub fn layers(&self, module: ModuleKind) -> usize {
        match module {
            ModuleKind::Llm => self.llm.layers(),
            encoder => self.encoder(encoder).map_or(0, EncoderConfig::layers),
        }
    }

    /// Returns the row width in a stage output; 0 after the last language model layer.
    #[must_use]
    pub fn output_width(&self, range: &StageRange) -> usize {
        let is_last = range.layers.end == self.layers(range.module);
        match (range.module, is_last) {
            (ModuleKind::Llm, true) => 0,
            (ModuleKind::Llm, false) => self.llm.hidden(),
            (_, true) => self.llm.input_width(),
            (encoder, false) => self.encoder(encoder).map_or(0, |of| of.row_width(range.layers.end)),
        }
    }

    /// Returns the modules in the model, encoders first.
    #[must_use]
    pub fn modules(&self) -> Vec<ModuleKind> {
        let has = |module: &ModuleKind| self.layers(*module) > 0;
        [ModuleKind::Vision, ModuleKind::Audio, ModuleKind::Llm].into_iter().filter(has).collect()
    }

    /// Declares the blocks in a stage.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] if the model lacks the module or the layers, or if the group cannot share the
    /// module.
    pub fn stage_blocks<D: Device>(
        &self,
        range: &StageRange,
        frozen: FrozenModules,
        tensor: Option<Arc<TensorParallel<D>>>,
    ) -> Result<StageBlocks<D>> {
        let mut blocks = StageBlocks::new(tensor).freeze(Arc::clone(&self.frozen));
        let layers = range.layers.clone();
        match range.module {
            ModuleKind::Vision => {
                self.encoder(ModuleKind::Vision)?.add_to(layers, frozen.vision, &mut blocks)?;
            }
            ModuleKind::Audio => {
                self.encoder(ModuleKind::Audio)?.add_to(layers, frozen.audio, &mut blocks)?;
            }
            ModuleKind::Llm => {
                // declare missing layers in one piece, so that the error names the requested range
                let is_known = layers.end <= self.llm.layers();
                self.llm.check_first_stage(&layers)?;
                for layers in if is_known { single_layers(&layers) } else { vec![layers] } {
                    blocks.add(frozen.is_llm_frozen, |declaration| self.llm.blocks(layers, declaration))?;
                }
            }
        }
        Ok(blocks)
    }

    /// Checks that a tensor-parallel group with this degree can share a module.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] that names the mismatched field.
    pub fn check_tensor_parallel(&self, module: ModuleKind, degree: NonZeroUsize) -> Result<()> {
        match module {
            ModuleKind::Llm => self.llm.check_tensor_parallel(degree.get()),
            encoder => self.encoder(encoder)?.check_tensor_parallel(degree.get()),
        }
    }

    /// Returns whether anything before a stage is trained.
    #[must_use]
    pub fn is_input_trained(&self, range: &StageRange, frozen: FrozenModules) -> bool {
        if !self.frozen.is_empty() {
            return self.has_trained_before(range, frozen);
        }
        let is_trained = |encoder: FrozenEncoder| !(encoder.encoder && encoder.projector);
        match range.module {
            // pixels have no gradient, so only an earlier layer can make the input trained
            ModuleKind::Vision => range.layers.start > 0 && !frozen.vision.encoder,
            ModuleKind::Audio => range.layers.start > 0 && !frozen.audio.encoder,
            ModuleKind::Llm => {
                let is_vision_trained = self.vision.is_some() && is_trained(frozen.vision);
                let is_audio_trained = self.audio.is_some() && is_trained(frozen.audio);
                let is_llm_before = range.layers.start > 0 && !frozen.is_llm_frozen;
                is_vision_trained || is_audio_trained || is_llm_before
            }
        }
    }

    /// Returns whether a parameter before a stage is trained, by name.
    fn has_trained_before(&self, range: &StageRange, frozen: FrozenModules) -> bool {
        let encoders = [ModuleKind::Vision, ModuleKind::Audio].into_iter();
        let whole = |module| StageRange { module, layers: 0..self.layers(module) };
        let encoders = encoders.filter(|_| range.module == ModuleKind::Llm).map(whole);
        let same = StageRange { module: range.module, layers: 0..range.layers.start };
        encoders.chain([same]).filter(|before| !before.layers.is_empty()).any(|before| {
            let blocks: Result<StageBlocks<Cpu>> = self.stage_blocks(&before, frozen, None);
            blocks.is_ok_and(|blocks| blocks.is_trained())
        })
    }

    /// Returns the specifications for all model parameters.
    ///
    /// # Errors
    /// None for a configuration that was read successfully.
    pub fn parameters<D: Device>(&self) -> Result<Vec<ParameterSpec>> {
        let mut specs = Vec::new();
        for module in self.modules() {
            let range = StageRange { module, layers: 0..self.layers(module) };
            let blocks: StageBlocks<D> = self.stage_blocks(&range, FrozenModules::default(), None)?;
            specs.extend(blocks.into_declaration().into_specs());
        }
        Ok(specs)
    }

    /// Returns the prefixes of checkpoint tensors that the model does not use.
    #[must_use]
    pub fn ignored(&self) -> Vec<String> {
        let encoders = [&self.vision, &self.audio].into_iter().flatten();
        let mut ignored: Vec<String> = encoders.flat_map(|encoder| encoder.ignored().to_vec()).collect();
        ignored.extend(self.llm.ignored());
        ignored
    }

    /// Checks that a checkpoint has exactly the tensors in this model, with the same shapes.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::TensorShape`], [`Error::SurplusTensor`].
    pub fn check<D: Device>(&self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.check(&self.parameters::<D>()?, &self.ignored())
    }
}

impl BlockFamilies {
    /// Reads a model from a checkpoint `config.json`.
    ///
    /// # Errors
    /// [`Error::CostModel`] or [`Error::ModelConfig`] if a field is invalid or not supported, or there are
    /// more than [`ModelConfig::LAYERS_MAX`] layers.
    pub fn model(&self, document: &Value) -> Result<ModelConfig> {
        // the readers of the modules report what is wrong with other fields
        if let Ok(sizes) = self.read_sizes(document) {
            check_layers(&sizes)?;
        }
        let (vision, audio) = (self.vision(document)?, self.audio(document)?);
        checked(ModelConfig { vision, audio, llm: self.llm(document)?, frozen: Arc::default() })
    }

    /// Builds a model only from sizes; epsilons and activations have the family defaults.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] that names the family without blocks, or the heads that do not divide the
    /// module width.
    pub fn model_from_spec(&self, spec: &ModelSpec) -> Result<ModelConfig> {
        check_layers(&spec.clone().into())?;
        check_heads(spec)?;
        let (vision, audio) = (self.vision_from_spec(spec)?, self.audio_from_spec(spec)?);
        checked(ModelConfig { vision, audio, llm: self.llm_from_spec(spec)?, frozen: Arc::default() })
    }
}

/// Checks that every encoder outputs the rows that the first language model layers add.
fn checked(model: ModelConfig) -> Result<ModelConfig> {
    for encoder in [&model.vision, &model.audio].into_iter().flatten() {
        let (made, added) = (encoder.deepstack.len(), model.llm.deepstack);
        if made != added {
            let problem = format!("lists {added} deepstack layers, the encoder produces {made}");
            return Err(Error::ModelConfig { field: "deepstack_visual_indexes".to_owned(), problem });
        }
    }
    Ok(model)
}

/// Checks the number of layers in every module, before allocating per-layer memory.
fn check_layers(spec: &PartialModelSpec) -> Result<()> {
    let layers = [
        ("vision encoder", spec.vision.map(|vision| vision.encoder.layers)),
        ("audio encoder", spec.audio.map(|audio| audio.encoder.layers)),
        ("LLM", spec.llm.map(|llm| llm.layers)),
    ];
    for (module, layers) in layers {
        if let Some(layers) = layers.filter(|&layers| layers > ModelConfig::LAYERS_MAX) {
            let problem = format!("expected at most {}, found {layers} ({module})", ModelConfig::LAYERS_MAX);
            return Err(Error::ModelConfig { field: "num_hidden_layers".to_owned(), problem });
        }
    }
    Ok(())
}

/// Checks the sizes that blocks divide by, which configuration readers have already checked.
fn check_heads(spec: &ModelSpec) -> Result<()> {
    let heads = spec.encoders().map(|(module, encoder, _)| (module, encoder.hidden, encoder.heads));
    let llm = (dflop_costmodel::Module::Llm, spec.llm.heads, spec.llm.kv_heads);
    for (module, width, heads) in heads.chain([llm]) {
        if heads == 0 || !width.is_multiple_of(heads) {
            let problem = format!("= {heads} of {module} must divide {width}");
            return Err(Error::ModelConfig { field: "heads".to_owned(), problem });
        }
    }
    Ok(())
}
