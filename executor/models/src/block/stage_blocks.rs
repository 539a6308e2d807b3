//! Stage blocks, before parameters have values.

use std::ops::Range;
use std::sync::Arc;

use super::Block;
use super::tensor_parallel::TensorParallel;
use crate::error::Result;
use crate::parameters::Declaration;
use crate::parameters::weights::TpRank;
use dflop_device::Device;

/// Blocks with declared parameters that have no values yet.
pub struct StageBlocks<D: Device> {
    pub(crate) blocks: Vec<Box<dyn Block<D>>>,
    /// Whether a block has trained parameters.
    pub(crate) is_trained: Vec<bool>,
    /// Index of the first parameter that was declared together with a block.
    pub(crate) first_parameters: Vec<usize>,
    pub(crate) declaration: Declaration,
    pub(crate) tensor: Option<Arc<TensorParallel<D>>>,
}

impl<D: Device> Default for StageBlocks<D> {
    fn default() -> Self {
        Self::new(None)
    }
}

impl<D: Device> StageBlocks<D> {
    /// Starts without blocks; a tensor-parallel rank declares its part of the parameters.
    #[must_use]
    pub fn new(tensor: Option<Arc<TensorParallel<D>>>) -> Self {
        // a group with a single rank needs no sums
        let tensor = tensor.filter(|tensor| tensor.tp_rank().size > 1);
        let tp_rank = tensor.as_ref().map_or(TpRank::ALONE, |tensor| tensor.tp_rank());
        let declaration = Declaration::for_rank(tp_rank);
        Self { blocks: Vec::new(), is_trained: Vec::new(), first_parameters: Vec::new(), declaration, tensor }
    }

    /// Returns the rank whose part of the blocks is declared.
    #[must_use]
    pub fn tp_rank(&self) -> TpRank {
        self.declaration.tp_rank()
    }

    /// Adds blocks, with trained or frozen parameters.
    pub fn add(
        &mut self,
        is_frozen: bool,
        declare: impl FnOnce(&mut Declaration) -> Result<Vec<Box<dyn Block<D>>>>,
    ) -> Result<()> {
        self.declaration.freeze(is_frozen);
        // first parameter of this call: backward reports gradients as complete from here on
        let start = self.declaration.len();
        let blocks = declare(&mut self.declaration)?;
        let is_trained = self.declaration.has_trained_since(start);
        // blocks from the same call are trained or frozen together
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

    /// Returns the declaration with all parameters.
    #[must_use]
    pub fn into_declaration(self) -> Declaration {
        self.declaration
    }
}

/// Splits a range into single layers, each of which is declared and completes gradients separately. An empty
/// range is returned unchanged.
pub(crate) fn single_layers(layers: &Range<usize>) -> Vec<Range<usize>> {
    if layers.len() < 2 {
        return vec![layers.clone()];
    }
    layers.clone().map(|layer| layer..layer + 1).collect()
}
