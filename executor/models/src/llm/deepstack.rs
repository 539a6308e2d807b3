//! Adds rows from earlier encoder layers after each of the first decoder layers.
//!
//! The embedding keeps these rows for the blocks in this file, which follow the first layers; in backward,
//! the blocks keep the gradients for the embedding. All these blocks are in the first stage.

use crate::block::{BackwardPass, Block, BlockOutput, ForwardPass, SavedActivations, expect_rows};
use crate::error::Result;
use dflop_device::{Device, Tensor};

/// Adds kept rows to the media token rows.
#[derive(Debug)]
pub(super) struct AddKept {
    pub(super) hidden: usize,
}

impl<D: Device> Block<D> for AddKept {
    fn forward(
        &self,
        pass: &mut ForwardPass<'_, D>,
        input: Option<Tensor<D>>,
        _: &mut SavedActivations<D>,
    ) -> Result<BlockOutput<D>> {
        let mut x = expect_rows::<D>(input, pass.context.layers.rows, self.hidden)?;
        if let Some((media, _)) = &pass.context.inputs.text()?.media {
            let kept = pass.kept.pop()?;
            pass.device.gather_scatter(&media.forward, self.hidden, &kept, &mut x)?;
        }
        Ok(BlockOutput::Rows(x))
    }

    fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        gradient: Option<Tensor<D>>,
        _: &mut SavedActivations<D>,
        _is_input_needed: bool,
    ) -> Result<Option<Tensor<D>>> {
        let d = expect_rows::<D>(gradient, pass.context.layers.rows, self.hidden)?;
        if let Some((media, rows)) = &pass.context.inputs.text()?.media {
            let mut of_kept = pass.device.zeros(rows * self.hidden)?;
            pass.device.gather_scatter(&media.backward, self.hidden, &d, &mut of_kept)?;
            pass.kept.push(of_kept);
        }
        Ok(Some(d))
    }
}
