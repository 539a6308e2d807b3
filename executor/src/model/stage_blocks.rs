//! A stage before its parameters have values.

use std::ops::Range;
use std::sync::Arc;

use super::block::Block;
use super::parameters::Declaration;
use super::tensor_parallel::TensorParallel;
use crate::device::Device;
use crate::error::Result;
use crate::weights::TpRank;

/// Blocks with their parameters declared, before they get values.
pub struct StageBlocks<D: Device> {
    pub(crate) blocks: Vec<Box<dyn Block<D>>>,
    /// Whether a block has trained parameters.
    pub(crate) is_trained: Vec<bool>,
    /// First parameter of the blocks that were added together with a block.
    pub(crate) first_parameters: Vec<usize>,
    pub(crate) declaration: Declaration,
    pub(crate) tensor: Option<Arc<TensorParallel>>,
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
        let declaration = Declaration::of(tp_rank);
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
}

/// Cuts layers into single ones, so that each is declared, and its gradients are complete, by itself; a range without layers
/// stays as it is.
pub(crate) fn single_layers(layers: &Range<usize>) -> Vec<Range<usize>> {
    if layers.len() < 2 {
        return vec![layers.clone()];
    }
    layers.clone().map(|layer| layer..layer + 1).collect()
}
