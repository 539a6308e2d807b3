//! Assigns microbatches to ranks and orders them in time.
//!
//! A partition evens the groups; ranks and order are chosen here. Rank loads are evened in every module, then
//! small microbatches go to both ends of the step, where they shorten pipeline fill and drain.

use std::cmp::Reverse;

/// Maximum number of swaps between the slowest and a different rank.
const SWAPS_MAX: usize = 256;

/// Assigns groups to ranks, equally many each, so that the slowest rank is fast.
///
/// - `loads_ns`: `[groups * modules]`, nanoseconds; `groups` is a multiple of `ranks`
/// - returns the groups on every rank
///
/// Groups are assigned by largest module, longest first, to the rank with the smallest resulting maximum that
/// has room; then swaps between the slowest rank and any other rank improve the result. Ties go to the lower
/// index.
///
/// # Panics
/// If `modules` or `ranks` is 0, or the groups do not divide by `ranks`.
#[must_use]
pub fn assign_ranks(loads_ns: &[u64], modules: usize, ranks: usize) -> Vec<Vec<u32>> {
    let groups = loads_ns.len() / modules;
    assert!(groups.is_multiple_of(ranks), "{groups} groups for {ranks} ranks");
    let mut assigned = Ranks::new(loads_ns, modules, ranks);
    let mut order: Vec<u32> = (0..groups as u32).collect();
    order.sort_by_key(|&group| Reverse(assigned.load(group).iter().copied().max()));
    for group in order {
        let has_room = |rank: &usize| assigned.groups[*rank].len() < groups / ranks;
        let rank = (0..ranks).filter(has_room).min_by_key(|&rank| assigned.value_with(rank, group));
        // The groups divide evenly by the ranks, so that some rank always has room.
        assigned.add(rank.unwrap_or(0), group);
    }
    for _ in 0..SWAPS_MAX {
        if !assigned.relieve_slowest() {
            break;
        }
    }
    assigned.groups
}

/// Orders microbatches with the largest in the middle, so that pipeline fill and drain are short.
///
/// - `sizes_ns`: `[microbatches]`, nanoseconds
/// - returns the microbatches in execution order: ascending up to the largest, then descending
///
/// Among equal microbatches, the lower index is nearer to an end.
#[must_use]
pub fn peak_order(sizes_ns: &[u64]) -> Vec<u32> {
    let mut ascending: Vec<u32> = (0..sizes_ns.len() as u32).collect();
    ascending.sort_by_key(|&microbatch| sizes_ns[microbatch as usize]);
    let front = ascending.iter().step_by(2);
    // Alternately to the front and to the back, so that both ends stay small.
    let back = ascending.iter().skip(1).step_by(2).rev();
    front.chain(back).copied().collect()
}

/// Orders microbatches so that windows of consecutive microbatches are even.
///
/// - `sizes`: `[microbatches]`, units or bytes
/// - `window`: at least 1
/// - returns the microbatches in execution order: for a window of 2 the largest, the smallest, the second
///   largest and so on
///
/// A window has one place from every residue class of `window`. So the first class gets the largest
/// microbatches, the second class the next largest and so on, descending and ascending in turn.
pub(super) fn spread_order(sizes: &[u64], window: usize) -> Vec<u32> {
    let mut descending: Vec<u32> = (0..sizes.len() as u32).collect();
    descending.sort_by_key(|&microbatch| Reverse(sizes[microbatch as usize]));
    let mut order = vec![0; sizes.len()];
    let mut rest = &descending[..];
    for class in 0..window.min(sizes.len()) {
        let places = (class..sizes.len()).step_by(window);
        let (own, others) = rest.split_at(places.len());
        rest = others;
        for (nth, place) in places.enumerate() {
            order[place] = if class % 2 == 0 { own[nth] } else { own[own.len() - 1 - nth] };
        }
    }
    order
}

/// Ranks under construction, while groups are assigned to them.
struct Ranks<'a> {
    loads_ns: &'a [u64],
    modules: usize,
    groups: Vec<Vec<u32>>,
    /// Summed loads, `[ranks * modules]`.
    sums: Vec<u64>,
    /// Groups on each rank by load in each module, with positions, `[ranks * modules]`; empty if not known.
    by_load: Vec<Vec<(u64, u32)>>,
}

impl<'a> Ranks<'a> {
    fn new(loads_ns: &'a [u64], modules: usize, ranks: usize) -> Self {
        let (groups, by_load) = (vec![Vec::new(); ranks], vec![Vec::new(); ranks * modules]);
        Self { loads_ns, modules, groups, sums: vec![0; ranks * modules], by_load }
    }

