//! A stage before its parameters have values.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Stage, StageOptions};
use crate::device::Device;
use crate::error::Result;
use crate::model::Block;
use crate::model::parameters::{Declaration, Parameters};
use crate::model::shard::TpRank;
use crate::model::tensor_parallel::TensorParallel;
use crate::weights::WeightSource;

/// Blocks with their parameters declared, before they get values.
pub struct StageBlocks<D: Device> {
    blocks: Vec<Box<dyn Block<D>>>,
    /// Whether a block has trained parameters.
    is_trained: Vec<bool>,
    /// First parameter of the blocks that were added together with a block.
    first_parameters: Vec<usize>,
    declaration: Declaration,
    tensor: Option<Arc<TensorParallel>>,
}

impl<D: Device> Default for StageBlocks<D> {
    fn default() -> Self {
        Self::new(None)
    }
}

impl<D: Device> StageBlocks<D> {
    /// Begins without blocks; of the parameters of those to come, a rank of a group declares its part.
    #[must_use]
    pub fn new(tensor: Option<Arc<TensorParallel>>) -> Self {
        let tensor = tensor.filter(|tensor| tensor.tp_rank().size > 1);
        let tp_rank = tensor.as_ref().map_or(TpRank::ALONE, |tensor| tensor.tp_rank());
        let declaration = Declaration::of(place);
        Self { blocks: Vec::new(), is_trained: Vec::new(), first_parameters: Vec::new(), declaration, tensor }
    }

    /// Returns whose blocks these are.
    #[must_use]
    pub fn tp_rank(&self) -> TpRank {
        self.declaration.tp_rank()
    }

    /// Adds blocks, with their parameters trained or frozen.
    pub fn add(
        &mut self,
        is_frozen: bool,
        declare: impl FnOnce(&mut Declaration) -> Result<Vec<Box<dyn Block<D>>>>,
    ) -> Result<()> {
        self.declaration.freeze(is_frozen);
        let start = self.declaration.len();
        let blocks = declare(&mut self.declaration)?;
        let is_trained = self.declaration.has_trained_since(start);
        // Blocks of one call are trained or frozen together.
        self.is_trained.extend(std::iter::repeat_n(is_trained, blocks.len()));
        self.first_parameters.extend(std::iter::repeat_n(start, blocks.len()));
        self.blocks.extend(blocks);
        Ok(())
    }

    /// Returns whether a block has trained parameters.
    #[must_use]
    pub fn is_trained(&self) -> bool {
        self.is_trained.contains(&true)
    }

    /// Returns the parameters declared so far.
    #[must_use]
    pub fn into_declaration(self) -> Declaration {
        self.declaration
    }

    /// Gives parameters their values.
    ///
    /// # Errors
    /// Those of the source: a tensor that is missing or has another shape; [`crate::Error::OutOfMemory`].
    pub fn build(self, device: D, options: StageOptions, source: &dyn WeightSource) -> Result<Stage<D>> {
        let parameters = Parameters::new(&device, self.declaration.into_specs(), source)?;
        let mut is_reached = options.is_input_trained;
        let mut has_backward = Vec::with_capacity(self.blocks.len());
        let mut needs_input = Vec::with_capacity(self.blocks.len());
        for is_trained in self.is_trained {
            needs_input.push(is_reached);
            is_reached |= is_trained;
            has_backward.push(is_reached);
        }
        Ok(Stage {
            device,
            options,
            blocks: self.blocks,
            has_backward,
            needs_input,
            first_parameters: self.first_parameters,
            parameters,
            in_flight: BTreeMap::new(),
            tensor: self.tensor,
        })
    }
}
