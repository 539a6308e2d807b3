//! Vocabulary shard on a tensor-parallel rank.
//!
//! Losses need one exchange with three numbers per row and rank, for any vocabulary size.

use std::ops::Range;

use crate::block::TensorPass;
use crate::error::Result;
use crate::parameters::weights::{AxisPartition, TpRank};
use dflop_device::ops::vocab_parallel_cross_entropy::{PARTIAL, VocabularyPart};
use dflop_device::{Device, Dtype, Tensor};

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
