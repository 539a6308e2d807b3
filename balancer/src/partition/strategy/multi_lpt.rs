//! Longest processing time first on all modules at once (mdLPT).
//!
//! Items are sorted by largest module, longest first; each goes to the group whose largest module stays
//! smallest. Capped columns take part, scaled so that a full cap weighs as much as the lower bound.
//!
//! The scan over the groups is the whole cost, at most `items * groups * columns`. It runs on `f32` loads
//! laid out for the vector units: blocks of [`LANES`] groups, column by column. It uses only additions and
//! comparisons, which IEEE 754 defines to the bit, so every machine picks the same group. Loads are also kept
//! in integers, and every value that is compared with a limit or returned comes from the integers.

use super::{Partitioner, Solution, within};
use crate::budget::Budget;
use crate::error::Result;
use crate::partition::problem::{Partition, Problem};
use std::cmp::Reverse;

/// Longest processing time first, on all modules at once.
#[derive(Debug)]
pub(super) struct MultiLpt;

impl Partitioner for MultiLpt {
    fn name(&self) -> &'static str {
        "multi_lpt"
    }

    fn solve(&self, problem: &Problem<'_>, _budget: &mut Budget) -> Result<Solution> {
        Ok(Solution::new(problem, within(problem, assign(problem))?))
    }
}

/// Number of groups in a block; fixed, independent of the machine's vectors.
const LANES: usize = 16;

/// Assigns all items; returns `None` if an item fits no group within the caps.
///
/// Ties: the item with the lower index first, the group with the lower index.
///
/// # Source
/// Graham's rule, 1969, with the maximum over dimensions as in Chekuri and Khanna, "On multidimensional
/// packing problems", SIAM J. Comput. 33, 2004.
pub(crate) fn assign(problem: &Problem<'_>) -> Option<Partition> {
    let scales = Scales::new(problem);
    let mut items: Vec<u32> = (0..problem.items as u32).collect();
    // A stable sort, so that ties go to the lower index.
    items.sort_by_cached_key(|&item| Reverse(scales.size(problem.row(item))));
    let seeds = problem.groups.min(problem.items);
    let mut shortlist = Shortlist::new(problem.groups, problem.width());
    let mut partition = Partition::empty(problem);
    let mut scaled = vec![0.0; problem.width()];
    for (place, item) in items.into_iter().enumerate() {
        scales.scale(problem.row(item), &mut scaled);
        // The longest items seed the groups, so no group is empty.
        let mut group = if place < seeds { place } else { shortlist.find(&scaled) };
        if problem.has_caps() && !partition.has_room(problem, group, item) {
            group = best_with_room(problem, &partition, item)?;
        }
        shortlist.add(group, &scaled);
        partition.add(problem, group, item);
    }
    Some(partition)
}

/// Returns the group with room whose value stays smallest, lowest index on ties.
fn best_with_room(problem: &Problem<'_>, partition: &Partition, item: u32) -> Option<usize> {
    let row = problem.row(item);
    let value = |group: usize| {
        let sums = partition.load(problem, group).iter().zip(row).take(problem.modules);
        sums.map(|(load, time)| load + time).max()
    };
    (0..problem.groups)
        .filter(|&group| partition.has_room(problem, group, item))
        .min_by_key(|&group| value(group))
}

/// Units that make columns comparable: a module in lower bounds, a capped column in caps.
struct Scales {
    bound_ns: u64,
    units: Vec<f64>,
    limits: Vec<u64>,
    modules: usize,
}

impl Scales {
    fn new(problem: &Problem<'_>) -> Self {
        let bound_ns = problem.bound.ns.max(1);
        let limits = problem.limits[problem.modules..].to_vec();
        let mut units = vec![bound_ns as f64; problem.modules];
        units.extend(limits.iter().map(|&limit| limit.max(1) as f64));
        Self { bound_ns, units, limits, modules: problem.modules }
    }

    fn scale(&self, row: &[u64], scaled: &mut [f32]) {
        for ((scaled, value), unit) in scaled.iter_mut().zip(row).zip(&self.units) {
            *scaled = (*value as f64 / unit) as f32;
        }
    }

    /// Returns the largest column in nanoseconds, an integer: it orders the items.
    fn size(&self, row: &[u64]) -> u64 {
        let (times, capped) = row.split_at(self.modules);
        let longest = times.iter().copied().max().unwrap_or(0);
        let share = |(&value, &limit): (&u64, &u64)| {
            (u128::from(value) * u128::from(self.bound_ns) / u128::from(limit.max(1))) as u64
        };
        capped.iter().zip(&self.limits).map(share).fold(longest, u64::max)
    }
}

/// Scaled group loads, for a fast scan.
///
/// The smallest loads in every block are kept as well, column by column. No group in a block ends below the
/// value that an item would make with the smallest loads, so most blocks are skipped; the result equals a
/// full scan.
struct Shortlist {
    /// Loads by block of groups; groups beyond the last are infinitely loaded.
    groups: Lanes,
    /// Smallest loads in every block; blocks beyond the last are infinitely loaded.
    blocks: Lanes,
    /// Lower bound on each block's value with the current item added.
    floors: Vec<[f32; LANES]>,
}

/// Load columns in chunks: `[chunks][width]`, [`LANES`] entries each.
struct Lanes {
    columns: Vec<[f32; LANES]>,
    width: usize,
}

impl Shortlist {
    fn new(groups: usize, width: usize) -> Self {
        let groups = Lanes::new(groups, width);
        let blocks = Lanes::new(groups.chunks(), width);
        Self { floors: vec![[0.0; LANES]; blocks.chunks()], groups, blocks }
    }