    fn load(&self, group: u32) -> &[u64] {
        let start = group as usize * self.modules;
        &self.loads_ns[start..start + self.modules]
    }

    fn sum(&self, rank: usize) -> &[u64] {
        &self.sums[rank * self.modules..(rank + 1) * self.modules]
    }

    fn value(&self, rank: usize) -> u64 {
        self.sum(rank).iter().copied().max().unwrap_or(0)
    }

    /// Returns the rank's largest module with an additional group.
    fn value_with(&self, rank: usize, group: u32) -> u64 {
        let sums = self.sum(rank).iter().zip(self.load(group));
        sums.map(|(sum, load)| sum + load).max().unwrap_or(0)
    }

    /// Returns the rank's largest module with a group replaced.
    fn value_swapped(&self, rank: usize, less: u32, more: u32) -> u64 {
        let loads = self.load(less).iter().zip(self.load(more));
        let sums = self.sum(rank).iter().zip(loads);
        sums.map(|(sum, (less, more))| sum - less + more).max().unwrap_or(0)
    }

    fn add(&mut self, rank: usize, group: u32) {
        let start = group as usize * self.modules;
        for (module, load) in self.loads_ns[start..start + self.modules].iter().enumerate() {
            self.sums[rank * self.modules + module] += load;
        }
        self.groups[rank].push(group);
        self.by_load[rank * self.modules..(rank + 1) * self.modules].iter_mut().for_each(Vec::clear);
    }

    fn take(&mut self, rank: usize, position: usize) -> u32 {
        let group = self.groups[rank].swap_remove(position);
        self.by_load[rank * self.modules..(rank + 1) * self.modules].iter_mut().for_each(Vec::clear);
        let start = group as usize * self.modules;
        for (module, load) in self.loads_ns[start..start + self.modules].iter().enumerate() {
            self.sums[rank * self.modules + module] -= load;
        }
        group
    }

    /// Applies the best swap for the slowest rank's groups; returns whether a swap helps.
    fn relieve_slowest(&mut self) -> bool {
        let ranks = self.groups.len();
        let Some(slow) = (0..ranks).min_by_key(|&rank| Reverse(self.value(rank))) else { return false };
        // The module that makes the rank slow leaves the fewest groups to swap.
        let sums = self.sum(slow).iter().enumerate();
        let module = sums.min_by_key(|(_, sum)| Reverse(**sum)).map_or(0, |(module, _)| module);
        for rank in 0..ranks {
            let cell = rank * self.modules + module;
            if self.by_load[cell].is_empty() {
                self.by_load[cell] = self.sorted(rank, module);
            }
        }
        let mut best = Swap { value: self.value(slow), places: None };
        // The fewer loads a rank has, the more it can take.
        let mut others: Vec<usize> = (0..ranks).filter(|&rank| rank != slow).collect();
        others.sort_by_key(|&rank| self.sum(rank)[module]);
        for other in others {
            for gives in 0..self.groups[slow].len() {
                self.find_swap([slow, other], module, gives, &mut best);
            }
        }
        let Some((other, gives, takes)) = best.places else { return false };
        let (given, taken) = (self.take(slow, gives), self.take(other, takes));
        self.add(slow, taken);
        self.add(other, given);
        true
    }

    /// Lists a rank's groups by load in a module: the load, and the position in the rank.
    fn sorted(&self, rank: usize, module: usize) -> Vec<(u64, u32)> {
        let groups = self.groups[rank].iter().zip(0..);
        let mut sorted: Vec<(u64, u32)> = groups.map(|(&group, at)| (self.load(group)[module], at)).collect();
        sorted.sort_unstable();
        sorted
    }

    /// Looks for a better swap between a group on the slowest rank and a group on a different rank.
    fn find_swap(&self, [slow, other]: [usize; 2], module: usize, gives: usize, best: &mut Swap) {
        let given = self.groups[slow][gives];
        let [slow_ns, other_ns] = [slow, other].map(|rank| self.sum(rank)[module]);
        // Both ranks have as much after a swap as before; the slower one at least half of it.
        let least = (slow_ns + other_ns).div_ceil(2);
        if !best.is_worse_than(least, (other, gives, 0)) {
            return;
        }
        // Without the given group. The larger the load that is taken, the longer the one and the shorter the
        // other: loads are tried from where both are equal, to each side until one of them is too long.
        let (slow_ns, other_ns) = (slow_ns - self.load(given)[module], other_ns + self.load(given)[module]);
        let candidates = &self.by_load[other * self.modules + module];
        let middle = candidates.partition_point(|(load, _)| slow_ns + load < other_ns - load);
        for &(load, takes) in &candidates[middle..] {
            if slow_ns + load > best.value {
                break;
            }
            self.try_swap([slow, other], [gives, takes as usize], best);
        }
        for &(load, takes) in candidates[..middle].iter().rev() {
            if other_ns - load > best.value {
                break;
            }
            self.try_swap([slow, other], [gives, takes as usize], best);
        }
    }

