//! First decoder block: looks up token ids and inserts encoder tokens.
//!
//! Vocabulary shard on a tensor-parallel rank.
//!
//! Adds rows from earlier encoder layers after each of the first decoder layers.
//!
//! Each tensor-parallel rank looks up its vocabulary shard. A row comes from a single rank, and all remaining
//! ranks have zeros, so the sum over ranks has the same bits as the row on that rank.
//!
//! Losses need one exchange with three numbers per row and rank, for any vocabulary size.
//!
//! The embedding keeps these rows for the blocks in this file, which follow the first layers; in backward,
//! the blocks keep the gradients for the embedding. All these blocks are in the first stage.

use crate::block::{
    BackwardPass, Block, BlockOutput, ForwardPass, SavedActivations, TensorPass, expect_rows, join_columns,
    split_columns, tensor_parallel,
};
use crate::error::Result;
use crate::parameters::Declaration;
use crate::parameters::weights::{AxisPartition, Init, ParameterId, TpRank};
use dflop_device::ops::vocab_parallel_cross_entropy::{PARTIAL, VocabularyPart};
use dflop_device::{Device, Dtype, SparseBuffers, Tensor};
use std::ops::Range;

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

/// Contiguous vocabulary shards on all ranks; the first shards are longer by one if there is a remainder.
#[derive(Debug)]
pub(super) struct Vocabulary {
    /// Number of words on every rank.
    sizes: Vec<usize>,
    own: Range<usize>,
    tp_rank: TpRank,
}

impl Vocabulary {
    pub(super) fn new(words: usize, tp_rank: TpRank) -> Self {
        let parts = Self::parts(words, tp_rank);
        let first = parts.first(tp_rank.rank);
        Self {
            sizes: (0..tp_rank.size).map(|rank| parts.len(rank)).collect(),
            own: first..first + parts.len(tp_rank.rank),
            tp_rank,
        }
    }

    /// Partitions the rows in embedding and LM head.
    pub(super) fn parts(words: usize, tp_rank: TpRank) -> AxisPartition {
        AxisPartition::even(words, tp_rank.size)
    }

    /// Returns the words on this rank.
    pub(super) fn own(&self) -> Range<usize> {
        self.own.clone()
    }

    /// Returns the maximum number of words on any rank, by which all ranks divide rows into the same chunks.
    pub(super) fn size_max(&self) -> usize {
        self.sizes.first().copied().unwrap_or(0)
    }

    /// Replaces the logits for the words on this rank by the logit gradient, and adds the loss sum to a
    /// scalar.
    pub(super) fn cross_entropy<D: Device>(
        &self,
        device: &D,
        tensor: Option<TensorPass<'_, D>>,
        logits: &mut Tensor<D>,
        (targets, rows): (&Tensor<D>, Range<usize>),
        (scale, loss): (f64, &mut Tensor<D>),
    ) -> Result<()> {
        let Some(tensor) = tensor else {
            return Ok(device.cross_entropy(logits, (targets, rows), scale, loss)?);
        };
        let TpRank { rank, size } = self.tp_rank;
        let part = VocabularyPart { rank, words: self.own() };
        let numbers = PARTIAL * rows.len();
        let mut parts = device.alloc_as(Dtype::F32, size * numbers)?;
        device.partial_softmax(logits, (targets, rows.clone()), &part, &mut parts)?;
        tensor.group.tensors().all_gather(tensor.at, &mut parts, &vec![numbers; size])?;
        Ok(device.join_softmax(logits, (targets, rows), &part, &parts, scale, loss)?)
    }

    /// Joins the logits from all ranks: `[rows, vocabulary]`, on every rank.
    pub(super) fn gather<D: Device>(
        &self,
        device: &D,
        tensor: Option<TensorPass<'_, D>>,
        own: Tensor<D>,
        rows: usize,
    ) -> Result<Tensor<D>> {
        let Some(tensor) = tensor else { return Ok(own) };
        let words: usize = self.sizes.iter().sum();
        let mut all = vec![0.0; rows * words];
        all[rows * self.own.start..rows * self.own.end].copy_from_slice(&device.download(&own)?);
        let parts: Vec<usize> = self.sizes.iter().map(|size| rows * size).collect();
        tensor.group.comm().all_gather(tensor.at, all.as_mut_slice().into(), &parts)?;
        let mut logits = Vec::with_capacity(all.len());
        for row in 0..rows {
            let mut first = 0;
            for size in &self.sizes {
                // gathered parts are row blocks by rank; logits are rows with all ranks' columns
                logits.extend_from_slice(&all[first * rows + row * size..][..*size]);
                first += size;
            }
        }
        Ok(device.upload(&logits)?)
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_belongs_to_one_rank() {
        let tp_rank = |rank| TpRank { rank, size: 4 };
        let own: Vec<Range<usize>> = (0..4).map(|rank| Vocabulary::new(50, tp_rank(rank)).own()).collect();
        assert_eq!(own, [0..13, 13..26, 26..38, 38..50]);
        assert!((0..4).all(|rank| Vocabulary::new(50, tp_rank(rank)).size_max() == 13));
    }
}
