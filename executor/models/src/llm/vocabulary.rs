//! Part of the vocabulary that a rank of a tensor-parallel group has.
//!
//! Losses need one exchange of three numbers per row and rank, for any size of the vocabulary.

use std::ops::Range;

use crate::error::Result;
use crate::tensor_parallel::TensorPass;
use crate::weights::{AxisPartition, TpRank};
use dflop_device::Device;
use dflop_device::ops::vocab_parallel_cross_entropy::{PartialSoftmax, join};

/// Contiguous parts of the vocabulary on all ranks; the first parts are longer by one if there is a
/// remainder.
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

    /// Partition of the rows of the embedding and of the LM head.
    pub(super) fn parts(words: usize, tp_rank: TpRank) -> AxisPartition {
        AxisPartition::even(words, tp_rank.size)
    }

    /// Words of this rank.
    pub(super) fn own(&self) -> Range<usize> {
        self.own.clone()
    }

    /// Largest number of words of any rank, by which all ranks divide rows into the same chunks.
    pub(super) fn size_max(&self) -> usize {
        self.sizes.first().copied().unwrap_or(0)
    }

    /// Replaces the logits of this rank's words by their gradient and returns the sum of losses.
    pub(super) fn cross_entropy<D: Device>(
        &self,
        device: &D,
        tensor: Option<TensorPass<'_>>,
        logits: &mut D::Floats,
        targets: &[u32],
        scale: f64,
    ) -> Result<f64> {
        let Some(tensor) = tensor else { return Ok(device.cross_entropy(logits, targets, scale)?) };
        let own =
            |&target: &u32| self.own.contains(&(target as usize)).then(|| target - self.own.start as u32);
        let own: Vec<Option<u32>> = targets.iter().map(own).collect();
        let rows = device.vocab_parallel_cross_entropy(logits, &own)?;
        let all = self.exchange(tensor, &rows)?;
        let mut loss = 0.0;
        let mut factors = Vec::with_capacity(rows.len());
        for row in 0..rows.len() {
            let parts: Vec<PartialSoftmax<f32>> = all.iter().map(|parts| parts[row]).collect();
            let (of_row, factor) = join(&parts, self.tp_rank.rank, scale);
            loss += of_row;
            factors.push(factor);
        }
        device.vocab_parallel_cross_entropy_backward(logits, &own, &factors, scale)?;
        Ok(loss)
    }

    /// Exchanges the partial softmax of every row with all ranks.
    fn exchange(
        &self,
        tensor: TensorPass<'_>,
        own: &[PartialSoftmax<f32>],
    ) -> Result<Vec<Vec<PartialSoftmax<f32>>>> {
        let TpRank { rank, size } = self.tp_rank;
        let part = 3 * own.len();
        let mut all = vec![0.0; size * part];
        for (place, row) in all[rank * part..].chunks_mut(3).zip(own) {
            place.copy_from_slice(&[row.max, row.sum, row.target]);
        }
        tensor.group.comm().all_gather(tensor.at, all.as_mut_slice().into(), &vec![part; size])?;
        let row = |&[max, sum, target]: &[f32; 3]| PartialSoftmax { max, sum, target };
        let rank = |rank: usize| all[rank * part..][..part].as_chunks().0.iter().map(row).collect();
        Ok((0..size).map(rank).collect())
    }

    /// Joins the logits of all ranks: `[rows, vocabulary]`, on every rank.
    pub(super) fn gather<D: Device>(
        &self,
        device: &D,
        tensor: Option<TensorPass<'_>>,
        own: D::Floats,
        rows: usize,
    ) -> Result<D::Floats> {
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
                // gathered parts are blocks of rows by rank; logits are rows of all ranks
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
