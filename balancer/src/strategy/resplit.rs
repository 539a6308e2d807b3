//! The best split of two groups' items into two, by meeting in the middle.
//!
//! The items of both groups are pooled; a random choice of [`POOL_ITEMS_MAX`] stays in the pool, the
//! others keep their group. The pool is cut in halves and all subset sums of each half are listed, sorted
//! in one column. A wanted split is a pair of sums inside a window, found by walking one list up and the
//! other down; the other columns are looked at for the pairs inside.

use crate::budget::Budget;
use crate::partition::Partition;
use crate::problem::Problem;
use crate::rng::SplitMix64;

/// Items that are split anew; the work grows with 2 to the power of half of it.
const POOL_ITEMS_MAX: usize = 16;
/// Pairs of sums inside the window that are looked at before the best so far is taken.
const PAIRS_MAX: u64 = 4096;

/// The pooled items, and the loads of those that keep their group.
struct Pool {
    items: Vec<u32>,
    kept: [Vec<u32>; 2],
    kept_loads: [Vec<i64>; 2],
    total: Vec<i64>,
}

/// All subsets of half a pool; a mask has a bit for each of its items.
#[derive(Default)]
struct Half {
    /// `[2^items * width]`, by mask.
    sums: Vec<i64>,
    /// Sums in the tight column with their masks, ascending.
    sorted: Vec<(i64, u32)>,
    /// Memory for the list that `sorted` becomes next.
    merged: Vec<(i64, u32)>,
}

/// What the first group may get from the pool: `[width]` each, inclusive.
struct Window {
    least: Vec<i64>,
    most: Vec<i64>,
}

/// Splits pairs of groups anew; keeps its memory from one to the next.
#[derive(Default)]
pub(super) struct Resplitter {
    left: Half,
    right: Half,
}

impl Resplitter {
    /// Finds the split of two groups whose larger value is smallest, at most `target`.
    ///
    /// Exact unless the groups hold more than [`POOL_ITEMS_MAX`] items or [`PAIRS_MAX`] pairs of sums are
    /// near. Neither group ends empty.
    ///
    /// # Source
    /// Horowitz and Sahni, "Computing partitions with applications to the knapsack problem", J. ACM 21,
    /// 1974.
    pub(super) fn find(
        &mut self,
        problem: &Problem<'_>,
        partition: &Partition,
        pair: (usize, usize),
        target: u64,
        rng: &mut SplitMix64,
        budget: &mut Budget,
    ) -> Option<[Vec<u32>; 2]> {
        budget.spend(1);
        let tight = tight_column(problem, partition, pair, target)?;
        let pool = Pool::new(problem, partition, pair, rng);
        let (left_items, right_items) = pool.items.split_at(pool.items.len() / 2);
        self.left.fill(problem, left_items, tight);
        self.right.fill(problem, right_items, tight);
        budget.spend(2 * (self.left.sorted.len() + self.right.sorted.len()) as u64);
        let window = pool.window(problem, target as i64);
        let (masks, pairs) = self.meet(problem, &pool, window, tight);
        budget.spend(pairs);
        masks.map(|masks| pool.split(masks))
    }

    /// Walks one list up and the other down; returns the best masks and how many pairs were looked at.
    fn meet(
        &self,
        problem: &Problem<'_>,
        pool: &Pool,
        mut window: Window,
        tight: usize,
    ) -> (Option<u32>, u64) {
        let right = &self.right.sorted;
        let left_items = pool.items.len() / 2;
        let (mut best, mut pairs, mut end) = (None, 0, right.len());
        for &(left_sum, left_mask) in &self.left.sorted {
            while end > 0 && left_sum + right[end - 1].0 > window.most[tight] {
                end -= 1;
            }
            let left_row = self.left.row(problem, left_mask);
            for &(right_sum, right_mask) in right[..end].iter().rev() {
                pairs += 1;
                if left_sum + right_sum < window.least[tight] {
                    break;
                }
                let masks = left_mask | right_mask << left_items;
                let right_row = self.right.row(problem, right_mask);
                if window.contains(left_row, right_row) && pool.fills_both(masks) {
                    window = pool.window(problem, pool.value(problem, left_row, right_row) - 1);
                    best = Some(masks);
                }
            }
            if pairs >= PAIRS_MAX {
                break;
            }
        }
        (best, pairs)
    }
}

/// The largest module of both groups together, where the window is narrowest; nothing if they hold too
/// much for any split.
fn tight_column(
    problem: &Problem<'_>,
    partition: &Partition,
    pair: (usize, usize),
    target: u64,
) -> Option<usize> {
    let (first, second) = (partition.load(problem, pair.0), partition.load(problem, pair.1));
    let mut tight = (0, 0);
    for (column, limit) in problem.limits.iter().enumerate() {
        let is_module = column < problem.modules;
        let both = first[column] + second[column];
        if both.div_ceil(2) > if is_module { target } else { *limit } {
            return None;
        }
        if is_module && both > tight.0 {
            tight = (both, column);
        }
    }
    Some(tight.1)
}

