//! Builds the stages of a model from its configuration.

use std::sync::Arc;

use super::{Activations, Stage, StageOptions};
use crate::error::Result;
use crate::model_config::{FrozenModules, ModelConfig, StageRange};
use crate::tensor_parallel::TensorParallel;
use crate::weights::WeightSource;
use dflop_device::Device;

/// Options of a stage that do not depend on the model.
#[derive(Debug, Clone, Default)]
pub struct StageSettings {
    /// Activations that are kept per layer.
    pub activations: Activations,
    /// Ranks that share the layers of the stage; `None` if this rank has all of them.
    pub tensor_parallel: Option<Arc<TensorParallel>>,
}

impl ModelConfig {
    /// Builds a stage.
    ///
    /// # Errors
    /// [`Error::ModelConfig`](crate::Error::ModelConfig) if the model has no such layers, and the errors of
    /// the source.
    pub fn stage<D: Device>(
        &self,
        device: &D,
        range: &StageRange,
        frozen: FrozenModules,
        activations: Activations,
        source: &dyn WeightSource,
    ) -> Result<Stage<D>> {
        let settings = StageSettings { activations, tensor_parallel: None };
        self.stage_with(device, range, frozen, settings, source)
    }

    /// Builds a stage, or a rank's part of one.
    ///
    /// # Errors
    /// The errors of [`ModelConfig::stage`]; [`Error::ModelConfig`](crate::Error::ModelConfig) if the ranks
    /// cannot share the stage.
    pub fn stage_with<D: Device>(
        &self,
        device: &D,
        range: &StageRange,
        frozen: FrozenModules,
        settings: StageSettings,
        source: &dyn WeightSource,
    ) -> Result<Stage<D>> {
        let StageSettings { activations, tensor_parallel } = settings;
        let StageRange { module, layers } = range;
        let options = StageOptions {
            name: format!("{module:?} {}..{}", layers.start, layers.end),
            activations,
            is_input_trained: self.is_input_trained(range, frozen),
        };
        let blocks = self.stage_blocks(range, frozen, tensor_parallel)?;
        Stage::new(device.clone(), options, blocks, source)
    }
}
