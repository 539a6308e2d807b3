//! First decoder block: looks up token ids and inserts encoder tokens.
//!
//! Each tensor-parallel rank looks up its vocabulary shard. A row comes from a single rank, and all remaining
//! ranks have zeros, so the sum over ranks has the same bits as the row on that rank.

use super::vocabulary::Vocabulary;
use crate::block::{
    BackwardPass, Block, BlockOutput, ForwardPass, SavedActivations, expect_rows, join_columns,
    split_columns, tensor_parallel,
};
use crate::error::Result;
use crate::parameters::Declaration;
use crate::parameters::weights::{Init, ParameterId};
use dflop_device::SparseBuffers;
use dflop_device::{Device, Tensor};

/// Token embedding. The input is the encoder tokens, `[media tokens, hidden]`, or none in a microbatch
/// without media. With `deepstack` further projectors in the encoder, a token has as many further parts,
/// which are kept for the first layers.
#[derive(Debug)]
pub struct Embedding {
    table: ParameterId,
    vocabulary: Vocabulary,
    hidden: usize,
    deepstack: usize,
}

impl Embedding {
    /// Declares the table.
    pub fn declare(
        declaration: &mut Declaration,
        name: &str,
        [vocabulary, hidden]: [usize; 2],
        init: Init,
        deepstack: usize,
    ) -> Self {
        let tp_rank = declaration.tp_rank();
        let cut = (0, &Vocabulary::parts(vocabulary, tp_rank));
        let table = declaration.add_cut(name, &[vocabulary, hidden], init, cut);
        Self { table, vocabulary: Vocabulary::new(vocabulary, tp_rank), hidden, deepstack }
    }

    /// Returns the table parameter.
    #[must_use]
    pub const fn table(&self) -> ParameterId {
        self.table
    }
}

impl<D: Device> Block<D> for Embedding {
    fn forward(
        &self,
        pass: &mut ForwardPass<'_, D>,
        input: Option<Tensor<D>>,
        _: &mut SavedActivations<D>,
    ) -> Result<BlockOutput<D>> {
        let text = pass.context.inputs.text()?;
        let mut y = pass.device.zeros(pass.context.layers.rows * self.hidden)?;
        let table = pass.parameters.value(self.table);
        if let Some(tensor) = pass.tensor {
            let own = SparseBuffers::new(pass.device, &text.words.within(&self.vocabulary.own()))?;
            pass.device.gather_scatter(&own, self.hidden, table, &mut y)?;
            tensor_parallel::all_reduce(Some(tensor), &mut y)?;
        } else {
            pass.device.gather_scatter(&text.embedding.forward, self.hidden, table, &mut y)?;
        }
        if let Some((media, rows)) = &text.media {
            let mut tokens = expect_rows::<D>(input, *rows, self.hidden * (1 + self.deepstack))?;
            if self.deepstack > 0 {
                let mut parts = split_columns(pass.device, &tokens, *rows, 1 + self.deepstack)?;
                // the first layer pops its rows first
                parts.drain(1..).rev().for_each(|part| pass.kept.push(part));
                tokens = expect_rows::<D>(parts.pop(), *rows, self.hidden)?;
            }
            pass.device.gather_scatter(&media.forward, self.hidden, &tokens, &mut y)?;
        }
        Ok(BlockOutput::Rows(y))
    }

    fn backward(
        &self,
        pass: &mut BackwardPass<'_, D>,
        gradient: Option<Tensor<D>>,
        _: &mut SavedActivations<D>,
        is_input_needed: bool,
    ) -> Result<Option<Tensor<D>>> {
        let text = pass.context.inputs.text()?;
        let dy = expect_rows::<D>(gradient, pass.context.layers.rows, self.hidden)?;
        if let Some(gradient) = pass.parameters.gradient_mut(self.table) {
            if pass.tensor.is_some() {
                // only this rank's words: remaining gradients belong to their ranks
                let own = text.words.within(&self.vocabulary.own()).transposed();
                let own = SparseBuffers::new(pass.device, &own)?;
                pass.device.gather_scatter(&own, self.hidden, &dy, gradient)?;
            } else {
                pass.device.gather_scatter(&text.embedding.backward, self.hidden, &dy, gradient)?;
            }
        }
        let Some((media, rows)) = text.media.as_ref().filter(|_| is_input_needed) else { return Ok(None) };
        let mut dx = pass.device.zeros(rows * self.hidden)?;
        pass.device.gather_scatter(&media.backward, self.hidden, &dy, &mut dx)?;
        if self.deepstack == 0 {
            return Ok(Some(dx));
        }
        let mut parts = vec![dx];
        // the first layer kept its gradient last
        parts.extend(pass.kept.take(self.deepstack)?.into_iter().rev());
        join_columns(pass.device, &parts, *rows, self.hidden).map(Some)
    }
}
