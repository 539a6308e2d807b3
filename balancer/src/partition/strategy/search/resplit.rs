//! Finds the best split of two groups' items into two, by meeting in the middle.
//!
//! All subset sums for each group are listed, sorted by one column. A matching split is a pair of sums inside
//! a window, found by walking the first list up and the second list down; the remaining columns are checked
//! for pairs inside the window. Lists are kept until their group changes, because most groups are tried with
//! many partners.
//!
//! A group with more than [`POOL_ITEMS_MAX`](super::subset_sums::POOL_ITEMS_MAX) items takes part with a
//! random choice, the *pool*; the remaining items stay.

use super::subset_sums::{SubsetSums, Sum};
use crate::budget::Budget;
use crate::partition::problem::{Partition, Problem};
use dflop_costmodel::random::SplitMix64;

/// Maximum number of sum pairs inside the window that are checked before the best so far is returned.
const PAIRS_MAX: u64 = 4096;

/// Kind of split to find within the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Split whose larger value is smallest.
    Best,
    /// Any split except the present, from a random position on.
    Another,
}

/// Groups whose lists are kept, by index remainder: more lists would outgrow the caches.
const SLOTS: usize = 64;

/// Bounds for the first group's share of both pools: inclusive, by column.
#[derive(Default)]
struct Window {
    bounds: Vec<(i64, i64)>,
    /// Sums over both pools.
    total: Vec<i64>,
}

/// Resplits pairs of groups; keeps recent groups' lists.
#[derive(Default)]
pub(super) struct Resplitter {
    /// Lists for [`SLOTS`] groups by remainder, and one list for a partner with the same remainder.
    slots: Vec<SubsetSums>,
    merged: Vec<Sum>,
    window: Window,
}

/// Items from each pool that the first group gets, as bits.
type Masks = [u32; 2];

