//! Assigns microbatches to ranks and orders them in time.
//!
//! A partition evens the groups; the ranks and the order are chosen here. Rank loads are evened in every
//! module, then small microbatches go to both ends of the step, where they shorten filling and draining the
//! pipeline.

use std::cmp::Reverse;

/// Most swaps between the slowest rank and another.
const SWAPS_MAX: usize = 256;

/// Assigns groups to ranks, equally many each, so that the slowest rank is fast.
///
/// - `loads_ns`: `[groups * modules]`, nanoseconds; `groups` is a multiple of `ranks`
/// - returns the groups of every rank
///
/// Groups go by their largest module, longest first, to the rank with the smallest resulting maximum that
/// has room; then swaps between the slowest rank and any other improve on it. Ties go to the lower index.
///
/// # Panics
/// If `modules` or `ranks` is 0, or the groups do not divide by `ranks`.
#[must_use]
pub fn assign_ranks(loads_ns: &[u64], modules: usize, ranks: usize) -> Vec<Vec<u32>> {
    let groups = loads_ns.len() / modules;
    assert!(groups.is_multiple_of(ranks), "{groups} groups for {ranks} ranks");
    let mut assigned =
        Ranks { loads_ns, modules, groups: vec![Vec::new(); ranks], sums: vec![0; ranks * modules] };
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

/// Orders microbatches with the largest in the middle, so that filling and draining the pipeline is short.
///
/// - `sizes_ns`: `[microbatches]`, nanoseconds
/// - returns the microbatches in the order to run: ascending up to the largest, then descending
///
/// Of equal microbatches, the one with the lower index is nearer to an end.
#[must_use]
pub fn peak_order(sizes_ns: &[u64]) -> Vec<u32> {
    let mut ascending: Vec<u32> = (0..sizes_ns.len() as u32).collect();
    ascending.sort_by_key(|&microbatch| sizes_ns[microbatch as usize]);
    let front = ascending.iter().step_by(2);
    // Alternately to the front and to the back, so that both ends stay small.
    let back = ascending.iter().skip(1).step_by(2).rev();
    front.chain(back).copied().collect()
}

/// Orders microbatches so that windows of consecutive ones are even.
///
/// - `sizes`: `[microbatches]`, units or bytes
/// - `window`: at least 1
/// - returns the microbatches in the order to run: for a window of 2 the largest, the smallest, the second
///   largest and so on
///
/// A window has one place of every residue class of `window`. So the classes get the largest microbatches,
/// the next ones and so on, descending and ascending in turn.
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

/// Ranks while groups are assigned to them.
struct Ranks<'a> {
    loads_ns: &'a [u64],
    modules: usize,
    groups: Vec<Vec<u32>>,
    /// Summed loads, `[ranks * modules]`.
    sums: Vec<u64>,
}

impl Ranks<'_> {
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

    /// Returns the rank's largest module with one more group.
    fn value_with(&self, rank: usize, group: u32) -> u64 {
        let sums = self.sum(rank).iter().zip(self.load(group));
        sums.map(|(sum, load)| sum + load).max().unwrap_or(0)
    }

    /// Returns the rank's largest module with one group replaced.
    fn value_swapped(&self, rank: usize, less: u32, more: u32) -> u64 {
        let loads = self.load(less).iter().zip(self.load(more));
        let sums = self.sum(rank).iter().zip(loads);
        sums.map(|(sum, (less, more))| sum - less + more).max().unwrap_or(0)
    }

    /// Returns the least load of a rank's groups in each module.
    fn least_loads(&self, rank: usize) -> Vec<u64> {
        let groups = &self.groups[rank];
        let least = |module: usize| groups.iter().map(|&group| self.load(group)[module]).min();
        (0..self.modules).map(|module| least(module).unwrap_or(0)).collect()
    }

    fn add(&mut self, rank: usize, group: u32) {
        let start = group as usize * self.modules;
        for (module, load) in self.loads_ns[start..start + self.modules].iter().enumerate() {
            self.sums[rank * self.modules + module] += load;
        }
        self.groups[rank].push(group);
    }

    fn take(&mut self, rank: usize, position: usize) -> u32 {
        let group = self.groups[rank].swap_remove(position);
        let start = group as usize * self.modules;
        for (module, load) in self.loads_ns[start..start + self.modules].iter().enumerate() {
            self.sums[rank * self.modules + module] -= load;
        }
        group
    }

    /// Makes the best swap of the slowest rank's groups; returns whether one helps.
    fn relieve_slowest(&mut self) -> bool {
        let ranks = self.groups.len();
        let Some(slow) = (0..ranks).min_by_key(|&rank| Reverse(self.value(rank))) else { return false };
        let mut best = (self.value(slow), None);
        for other in (0..ranks).filter(|&rank| rank != slow) {
            let least_ns = self.least_loads(other);
            for (gives, &given) in self.groups[slow].iter().enumerate() {
                // No group of the other rank relieves the slowest enough.
                let kept = self.sum(slow).iter().zip(self.load(given)).zip(&least_ns);
                if kept.map(|((sum, less), more)| sum - less + more).max() >= Some(best.0) {
                    continue;
                }
                for (takes, &taken) in self.groups[other].iter().enumerate() {
                    let slow_value = self.value_swapped(slow, given, taken);
                    if slow_value < best.0 {
                        let value = slow_value.max(self.value_swapped(other, taken, given));
                        if value < best.0 {
                            best = (value, Some((other, gives, takes)));
                        }
                    }
                }
            }
        }
        let Some((other, gives, takes)) = best.1 else { return false };
        let (given, taken) = (self.take(slow, gives), self.take(other, takes));
        self.add(slow, taken);
        self.add(other, given);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_get_equal_counts_and_loads() {
        let loads_ns = [9, 8, 6, 4, 2, 1];
        let ranks = assign_ranks(&loads_ns, 1, 2);
        let sums: Vec<u64> =
            ranks.iter().map(|rank| rank.iter().map(|&group| loads_ns[group as usize]).sum()).collect();
        assert_eq!(sums, [15, 15]);
        assert!(ranks.iter().all(|rank| rank.len() == 3));
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