    fn add(&mut self, group: usize, row: &[f32]) {
        let block = group / LANES;
        for (column, value) in row.iter().enumerate() {
            let lanes = self.groups.lanes(block, column);
            lanes[group % LANES] += value;
            // The whole block again: the changed group may have had the smallest load.
            let smallest = smallest(*lanes);
            self.blocks.lanes(block / LANES, column)[block % LANES] = smallest;
        }
    }

    /// Returns the first group whose largest column is smallest with `row` added.
    fn find(&mut self, row: &[f32]) -> usize {
        let (mut floor, mut first) = (f32::INFINITY, 0);
        for (chunk, floors) in self.floors.iter_mut().enumerate() {
            *floors = worst(self.blocks.chunk(chunk), row);
            let smallest = smallest(*floors);
            if smallest < floor {
                (floor, first) = (smallest, chunk * LANES + lane_position(floors, smallest));
            }
        }
        let mut best = (smallest(worst(self.groups.chunk(first), row)), first);
        for (chunk, floors) in self.floors.iter().enumerate() {
            if smallest(*floors) > best.0 {
                continue;
            }
            for (lane, floor) in floors.iter().enumerate() {
                let block = chunk * LANES + lane;
                // A block that only ties matters if it comes first: a full scan would take it.
                if *floor < best.0 || (*floor <= best.0 && block < best.1) {
                    let value = smallest(worst(self.groups.chunk(block), row));
                    if value < best.0 || (value <= best.0 && block < best.1) {
                        best = (value, block);
                    }
                }
            }
        }
        best.1 * LANES + lane_position(&worst(self.groups.chunk(best.1), row), best.0)
    }
}

impl Lanes {
    /// Creates `entries` entries of load 0.
    fn new(entries: usize, width: usize) -> Self {
        let mut columns = vec![[f32::INFINITY; LANES]; entries.div_ceil(LANES) * width];
        for entry in 0..entries {
            for lanes in &mut columns[entry / LANES * width..][..width] {
                lanes[entry % LANES] = 0.0;
            }
        }
        Self { columns, width }
    }

    fn chunks(&self) -> usize {
        self.columns.len() / self.width
    }

    fn chunk(&self, chunk: usize) -> &[[f32; LANES]] {
        &self.columns[chunk * self.width..(chunk + 1) * self.width]
    }

    fn lanes(&mut self, chunk: usize, column: usize) -> &mut [f32; LANES] {
        &mut self.columns[chunk * self.width + column]
    }
}

/// Returns the first lane that is `value` or less.
fn lane_position(lanes: &[f32; LANES], value: f32) -> usize {
    lanes.iter().position(|lane| *lane <= value).unwrap_or(0)
}

/// Adds `row` to every lane and returns the largest column per lane.
#[inline]
fn worst(columns: &[[f32; LANES]], row: &[f32]) -> [f32; LANES] {
    let mut worst = [0.0; LANES];
    for (lanes, value) in columns.iter().zip(row) {
        for (worst, load) in worst.iter_mut().zip(lanes) {
            *worst = larger(*worst, load + value);
        }
    }
    worst
}

/// Returns the smallest lane, by halves: a fold from left to right would be a scalar chain.
#[inline]
fn smallest(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = smaller(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// Returns the larger by one vector instruction, unlike `f32::max`, which also handles NaN.
#[inline]
fn larger(left: f32, right: f32) -> f32 {
    if left > right { left } else { right }
}

/// Returns the smaller by one vector instruction, unlike `f32::min`, which also handles NaN.
#[inline]
fn smaller(left: f32, right: f32) -> f32 {
    if left < right { left } else { right }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn blocks_that_are_passed_over_hold_no_better_group(
            items in prop::collection::vec((0..30_u8, 0..30_u8), 1..400),
            groups in 1..600_usize,
        ) {
            let mut shortlist = Shortlist::new(groups, 2);
            let mut loads = vec![[0.0_f32; 2]; groups];
            for (first, second) in items {
                let row = [f32::from(first), f32::from(second)];
                let value = |load: &[f32; 2]| larger(load[0] + row[0], load[1] + row[1]);
                let best = loads.iter().map(value).fold(f32::INFINITY, smaller);
                let found = shortlist.find(&row);
                prop_assert_eq!(Some(found), loads.iter().position(|load| value(load) <= best));
                shortlist.add(found, &row);
                loads[found][0] += row[0];
                loads[found][1] += row[1];
            }
        }
    }

    fn groups(instance: &Instance, caps: Caps) -> Option<Vec<Vec<u32>>> {
        let problem = Problem::new(instance, &caps).unwrap();
        assign(&problem).map(Partition::into_groups)
    }

    #[test]
    fn modules_are_balanced_together() {
        // Two encoder-heavy and two LLM-heavy items: the pairs must be mixed.
        let instance = Instance::new(2, 2, vec![9, 1, 9, 1, 1, 9, 1, 9]).unwrap();
        assert_eq!(groups(&instance, Caps::default()).unwrap(), [[0, 2], [1, 3]]);
    }

    #[test]
    fn the_first_of_many_equal_groups_is_taken() {
        let instance = Instance::new(40, 1, vec![5; 41]).unwrap();
        assert_eq!(groups(&instance, Caps::default()).unwrap()[0], [0, 40]);
    }

    #[test]
    fn tokens_weigh_like_time_where_they_are_capped() {
        let instance = Instance::new(2, 1, vec![9, 8, 1]).unwrap().tokens(vec![1, 5, 5]).unwrap();
        let caps = Caps { tokens_max: Some(6), bytes_max: None };
        assert_eq!(groups(&instance, caps).unwrap(), [vec![0, 2], vec![1]]);
    }
}
