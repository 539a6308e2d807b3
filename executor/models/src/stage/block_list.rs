//! Runs a block list forward and backward, and saves the buffers that the activation setting keeps.

use std::ops::Range;

use super::Activations;
use crate::block::{
    BackwardPass, Block, BlockOutput, ForwardPass, KeptRows, PassParameters, SavedActivations,
};
use crate::error::{Error, Result};
use crate::parameters::Parameters;
use dflop_device::{Device, Tensor};

/// Blocks in a stage, and the buffers that passes save and skip.
pub(super) struct BlockList<D: Device> {
    blocks: Vec<Box<dyn Block<D>>>,
    /// Whether a block, or anything before it, is trained.
    has_backward: Vec<bool>,
    /// Whether anything before a block is trained.
    needs_input: Vec<bool>,
    /// Index of the first parameter that was declared together with a block.
    first_parameters: Vec<usize>,
    is_input_trained: bool,
    activations: Activations,
}

impl<D: Device> BlockList<D> {
    /// Creates a block list.
    ///
    /// - `first_parameters`, `is_trained`: one per block
    pub(super) fn new(
        blocks: Vec<Box<dyn Block<D>>>,
        first_parameters: Vec<usize>,
        is_trained: &[bool],
        is_input_trained: bool,
        activations: Activations,
    ) -> Self {
        let mut is_reached = is_input_trained;
        let mut has_backward = Vec::with_capacity(blocks.len());
        let mut needs_input = Vec::with_capacity(blocks.len());
        for is_trained in is_trained {
            needs_input.push(is_reached);
            is_reached |= is_trained;
            has_backward.push(is_reached);
        }
        Self { blocks, has_backward, needs_input, first_parameters, is_input_trained, activations }
    }

    /// Returns whether a block, or anything before the blocks, is trained.
    pub(super) fn has_backward(&self) -> bool {
        self.has_backward.last().copied().unwrap_or(self.is_input_trained)
    }

    /// Returns whether a forward pass of the blocks has a backward pass to follow.
    pub(super) fn is_trained(&self) -> bool {
        self.has_backward.last().copied().unwrap_or(false)
    }

    /// Runs all blocks; returns the buffers that each block saves for the backward pass.
    pub(super) fn forward(
        &self,
        pass: &mut ForwardPass<'_, D>,
        mut input: Option<Tensor<D>>,
    ) -> Result<(BlockOutput<D>, Vec<SavedActivations<D>>)> {
        let mut all = Vec::with_capacity(self.blocks.len());
        for (index, block) in self.blocks.iter().enumerate() {
            let mut saved = SavedActivations::default();
            // Only now, so that gathers for later blocks overlap with this block.
            pass.parameters.wait_values(self.block_parameters(index, pass.parameters.specs().len()))?;
            let output = block.forward(pass, input.take(), &mut saved)?;
            if !self.has_backward[index] {
                saved = SavedActivations::default();
            } else if self.is_recomputed(index) {
                saved.keep_input_only();
            }
            all.push(saved);
            match output {
                BlockOutput::Rows(rows) => input = Some(rows),
                // only the last block in a model returns a loss
                loss @ BlockOutput::Loss(_) => return Ok((loss, all)),
            }
        }
        let problem = "is missing, a stage without blocks needs it".to_owned();
        let rows = input.ok_or(Error::Input { input: "rows of the stage before", problem })?;
        Ok((BlockOutput::Rows(rows), all))
    }

    /// Runs all blocks in reverse, down to the first trained block, and reports complete gradients.
    ///
    /// - returns the input gradient; `None` if nothing before the blocks is trained
    pub(super) fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        saved: Vec<SavedActivations<D>>,
        mut gradient: Option<Tensor<D>>,
        mut done: impl FnMut(&mut Parameters<D>, usize) -> Result<()>,
    ) -> Result<Option<Tensor<D>>> {
        for (index, mut saved) in saved.into_iter().enumerate().rev() {
            if !self.has_backward[index] {
                return Ok(None);
            }
            let block = &self.blocks[index];
            if self.is_recomputed(index) {
                let input = saved.take();
                let BackwardPass { device, context, tensor, .. } = *pass;
                let parameters = PassParameters::Read(pass.parameters);
                let mut again =
                    ForwardPass { device, parameters, context, tensor, kept: KeptRows::default() };
                block.forward(&mut again, Some(input), &mut saved)?;
            }
            gradient = block.backward(pass, gradient, &mut saved, self.needs_input[index])?;
            let first = self.first_parameters[index];
            // blocks that were declared together complete together
            if index == 0 || self.first_parameters[index - 1] != first {
                done(pass.parameters, first)?;
            }
        }
        Ok(if self.is_input_trained { gradient } else { None })
    }

    /// Computes logits for all rows; `None` if the last block has none.
    pub(super) fn logits(
        &self,
        pass: &mut ForwardPass<'_, D>,
        input: Option<Tensor<D>>,
    ) -> Result<Option<Tensor<D>>> {
        let Some((last, before)) = self.blocks.split_last() else { return Ok(None) };
        let mut rows = input;
        for block in before {
            if let BlockOutput::Rows(output) =
                block.forward(pass, rows.take(), &mut SavedActivations::default())?
            {
                rows = Some(output);
            }
        }
        rows.map_or(Ok(None), |rows| last.logits(pass, &rows))
    }

    /// Returns the indices of the parameters that were declared together with a block.
    ///
    /// - `all`: number of parameters in the stage
    fn block_parameters(&self, block: usize, all: usize) -> Range<usize> {
        let first = self.first_parameters[block];
        let next = self.first_parameters[block..].iter().find(|&&other| other > first);
        first..next.copied().unwrap_or(all)
    }

    fn is_recomputed(&self, block: usize) -> bool {
        self.activations == Activations::Recomputed && self.blocks[block].is_recomputable()
    }
}
