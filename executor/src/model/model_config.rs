//! A whole model: its modules, and the stages that they are cut into.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use serde_json::Value;

use super::encoder::{EncoderConfig, FrozenEncoder};
use super::llm::LlmConfig;
use super::stage_blocks::{StageBlocks, single_layers};
use super::tensor_parallel::TensorParallel;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::weights::{Checkpoint, ParameterSpec};

/// A module of a model, which a pipeline cuts into stages by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ModuleKind {
    /// Images and videos.
    Vision,
    /// Audio.
    Audio,
    /// The language model.
    Llm,
}

/// Which modules are not trained.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct FrozenModules {
    /// The encoder of images and its projector.
    pub vision: FrozenEncoder,
    /// The encoder of audio and its projector.
    pub audio: FrozenEncoder,
    /// The language model.
    pub is_llm_frozen: bool,
}

/// A stage of a module.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StageRange {
    /// The module.
    pub module: ModuleKind,
    /// Its transformer layers; what stands before the first and behind the last comes with them.
    pub layers: Range<usize>,
}

/// What a checkpoint is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Encoder of images and videos.
    pub vision: Option<EncoderConfig>,
    /// Encoder of audio.
    pub audio: Option<EncoderConfig>,
    /// The language model.
    pub llm: LlmConfig,
}

impl ModelConfig {
    /// Reads the `config.json` of a checkpoint.
    ///
    /// # Errors
    /// [`Error::Model`] or [`Error::ModelConfig`] if a field makes no sense or has no counterpart here.
    pub fn from_config(document: &Value) -> Result<Self> {
        Ok(Self {
            vision: EncoderConfig::vision(document)?,
            audio: EncoderConfig::audio(document)?,
            llm: LlmConfig::from_config(document)?,
        })
    }

    fn encoder(&self, module: ModuleKind) -> Result<&EncoderConfig> {
        let encoder = if module == ModuleKind::Vision { &self.vision } else { &self.audio };
        encoder.as_ref().ok_or_else(|| Error::ModelConfig {
            field: "model_type".to_owned(),
            problem: format!("has no module {module:?}"),
        })
    }

    /// Returns the transformer layers of a module, 0 of one that the model does not have.
    #[must_use]
    pub fn layers(&self, module: ModuleKind) -> usize {
        match module {
            ModuleKind::Llm => self.llm.layers(),
            encoder => self.encoder(encoder).map_or(0, EncoderConfig::layers),
        }
    }

    /// Returns the modules, encoders first.
    #[must_use]
    pub fn modules(&self) -> Vec<ModuleKind> {
        let has = |module: &ModuleKind| self.layers(*module) > 0;
        [ModuleKind::Vision, ModuleKind::Audio, ModuleKind::Llm].into_iter().filter(has).collect()
    }

    /// Declares the blocks of a stage.
    pub(crate) fn stage_blocks<D: Device>(
        &self,
        range: &StageRange,
        frozen: FrozenModules,
        tensor: Option<Arc<TensorParallel>>,
    ) -> Result<StageBlocks<D>> {
        let mut blocks = StageBlocks::new(tensor);
        let layers = range.layers.clone();
        match range.module {
            ModuleKind::Vision => {
                self.encoder(ModuleKind::Vision)?.add_to(layers, frozen.vision, &mut blocks)?;
            }
            ModuleKind::Audio => {
                self.encoder(ModuleKind::Audio)?.add_to(layers, frozen.audio, &mut blocks)?;
            }
            ModuleKind::Llm => {
                // Layers that do not exist are refused in one piece.
                let is_known = layers.end <= self.llm.layers();
                for layers in if is_known { single_layers(&layers) } else { vec![layers] } {
                    blocks.add(frozen.is_llm_frozen, |declaration| self.llm.blocks(layers, declaration))?;
                }
            }
        }
        Ok(blocks)
    }

    /// Checks that a tensor-parallel group of this degree can share a module.
    ///
    /// # Errors
    /// [`Error::ModelConfig`] that names the field which does not fit.
    pub fn check_tensor_parallel(&self, module: ModuleKind, degree: NonZeroUsize) -> Result<()> {
        match module {
            ModuleKind::Llm => self.llm.check_tensor_parallel(degree.get()),
            encoder => self.encoder(encoder)?.check_tensor_parallel(degree.get()),
        }
    }

    /// Whether something is trained before a stage.
    pub(crate) fn is_input_trained(&self, range: &StageRange, frozen: FrozenModules) -> bool {
        let is_trained = |encoder: FrozenEncoder| !(encoder.encoder && encoder.projector);
        match range.module {
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

    /// Returns the parameters of the whole model.
    ///
    /// # Errors
    /// None that a model which was read can have.
    pub fn parameters<D: Device>(&self) -> Result<Vec<ParameterSpec>> {
        let mut specs = Vec::new();
        for module in self.modules() {
            let range = StageRange { module, layers: 0..self.layers(module) };
            let blocks: StageBlocks<D> = self.stage_blocks(&range, FrozenModules::default(), None)?;
            specs.extend(blocks.into_declaration().into_specs());
        }
        Ok(specs)
    }

    /// Returns prefixes of tensors of checkpoints that nothing here reads.
    #[must_use]
    pub fn ignored(&self) -> Vec<String> {
        let encoders = [&self.vision, &self.audio].into_iter().flatten();
        let mut ignored: Vec<String> = encoders.flat_map(|encoder| encoder.ignored().to_vec()).collect();
        ignored.extend(self.llm.ignored());
        ignored
    }

    /// Checks that a checkpoint has the tensors of this model in their shapes, and no others.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::TensorShape`], [`Error::SurplusTensor`].
    pub fn check<D: Device>(&self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.check(&self.parameters::<D>()?, &self.ignored())
    }
}