    fn try_swap(&self, [slow, other]: [usize; 2], [gives, takes]: [usize; 2], best: &mut Swap) {
        let (given, taken) = (self.groups[slow][gives], self.groups[other][takes]);
        let value = self.value_swapped(slow, given, taken);
        if value > best.value {
            return;
        }
        let value = value.max(self.value_swapped(other, taken, given));
        if best.is_worse_than(value, (other, gives, takes)) {
            *best = Swap { value, places: Some((other, gives, takes)) };
        }
    }
}

impl Swap {
    /// Whether a swap is better; ties go to the lower places, and to no swap.
    fn is_worse_than(&self, value: u64, places: (usize, usize, usize)) -> bool {
        value < self.value || value == self.value && self.places.is_some_and(|own| places < own)
    }
}

/// Swap between two groups, and the larger rank value after it.
struct Swap {
    value: u64,
    /// Second rank, and the positions of the exchanged groups on the slowest and on the second rank.
    places: Option<(usize, usize, usize)>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranks_get_equal_counts_and_loads() {
        let loads_ns = [9, 8, 6, 4, 2, 1];
        let ranks = assign_ranks(&loads_ns, 1, 2);
        let sums: Vec<u64> =
            ranks.iter().map(|rank| rank.iter().map(|&group| loads_ns[group as usize]).sum()).collect();
        assert_eq!(sums, [15, 15]);
        assert!(ranks.iter().all(|rank| rank.len() == 3));
    }

    proptest! {
        /// The best swap over all pairs, the first in case of ties.
        #[test]
        fn the_best_swap_is_found(
            loads_ns in prop::collection::vec(0_u64..40, 24), modules in 1_usize..3, ranks in 2_usize..4,
        ) {
            let groups = 24 / modules / ranks * ranks;
            let loads_ns = &loads_ns[..groups * modules];
            let mut dealt = Ranks::new(loads_ns, modules, ranks);
            (0..groups as u32).for_each(|group| dealt.add(group as usize % ranks, group));
            let slow = (0..ranks).min_by_key(|&rank| Reverse(dealt.value(rank))).unwrap();
            let mut best = (dealt.value(slow), None);
            for other in (0..ranks).filter(|&rank| rank != slow) {
                for (gives, &given) in dealt.groups[slow].iter().enumerate() {
                    for (takes, &taken) in dealt.groups[other].iter().enumerate() {
                        let value = dealt.value_swapped(slow, given, taken);
                        let value = value.max(dealt.value_swapped(other, taken, given));
                        if value < best.0 {
                            best = (value, Some((other, given, taken, gives, takes)));
                        }
                    }
                }
            }
            let before = dealt.groups.clone();
            prop_assert_eq!(dealt.relieve_slowest(), best.1.is_some());
            if let Some((other, given, taken, gives, takes)) = best.1 {
                prop_assert!(dealt.groups[slow].contains(&taken) && dealt.groups[other].contains(&given));
                prop_assert_eq!((before[slow][gives], before[other][takes]), (given, taken));
            } else {
                prop_assert_eq!(dealt.groups, before);
            }
        }
    }

    #[test]
    fn both_modules_are_evened() {
        assert_eq!(assign_ranks(&[9, 1, 9, 1, 1, 9, 1, 9], 2, 2), [[0, 2], [1, 3]]);
    }

    #[test]
    fn small_microbatches_run_first_and_last() {
        assert_eq!(peak_order(&[5, 1, 4, 2, 3]), [1, 4, 0, 2, 3]);
        assert_eq!(peak_order(&[]), [0_u32; 0]);
    }

    #[test]
    fn windows_of_a_spread_order_are_even() {
        assert_eq!(spread_order(&[1, 2, 3, 4, 5, 6], 2), [5, 0, 4, 1, 3, 2]);
        let sizes = [9, 9, 9, 1, 1, 1, 1, 1];
        for (window, most) in [(1, 9), (2, 10), (3, 11), (4, 20), (8, 32), (9, 32)] {
            let order = spread_order(&sizes, window);
            let sizes: Vec<u64> = order.iter().map(|&microbatch| sizes[microbatch as usize]).collect();
            let sums = sizes.windows(window.min(8)).map(|window| window.iter().sum::<u64>());
            assert_eq!(sums.max(), Some(most), "{window}: {sizes:?}");
        }
        assert_eq!(spread_order(&[], 2), [0_u32; 0]);
    }
}