impl Resplitter {
    /// Finds a split of two groups whose values are at most `target`.
    ///
    /// Exact unless a group takes part with a pool or [`PAIRS_MAX`] sum pairs are close. Neither group ends
    /// empty.
    ///
    /// # Source
    /// Horowitz and Sahni, "Computing partitions with applications to the knapsack problem", J. ACM 21,
    /// 1974.
    pub(super) fn find(
        &mut self,
        (problem, partition): (&Problem<'_>, &Partition),
        pair: (usize, usize),
        (target, wanted): (u64, Wanted),
        rng: &mut SplitMix64,
        budget: &mut Budget,
    ) -> Option<[Vec<u32>; 2]> {
        budget.spend(1);
        let tight = tight_column(problem, partition, pair, target)?;
        self.slots.resize_with(SLOTS + 1, SubsetSums::default);
        let first = pair.0 % SLOTS;
        // Two groups with the same remainder would share a slot; the extra slot serves the second group.
        let second = if pair.1 % SLOTS == first { SLOTS } else { pair.1 % SLOTS };
        for (slot, group) in [(first, pair.0), (second, pair.1)] {
            let items = &partition.groups[group];
            self.slots[slot].refresh(problem, items, tight, &mut self.merged, rng, budget);
        }
        let lists = [&self.slots[first], &self.slots[second]];
        self.window.set(problem, lists, target as i64);
        let found = match wanted {
            Wanted::Best => best(problem, lists, &mut self.window, tight, budget),
            Wanted::Another => another(lists, &self.window, tight, rng, budget),
        };
        found.map(|masks| split(lists, masks))
    }

    /// Draws a group's pool again at the next split, if the pool is a random choice.
    pub(super) fn redraw(&mut self, group: usize) {
        if let Some(list) = self.slots.get_mut(group % SLOTS).filter(|list| list.keeps_some()) {
            list.forget();
        }
    }
}

/// Walks the first list up and the second down; every split that fits narrows the window.
fn best(
    problem: &Problem<'_>,
    lists: [&SubsetSums; 2],
    window: &mut Window,
    tight: usize,
    budget: &mut Budget,
) -> Option<Masks> {
    let (mut found, mut pairs) = (None, 0);
    let [ups, downs] = lists.map(|list| list.sorted(tight));
    let mut end = downs.len();
    for up in ups {
        while end > 0 && up.sum + downs[end - 1].sum > window.bounds[tight].1 {
            end -= 1;
        }
        for down in downs[..end].iter().rev() {
            pairs += 1;
            if up.sum + down.sum < window.bounds[tight].0 {
                break;
            }
            let masks = [up.mask, down.mask];
            if window.contains(lists, masks) && fills_both(lists, masks) {
                let value = window.value(problem, lists, masks);
                // Only strictly better splits count from here on.
                window.set(problem, lists, value - 1);
                found = Some(masks);
            }
        }
        if end == 0 || pairs >= PAIRS_MAX {
            break;
        }
    }
    budget.spend((ups.len() + downs.len()) as u64 / 2 + pairs);
    found
}

/// Walks the first list up from a random position and returns the first split that fits and is new.
fn another(
    lists: [&SubsetSums; 2],
    window: &Window,
    tight: usize,
    rng: &mut SplitMix64,
    budget: &mut Budget,
) -> Option<Masks> {
    let [ups, downs] = lists.map(|list| list.sorted(tight));
    let (least, most) = window.bounds[tight];
    // The present split and its mirror image, which does not count as new either.
    let present = [lists[0].all(), 0];
    let mirrored = [0, lists[1].all()];
    let start = rng.below(ups.len());
    let mut pairs = 0;
    for part in [&ups[start..], &ups[..start]] {
        let mut end = part.first().map_or(0, |up| downs.partition_point(|down| up.sum + down.sum <= most));
        for up in part {
            while end > 0 && up.sum + downs[end - 1].sum > most {
                end -= 1;
            }
            for down in downs[..end].iter().rev() {
                pairs += 1;
                let masks = [up.mask, down.mask];
                if up.sum + down.sum < least || pairs >= PAIRS_MAX {
                    break;
                }
                let is_new = masks != present && masks != mirrored;
                if is_new && window.contains(lists, masks) && fills_both(lists, masks) {
                    budget.spend((ups.len() + downs.len()) as u64 / 4 + pairs);
                    return Some(masks);
                }
            }
        }
    }
    budget.spend((ups.len() + downs.len()) as u64 / 2 + pairs);
    None
}

/// Returns the largest module over both groups together, where the window is narrowest; `None` if they hold
/// too much for any split.
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

/// Whether neither group is empty.
fn fills_both(lists: [&SubsetSums; 2], masks: Masks) -> bool {
    let is_all = masks == lists.map(SubsetSums::all);
    (masks != [0, 0] || lists[0].keeps_some()) && (!is_all || lists[1].keeps_some())
}

/// Lists the items in both groups after a split.
fn split(lists: [&SubsetSums; 2], masks: Masks) -> [Vec<u32>; 2] {
    let mut groups = lists.map(|list| list.kept().to_vec());
    for (list, mask) in lists.into_iter().zip(masks) {
        for (bit, item) in list.pool().iter().enumerate() {
            groups[usize::from(mask >> bit & 1 == 0)].push(*item);
        }
    }
    groups
}

impl Window {
    /// Bounds the first group's share so that both groups stay within the limits and the target.
    fn set(&mut self, problem: &Problem<'_>, lists: [&SubsetSums; 2], target: i64) {
        self.bounds.clear();
        self.total.clear();
        let [first, second] = lists;
        for (column, limit) in problem.limits.iter().enumerate() {
            let is_module = column < problem.modules;
            let limit = if is_module { target } else { (*limit).min(i64::MAX as u64) as i64 };
            let total = first.pool_load()[column] + second.pool_load()[column];
            let least = second.kept_load()[column] + total - limit;
            self.bounds.push((least, limit - first.kept_load()[column]));
            self.total.push(total);
        }
    }

    fn contains(&self, lists: [&SubsetSums; 2], masks: Masks) -> bool {
        let (first, second) = (lists[0].row(masks[0]), lists[1].row(masks[1]));
        let mut is_inside = true;
        for ((least, most), (first, second)) in self.bounds.iter().zip(first.iter().zip(second)) {
            let sum = first + second;
            is_inside &= *least <= sum && sum <= *most;
        }
        is_inside
    }

    /// Returns the larger value of both groups.
    fn value(&self, problem: &Problem<'_>, lists: [&SubsetSums; 2], masks: Masks) -> i64 {
        let larger = |column: usize| {
            let gets = lists[0].row(masks[0])[column] + lists[1].row(masks[1])[column];
            let other = lists[1].kept_load()[column] + self.total[column] - gets;
            (lists[0].kept_load()[column] + gets).max(other)
        };
        (0..problem.modules).map(larger).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};
    use proptest::prelude::*;

    /// Finds the best split value by trying all splits.
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
            let mut find = |target| {
                let wanted = (target, Wanted::Best);
                splitter.find((&problem, &partition), (0, 1), wanted, &mut rng, &mut budget)
            };
            let found = find(best).unwrap();
            prop_assert_eq!(Partition::from_groups(&problem, found.to_vec()).makespan(), best);
            if best > 0 {
                prop_assert!(find(best - 1).is_none());
            }
        }
    }
}
