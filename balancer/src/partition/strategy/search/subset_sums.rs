//! Lists all subset sums for a group's items, sorted by column.
//!
//! Lists are reused: a list is rebuilt only when the group has changed.

use crate::budget::Budget;
use crate::partition::problem::Problem;
use dflop_costmodel::random::SplitMix64;

/// Maximum number of group items that are listed in full; the work grows as 2 to the power of this number.
pub(super) const POOL_ITEMS_MAX: usize = 10;
/// Number of items drawn from a larger group.
const POOL_ITEMS_DRAWN: usize = 8;

/// Subset sum in the sorted column, and the subset's items as bits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sum {
    pub(super) sum: i64,
    pub(super) mask: u32,
}

/// Subset sums for a group's pool.
#[derive(Debug, Default)]
pub(super) struct SubsetSums {
    /// Group items when the sums were listed.
    group: Vec<u32>,
    /// Group items, the pool first.
    items: Vec<u32>,
    pool_items: usize,
    pool_load: Vec<i64>,
    kept_load: Vec<i64>,
    /// Sums for all subsets, `[2^pool_items * width]`, by mask.
    rows: Vec<i64>,
    width: usize,
    /// Sorted sums by column; empty for columns that were not needed yet.
    sorted: Vec<Vec<Sum>>,
}

impl SubsetSums {
    /// Updates the lists to a group's items, sorted by column `tight`; `merged` is scratch memory.
    pub(super) fn refresh(
        &mut self,
        problem: &Problem<'_>,
        items: &[u32],
        tight: usize,
        merged: &mut Vec<Sum>,
        rng: &mut SplitMix64,
        budget: &mut Budget,
    ) {
        // Items are compared in order: a reordered group is listed again, which costs time only.
        if self.rows.is_empty() || self.group != items {
            self.draw(items, rng);
            self.sum(problem);
            self.sorted.iter_mut().for_each(Vec::clear);
            self.sorted.resize_with(problem.width(), Vec::new);
            budget.spend(1 << self.pool_items);
        }
        if self.sorted[tight].is_empty() {
            self.sort(problem, tight, merged);
            budget.spend(2 << self.pool_items);
        }
    }

    /// Makes the next refresh draw the pool again.
    pub(super) fn forget(&mut self) {
        self.rows.clear();
    }

    /// Returns the subsets in ascending order by sum in a column.
    pub(super) fn sorted(&self, column: usize) -> &[Sum] {
        &self.sorted[column]
    }

    /// Returns a subset's sums, `[width]`.
    pub(super) fn row(&self, mask: u32) -> &[i64] {
        let start = mask as usize * self.width;
        &self.rows[start..start + self.width]
    }

    /// Returns the mask for the whole pool.
    pub(super) fn all(&self) -> u32 {
        (1 << self.pool_items) - 1
    }

    /// Returns the pool items, which form the subsets.
    pub(super) fn pool(&self) -> &[u32] {
        &self.items[..self.pool_items]
    }

    /// Returns the items that always stay.
    pub(super) fn kept(&self) -> &[u32] {
        &self.items[self.pool_items..]
    }

    /// Whether any item always stays.
    pub(super) fn keeps_some(&self) -> bool {
        self.items.len() > self.pool_items
    }

    /// Returns the pool's sums, `[width]`.
    pub(super) fn pool_load(&self) -> &[i64] {
        &self.pool_load
    }

    /// Returns the sums over the items that stay, `[width]`.
    pub(super) fn kept_load(&self) -> &[i64] {
        &self.kept_load
    }

    /// Draws the pool.
    fn draw(&mut self, items: &[u32], rng: &mut SplitMix64) {
        self.group.clear();
        self.group.extend_from_slice(items);
        self.items.clone_from(&self.group);
        self.pool_items = self.items.len();
        if self.pool_items > POOL_ITEMS_MAX {
            self.pool_items = POOL_ITEMS_DRAWN;
            rng.shuffle_front(&mut self.items, POOL_ITEMS_DRAWN);
        }
    }

    /// Sums every subset, each from a smaller subset.
    fn sum(&mut self, problem: &Problem<'_>) {
        self.width = problem.width();
        self.rows.clear();
        self.rows.resize(self.width << self.pool_items, 0);
        for (bit, &item) in self.items[..self.pool_items].iter().enumerate() {
            // The subsets with this item follow the subsets without it, in the same order.
            let known = self.width << bit;
            self.rows.copy_within(..known, known);
            for sum in self.rows[known..2 * known].chunks_exact_mut(self.width) {
                add_row(sum, problem.row(item));
            }
        }
        self.pool_load.clear();
        self.pool_load.extend_from_slice(&self.rows[self.rows.len() - self.width..]);
        self.kept_load.clear();
        self.kept_load.resize(self.width, 0);
        for &item in &self.items[self.pool_items..] {
            add_row(&mut self.kept_load, problem.row(item));
        }
    }

    /// Sorts by a column by merging: for each item the list is merged with a shifted copy.
    fn sort(&mut self, problem: &Problem<'_>, column: usize, merged: &mut Vec<Sum>) {
        let sorted = &mut self.sorted[column];
        sorted.push(Sum { sum: 0, mask: 0 });
        for (bit, &item) in self.items[..self.pool_items].iter().enumerate() {
            let shift = problem.row(item)[column] as i64;
            merged.clear();
            let mut plain = 0;
            for &Sum { sum, mask } in &*sorted {
                while let Some(next) = sorted.get(plain).filter(|next| next.sum <= sum + shift) {
                    merged.push(*next);
                    plain += 1;
                }
                merged.push(Sum { sum: sum + shift, mask: mask | 1 << bit });
            }
            merged.extend_from_slice(&sorted[plain..]);
            std::mem::swap(sorted, merged);
        }
    }
}

fn add_row(sum: &mut [i64], row: &[u64]) {
    for (sum, value) in sum.iter_mut().zip(row) {
        *sum += *value as i64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};

    #[test]
    fn every_subset_is_listed_in_order() {
        let instance = Instance::new(1, 2, vec![5, 1, 3, 9, 4, 0]).unwrap();
        let problem = Problem::new(&instance, &Caps::default()).unwrap();
        let (mut rng, mut budget) = (SplitMix64::new(0), Budget::work(1));
        let mut lists = SubsetSums::default();
        lists.refresh(&problem, &[0, 1, 2], 0, &mut Vec::new(), &mut rng, &mut budget);
        let sums: Vec<i64> = lists.sorted(0).iter().map(|sum| sum.sum).collect();
        assert_eq!(sums, [0, 3, 4, 5, 7, 8, 9, 12]);
        assert!(lists.sorted(0).iter().all(|sum| lists.row(sum.mask)[0] == sum.sum));
        assert_eq!(lists.row(lists.all()), [12, 10]);
    }

    #[test]
    fn a_large_group_takes_part_with_some_items() {
        let instance = Instance::new(1, 1, (1..=12).collect()).unwrap();
        let problem = Problem::new(&instance, &Caps::default()).unwrap();
        let (mut rng, mut budget) = (SplitMix64::new(0), Budget::work(1));
        let (mut lists, items) = (SubsetSums::default(), (0..12).collect::<Vec<_>>());
        lists.refresh(&problem, &items, 0, &mut Vec::new(), &mut rng, &mut budget);
        assert_eq!((lists.pool().len(), lists.kept().len()), (8, 4));
        assert_eq!(lists.pool_load()[0] + lists.kept_load()[0], 78);
    }
}
