//! Builds model stages from the model configuration.

use std::sync::Arc;

use super::{Activations, BlockStage, StageOptions};
use crate::block::TensorParallel;
use crate::error::Result;
use crate::families::{FrozenModules, ModelConfig, StageRange};
use crate::parameters::BUCKET_ELEMENTS;
use crate::parameters::weights::WeightSource;
use dflop_device::Device;

/// Stage options that do not depend on the model.
#[derive(Debug, Clone)]
pub struct StageSettings<D: Device> {
    /// Activations that are kept per layer.
    pub activations: Activations,
    /// Ranks that share the stage layers; `None` if this rank has complete layers.
    pub tensor_parallel: Option<Arc<TensorParallel<D>>>,
    /// Gradient bucket size in elements; buckets are summed over replicas in one collective, and a larger
    /// parameter has a separate bucket. Must be the same on all ranks.
    pub bucket_elements: usize,
}

impl<D: Device> Default for StageSettings<D> {
    /// Stores all activations, has complete layers on this rank, and uses [`BUCKET_ELEMENTS`].
    fn default() -> Self {
        let activations = Activations::default();
        Self { activations, tensor_parallel: None, bucket_elements: BUCKET_ELEMENTS }
    }
}

impl ModelConfig {
    /// Builds a stage.
    ///
    /// # Errors
    /// [`Error::ModelConfig`](crate::Error::ModelConfig) if the model has no such layers, and errors from the
    /// source.
    pub fn stage<D: Device>(
        &self,
        device: &D,
        range: &StageRange,
        frozen: FrozenModules,
        activations: Activations,
        source: &dyn WeightSource,
    ) -> Result<BlockStage<D>> {
        let settings = StageSettings { activations, ..StageSettings::default() };
        self.stage_with(device, range, frozen, settings, source)
    }

    /// Builds a stage, or the part of a stage on this rank.
    ///
    /// # Errors
    /// The errors in [`ModelConfig::stage`]; [`Error::ModelConfig`](crate::Error::ModelConfig) if the ranks
    /// cannot share the stage.
    pub fn stage_with<D: Device>(
        &self,
        device: &D,
        range: &StageRange,
        frozen: FrozenModules,
        settings: StageSettings<D>,
        source: &dyn WeightSource,
    ) -> Result<BlockStage<D>> {
        let StageSettings { activations, tensor_parallel, bucket_elements } = settings;
        let StageRange { module, layers } = range;
        let options = StageOptions {
            name: format!("{module:?} {}..{}", layers.start, layers.end),
            activations,
            is_input_trained: self.is_input_trained(range, frozen),
            bucket_elements,
        };
        let blocks = self.stage_blocks(range, frozen, tensor_parallel)?;
        BlockStage::new(device.clone(), options, blocks, source)
    }
}
