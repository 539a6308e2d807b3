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

/// The pooled items, and the loads of those that keep their group.
struct Pool {
    items: Vec<u32>,
    kept: [Vec<u32>; 2],
    kept_loads: [Vec<i64>; 2],
    total: Vec<i64>,
}

/// All subsets of half a pool; a mask has a bit for each of its items.
struct Half {
    /// `[2^items * width]`, by mask.
    sums: Vec<i64>,
    /// Sums in the tight column with their masks, ascending.
    sorted: Vec<(i64, u32)>,
}

/// What the first group may get from the pool: `[width]` each, inclusive.
struct Window {
    least: Vec<i64>,
    most: Vec<i64>,
}

/// Finds the split of two groups whose larger value is smallest, at most `target`.
///
/// Exact unless the groups hold more than [`POOL_ITEMS_MAX`] items. Neither group ends empty.
///
/// # Source
/// Horowitz and Sahni, "Computing partitions with applications to the knapsack problem", J. ACM 21, 1974.
pub(super) fn find(
    problem: &Problem<'_>,
    partition: &Partition,
    pair: (usize, usize),
    target: u64,
    rng: &mut SplitMix64,
    budget: &mut Budget,
) -> Option<[Vec<u32>; 2]> {
    let pool = Pool::new(problem, partition, pair, rng);
    let tight = tight_column(problem, partition.load(problem, pair.0));
    let (left_items, right_items) = pool.items.split_at(pool.items.len() / 2);
    let (left, right) = (Half::new(problem, left_items, tight), Half::new(problem, right_items, tight));
    budget.spend((left.sorted.len() + right.sorted.len()) as u64);
    let mut window = pool.window(problem, target as i64);
    let mut best = None;
    let mut end = right.sorted.len();
    for &(left_sum, left_mask) in &left.sorted {
        while end > 0 && left_sum + right.sorted[end - 1].0 > window.most[tight] {
            end -= 1;
        }
        for &(right_sum, right_mask) in right.sorted[..end].iter().rev() {
            budget.spend(1);
            if left_sum + right_sum < window.least[tight] {
                break;
            }
            let sums = left.row(problem, left_mask).iter().zip(right.row(problem, right_mask));
            let is_inside = sums
                .clone()
                .zip(window.least.iter().zip(&window.most))
                .all(|((left, right), (least, most))| (*least..=*most).contains(&(left + right)));
            let masks = left_mask | right_mask << left_items.len();
            if is_inside && pool.fills_both(masks) {
                let share: Vec<i64> = sums.map(|(left, right)| left + right).collect();
                window = pool.window(problem, pool.value(problem, &share) - 1);
                best = Some(masks);
            }
        }
    }
    best.map(|masks| pool.split(masks))
}

/// The first group's largest module.
fn tight_column(problem: &Problem<'_>, load: &[u64]) -> usize {
    let mut tight = 0;
    for column in 1..problem.modules {
        if load[column] > load[tight] {
            tight = column;
        }
    }
    tight
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

    /// The larger value of both groups if the first gets `share` of the pool.
    fn value(&self, problem: &Problem<'_>, share: &[i64]) -> i64 {
        let [first, second] = &self.kept_loads;
        let larger = |column: usize| {
            let (gets, leaves) = (share[column], self.total[column] - share[column]);
            (first[column] + gets).max(second[column] + leaves)
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

impl Half {
    fn new(problem: &Problem<'_>, items: &[u32], tight: usize) -> Self {
        let width = problem.width();
        let mut sums = vec![0_i64; width << items.len()];
        let mut sorted = vec![(0, 0)];
        for (bit, &item) in items.iter().enumerate() {
            let row = problem.row(item);
            let known = width << bit;
            sums.copy_within(..known, known);
            for sum in sums[known..2 * known].chunks_exact_mut(width) {
                add_row(sum, row);
            }
            sorted = merge_shifted(&sorted, row[tight] as i64, 1 << bit);
        }
        Self { sums, sorted }
    }

    fn row(&self, problem: &Problem<'_>, mask: u32) -> &[i64] {
        let start = mask as usize * problem.width();
        &self.sums[start..start + problem.width()]
    }
}

/// Joins a sorted list of sums with itself, shifted by one more item; sorted again, without sorting.
fn merge_shifted(sorted: &[(i64, u32)], shift: i64, bit: u32) -> Vec<(i64, u32)> {
    let mut merged = Vec::with_capacity(2 * sorted.len());
    let mut plain = sorted.iter().copied().peekable();
    for &(sum, mask) in sorted {
        while let Some(next) = plain.next_if(|next| next.0 <= sum + shift) {
            merged.push(next);
        }
        merged.push((sum + shift, mask | bit));
    }
    merged.extend(plain);
    merged
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
            let (mut rng, mut budget) = (SplitMix64::new(0), Budget::work(1));
            let best = brute_force(&instance);
            let found = find(&problem, &partition, (0, 1), best, &mut rng, &mut budget).unwrap();
            prop_assert_eq!(Partition::from_groups(&problem, found.to_vec()).makespan(), best);
            if best > 0 {
                prop_assert!(find(&problem, &partition, (0, 1), best - 1, &mut rng, &mut budget).is_none());
            }
        }
    }
}
