//! Chooses experts for every token from router logits.
//!
//! Token rows that go through experts, grouped by expert.
//!
//! The choice is made on the host: it has no gradient, and matrix product sizes depend on it. Ties break by
//! index, so that all ranks and every recomputation choose the same experts.
//!
//! # Source
//! Expert groups and the choice correction: DeepSeek-AI: "DeepSeek-V3", 2024, arXiv:2412.19437, section
//! 2.1.2.
//!
//! A *slot* is a token with one selected expert; slots are ordered by token. *Rows* are the same slots
//! ordered by expert, so that the rows of each expert are consecutive.

use crate::block::SavedActivations;
use crate::error::Result;
use dflop_device::ops::experts::{ExpertScores, ExpertWeightShape};
use dflop_device::ops::real::Real;
use dflop_device::{Device, Dtype, SparseBuffers, Tensor};
use std::cmp::Ordering;
use std::ops::Range;

/// Function from token logits to experts and weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterRule {
    /// Weight sizes and score function.
    pub weights: ExpertWeightShape,
    /// Expert groups; a token may use only a few groups. `None` if all experts compete.
    pub groups: Option<ExpertGroups>,
}

/// Groups of consecutive experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups; divides the number of experts.
    pub groups: usize,
    /// Number of groups whose experts a token may go through.
    pub kept: usize,
    /// Number of best experts whose scores add up to a group score.
    pub scored: usize,
}

impl RouterRule {
    /// Chooses experts for all tokens, `[tokens, chosen]`, best expert first.
    ///
    /// - `logits`: `[tokens, experts]`
    /// - `correction`: added to expert scores only for the choice; may be empty
    pub(super) fn choose(&self, logits: &[f32], correction: &[f32]) -> Vec<u32> {
        let ExpertWeightShape { experts, chosen, scores, .. } = self.weights;
        let mut all = Vec::with_capacity(logits.len() / experts * chosen);
        let mut values = Vec::with_capacity(experts);
        for logits in logits.chunks(experts) {
            values.clear();
            let is_softmax = matches!(scores, ExpertScores::Softmax | ExpertScores::SoftmaxOfChosen);
            if correction.is_empty() && self.groups.is_none() {
                // scores have the same order as logits, and large logits do not round to the same score
                values.extend_from_slice(logits);
            } else if is_softmax {
                let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                values.extend(logits.iter().map(|&logit| Real::exp(logit - most)));
                let total: f32 = values.iter().sum();
                for value in &mut values {
                    *value /= total;
                }
            } else {
                values.extend(logits.iter().map(|&logit| logit.sigmoid()));
            }
            values.iter_mut().zip(correction).for_each(|(value, &more)| *value += more);
            if let Some(groups) = self.groups {
                groups.leave_out(&mut values);
            }
            best(&values, chosen, &mut all);
        }
        all
    }
}

impl ExpertGroups {
    /// Sets expert scores in the worse groups to minus infinity.
    fn leave_out(self, values: &mut [f32]) {
        let size = values.len() / self.groups;
        let score = |group: &[f32]| {
            let mut first = Vec::new();
            best(group, self.scored.min(size), &mut first);
            first.iter().map(|&expert| group[expert as usize]).sum::<f32>()
        };
        let scores: Vec<f32> = values.chunks(size).map(score).collect();
        let mut kept = Vec::new();
        best(&scores, self.kept, &mut kept);
        for (group, values) in (0..).zip(values.chunks_mut(size)) {
            if !kept.contains(&group) {
                values.fill(f32::NEG_INFINITY);
            }
        }
    }
}

/// Appends the indices of the largest values, descending; among equal values the first. NaN is never larger.
fn best(values: &[f32], count: usize, into: &mut Vec<u32>) {
    let start = into.len();
    for (index, &value) in (0..).zip(values) {
        let is_full = into.len() == start + count;
        let last = into.last().copied();
        if is_full && !last.is_some_and(|last| value > values[last as usize]) {
            continue;
        }
        if is_full {
            into.pop();
        }
        let better = into[start..]
            .iter()
            .take_while(|&&other| values[other as usize].partial_cmp(&value) != Some(Ordering::Less))
            .count();
        into.insert(start + better, index);
    }
}

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

    fn rule(chosen: usize, scores: ExpertScores, groups: Option<ExpertGroups>) -> RouterRule {
        RouterRule { weights: ExpertWeightShape { experts: 6, chosen, scores, scale: 1.0 }, groups }
    }

    #[test]
    fn the_largest_logits_are_chosen_and_ties_break_by_index() {
        let logits = [0.5, 2.0, 0.5, 3.0, 2.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
        for scores in [ExpertScores::Softmax, ExpertScores::SoftmaxOfChosen, ExpertScores::Sigmoid] {
            assert_eq!(rule(4, scores, None).choose(&logits, &[]), [3, 1, 4, 0, 0, 1, 2, 3]);
        }
    }

    #[test]
    fn sigmoids_that_round_to_one_keep_the_order_of_their_logits() {
        let chosen = rule(2, ExpertScores::Sigmoid, None).choose(&[20.0, 40.0, 30.0, 0.0, 0.0, 0.0], &[]);
        assert_eq!(chosen, [1, 2]);
    }

    #[test]
    fn a_correction_changes_the_choice() {
        let correction = [0.0, 0.0, 1.0, 0.0, 0.0, 0.9];
        let chosen = rule(2, ExpertScores::SigmoidOfChosen, None).choose(&[0.0; 6], &correction);
        assert_eq!(chosen, [2, 5]);
    }

    #[test]
    fn only_experts_of_the_best_groups_are_chosen() {
        let logits = [3.0, 3.1, 9.0, -9.0, 2.9, 3.05];
        let groups = |scored| Some(ExpertGroups { groups: 3, kept: 2, scored });
        // sums over two: the middle group is worst; over one: the best expert is in it
        assert_eq!(rule(3, ExpertScores::Sigmoid, groups(2)).choose(&logits, &[]), [1, 5, 0]);
        assert_eq!(rule(3, ExpertScores::Sigmoid, groups(1)).choose(&logits, &[]), [2, 1, 0]);
    }

    #[test]
    fn every_token_has_its_experts_even_if_logits_are_not_numbers() {
        let chosen = rule(2, ExpertScores::Softmax, None).choose(&[f32::NAN; 6], &[]);
        assert_eq!(chosen, [0, 1]);
    }

    #[test]
    fn zeros_of_both_signs_are_equal_and_nan_is_never_larger() {
        let choose = |logits: [f32; 6]| rule(2, ExpertScores::Softmax, None).choose(&logits, &[]);
        assert_eq!(choose([-0.0, 0.0, -1.0, -1.0, -1.0, -1.0]), [0, 1]);
        assert_eq!(choose([1.0, f32::NAN, -1.0, -1.0, -1.0, -1.0])[0], 0);
    }

    #[test]
    fn rows_are_grouped_by_expert_and_keep_the_order_of_tokens() {
        let order = RowOrder::new(&[2, 0, 2, 3, 0, 2], 5);
        assert_eq!(order.places, [2, 0, 3, 5, 1, 4]);
        assert_eq!(order.slots(), [1, 4, 0, 2, 5, 3]);
        let rows: Vec<_> = expert_rows(&order.starts).collect();
        assert_eq!(rows, [(0, 0..2), (2, 2..5), (3, 5..6)], "experts without tokens have no work");
    }
}