impl Pool {
    fn new(problem: &Problem<'_>, partition: &Partition, pair: (usize, usize), rng: &mut SplitMix64) -> Self {
        let of = |side: usize, group: usize| partition.groups[group].iter().map(move |item| (side, *item));
        let mut pooled: Vec<(usize, u32)> = of(0, pair.0).chain(of(1, pair.1)).collect();
        let mut kept = [Vec::new(), Vec::new()];
        if pooled.len() > POOL_ITEMS_MAX {
            rng.shuffle_front(&mut pooled, POOL_ITEMS_MAX);
            for (side, item) in pooled.drain(POOL_ITEMS_MAX..) {
                kept[side].push(item);
            }
        }
        let items: Vec<u32> = pooled.into_iter().map(|(_, item)| item).collect();
        let sum = |items: &[u32]| {
            let mut sum = vec![0; problem.width()];
            for &item in items {
                add_row(&mut sum, problem.row(item));
            }
            sum
        };
        Self { kept_loads: [sum(&kept[0]), sum(&kept[1])], total: sum(&items), items, kept }
    }

    /// What the first group may get so that both groups keep within their limits and the target.
    fn window(&self, problem: &Problem<'_>, target: i64) -> Window {
        let limits = problem.limits.iter().enumerate();
        let limits =
            limits.map(
                |(column, limit)| {
                    if column < problem.modules { target } else { (*limit).min(i64::MAX as u64) as i64 }
                },
            );
        let [first, second] = &self.kept_loads;
        let (most, least) = limits
            .enumerate()
            .map(|(column, limit)| (limit - first[column], second[column] + self.total[column] - limit))
            .unzip();
        Window { least, most }
    }

    /// The larger value of both groups if the first gets two shares of the pool.
    fn value(&self, problem: &Problem<'_>, left: &[i64], right: &[i64]) -> i64 {
        let [first, second] = &self.kept_loads;
        let larger = |column: usize| {
            let gets = left[column] + right[column];
            (first[column] + gets).max(second[column] + self.total[column] - gets)
        };
        (0..problem.modules).map(larger).max().unwrap_or(0)
    }

    /// Whether neither group is empty.
    fn fills_both(&self, mask: u32) -> bool {
        let is_all = mask.count_ones() as usize == self.items.len();
        (mask != 0 || !self.kept[0].is_empty()) && (!is_all || !self.kept[1].is_empty())
    }

    /// The groups, if the first gets the items of a mask.
    fn split(self, mask: u32) -> [Vec<u32>; 2] {
        let mut groups = self.kept;
        for (bit, item) in self.items.into_iter().enumerate() {
            groups[usize::from(mask >> bit & 1 == 0)].push(item);
        }
        groups
    }
}

impl Window {
    fn contains(&self, left: &[i64], right: &[i64]) -> bool {
        let mut is_inside = true;
        for column in 0..left.len() {
            let sum = left[column] + right[column];
            is_inside &= self.least[column] <= sum && sum <= self.most[column];
        }
        is_inside
    }
}

impl Half {
    /// Lists the subsets of some items.
    fn fill(&mut self, problem: &Problem<'_>, items: &[u32], tight: usize) {
        let width = problem.width();
        self.sums.clear();
        self.sums.resize(width << items.len(), 0);
        self.sorted.clear();
        self.sorted.push((0, 0));
        for (bit, &item) in items.iter().enumerate() {
            let row = problem.row(item);
            let known = width << bit;
            self.sums.copy_within(..known, known);
            for sum in self.sums[known..2 * known].chunks_exact_mut(width) {
                add_row(sum, row);
            }
            self.merge_shifted(row[tight] as i64, 1 << bit);
        }
    }

    /// Joins the sorted list with itself, shifted by one more item; sorted again, without sorting.
    fn merge_shifted(&mut self, shift: i64, bit: u32) {
        self.merged.clear();
        let mut plain = 0;
        for &(sum, mask) in &self.sorted {
            while let Some(next) = self.sorted.get(plain).filter(|next| next.0 <= sum + shift) {
                self.merged.push(*next);
                plain += 1;
            }
            self.merged.push((sum + shift, mask | bit));
        }
        self.merged.extend_from_slice(&self.sorted[plain..]);
        std::mem::swap(&mut self.sorted, &mut self.merged);
    }

    fn row(&self, problem: &Problem<'_>, mask: u32) -> &[i64] {
        let start = mask as usize * problem.width();
        &self.sums[start..start + problem.width()]
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
    use proptest::prelude::*;

    /// The best value of any split, by trying all.
    fn brute_force(instance: &Instance) -> u64 {
        let items = instance.items() as u32;
        let value = |mask: u32| {
            let (first, second): (Vec<u32>, Vec<u32>) = (0..items).partition(|item| mask >> item & 1 == 1);
            instance.load_ns(&first).into_iter().chain(instance.load_ns(&second)).max().unwrap()
        };
        (1..(1 << items) - 1).map(value).min().unwrap()
    }

    proptest! {
        #[test]
        fn split_is_the_best_of_all(times_ns in prop::collection::vec(0..50_u64, 4..20)) {
            let times_ns = &times_ns[..times_ns.len() / 2 * 2];
            let instance = Instance::new(2, 2, times_ns.to_vec()).unwrap();
            let problem = Problem::new(&instance, &Caps::default()).unwrap();
            let all = (0..instance.items() as u32).collect::<Vec<_>>();
            let partition = Partition::from_groups(&problem, vec![all[1..].to_vec(), all[..1].to_vec()]);
            let mut splitter = Resplitter::default();
            let (mut rng, mut budget) = (SplitMix64::new(0), Budget::work(1));
            let best = brute_force(&instance);
            let found = splitter.find(&problem, &partition, (0, 1), best, &mut rng, &mut budget).unwrap();
            prop_assert_eq!(Partition::from_groups(&problem, found.to_vec()).makespan(), best);
            if best > 0 {
                prop_assert!(splitter.find(&problem, &partition, (0, 1), best - 1, &mut rng, &mut budget).is_none());
            }
        }
    }
}
