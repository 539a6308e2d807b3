//! Token rows that go through experts, grouped by expert.
//!
//! A *slot* is a token with one selected expert; slots are ordered by token. *Rows* are the same slots
//! ordered by expert, so that the rows of each expert are consecutive.

use std::ops::Range;

use crate::block::SavedActivations;
use crate::error::Result;
use dflop_device::{Device, Dtype, SparseBuffers, Tensor};

/// Row order for an expert layer, on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RowOrder {
    /// Row for every slot.
    pub(super) places: Vec<u32>,
    /// First row for every expert, then the number of rows.
    pub(super) starts: Vec<usize>,
}

impl RowOrder {
    /// Groups slots by expert; slots for the same expert stay in order.
    pub(super) fn new(chosen: &[u32], experts: usize) -> Self {
        let mut starts = vec![0; experts + 1];
        for &expert in chosen {
            starts[expert as usize + 1] += 1;
        }
        for expert in 0..experts {
            starts[expert + 1] += starts[expert];
        }
        let mut next = starts.clone();
        let place = |&expert: &u32| {
            next[expert as usize] += 1;
            next[expert as usize] as u32 - 1
        };
        Self { places: chosen.iter().map(place).collect(), starts }
    }

    /// Returns the slot for every row.
    fn slots(&self) -> Vec<u32> {
        let mut slots = vec![0; self.places.len()];
        for (slot, &place) in (0..).zip(&self.places) {
            slots[place as usize] = slot;
        }
        slots
    }
}

/// Returns the row range for every expert that has rows.
pub(super) fn expert_rows(starts: &[usize]) -> impl Iterator<Item = (usize, Range<usize>)> {
    starts.windows(2).map(|pair| pair[0]..pair[1]).enumerate().filter(|(_, rows)| !rows.is_empty())
}

/// Moves rows between tokens and experts, on a device.
pub(super) struct Dispatch<D: Device> {
    /// Copies tokens to rows.
    spread: SparseBuffers<D>,
    /// Adds up rows for every token.
    collect: SparseBuffers<D>,
    /// Weight for every slot.
    by_slot: Tensor<D>,
    /// Weight for every row.
    by_row: Tensor<D>,
}

impl<D: Device> Dispatch<D> {
    /// Copies an order to a device.
    ///
    /// - `weights`: one per slot, in `f32`
    pub(super) fn new(device: &D, order: &RowOrder, per_token: usize, weights: Tensor<D>) -> Result<Self> {
        let (rows, slots) = (order.places.len(), order.slots());
        let none = || device.upload_as(Dtype::F32, &[]);
        let counted = |count: usize, step: usize| -> Result<Tensor<D>> {
            let numbers: Vec<u32> = (0..count).map(|number| (number * step) as u32).collect();
            Ok(device.upload_indices(&numbers)?)
        };
        let mut spread = SparseBuffers {
            targets: counted(rows, 1)?,
            starts: counted(rows + 1, 1)?,
            sources: device.upload_indices(&slots)?,
            weights: none()?,
        };
        let mut by_row = device.alloc_as(Dtype::F32, rows)?;
        device.zero(&mut by_row)?;
        device.gather_scatter(&spread, 1, &weights, &mut by_row)?;
        let tokens: Vec<u32> = slots.iter().map(|&slot| slot / per_token as u32).collect();
        spread.sources = device.upload_indices(&tokens)?;
        let collect = SparseBuffers {
            targets: counted(rows / per_token, 1)?,
            starts: counted(rows / per_token + 1, per_token)?,
            sources: device.upload_indices(&order.places)?,
            weights: none()?,
        };
        Ok(Self { spread, collect, by_slot: weights, by_row })
    }

    /// Returns the row for every slot.
    pub(super) const fn places(&self) -> &Tensor<D> {
        &self.collect.sources
    }

    /// Copies token rows to expert rows, weighted or unchanged.
    pub(super) fn spread(
        &mut self,
        device: &D,
        columns: usize,
        x: &Tensor<D>,
        is_weighted: bool,
    ) -> Result<Tensor<D>> {
        let mut y = device.zeros(self.by_row.len() * columns)?;
        apply(device, (&mut self.spread, &mut self.by_row), is_weighted, columns, x, &mut y)?;
        Ok(y)
    }

    /// Adds up expert rows by token, weighted or unchanged.
    pub(super) fn collect(
        &mut self,
        device: &D,
        columns: usize,
        rows: &Tensor<D>,
        is_weighted: bool,
    ) -> Result<Tensor<D>> {
        let mut y = device.zeros(self.collect.targets.len() * columns)?;
        apply(device, (&mut self.collect, &mut self.by_slot), is_weighted, columns, rows, &mut y)?;
        Ok(y)
    }

    /// Saves the buffers that a backward pass reads.
    pub(super) fn keep(self, saved: &mut SavedActivations<D>) {
        let Self { spread, collect, by_slot, by_row } = self;
        for matrix in [spread, collect] {
            let SparseBuffers { targets, starts, sources, weights } = matrix;
            for buffer in [targets, starts, sources, weights] {
                saved.keep(buffer);
            }
        }
        saved.keep(by_slot);
        saved.keep(by_row);
    }

    /// Restores the buffers that [`keep`](Self::keep) has saved.
    pub(super) fn take(saved: &mut SavedActivations<D>) -> Self {
        let (by_row, by_slot) = (saved.take(), saved.take());
        let mut matrix = || {
            let (weights, sources) = (saved.take(), saved.take());
            let (starts, targets) = (saved.take(), saved.take());
            SparseBuffers { targets, starts, sources, weights }
        };
        let (collect, spread) = (matrix(), matrix());
        Self { spread, collect, by_slot, by_row }
    }
}

/// Multiplies by a matrix, with or without weights.
fn apply<D: Device>(
    device: &D,
    (matrix, weights): (&mut SparseBuffers<D>, &mut Tensor<D>),
    is_weighted: bool,
    columns: usize,
    x: &Tensor<D>,
    y: &mut Tensor<D>,
) -> Result<()> {
    if !is_weighted {
        return Ok(device.gather_scatter(matrix, columns, x, y)?);
    }
    std::mem::swap(&mut matrix.weights, weights);
    let result = device.gather_scatter(matrix, columns, x, y);
    std::mem::swap(&mut matrix.weights, weights);
    Ok(result?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_grouped_by_expert_and_keep_the_order_of_tokens() {
        let order = RowOrder::new(&[2, 0, 2, 3, 0, 2], 5);
        assert_eq!(order.places, [2, 0, 3, 5, 1, 4]);
        assert_eq!(order.slots(), [1, 4, 0, 2, 5, 3]);
        let rows: Vec<_> = expert_rows(&order.starts).collect();
        assert_eq!(rows, [(0, 0..2), (2, 2..5), (3, 5..6)], "experts without tokens have no work");
    }
}
