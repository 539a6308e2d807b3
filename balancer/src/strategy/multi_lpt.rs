//! Longest processing time first on all modules at once (mdLPT).
//!
//! Items go by their largest module, longest first; each to the group whose largest module stays
//! smallest. Capped columns take part, scaled so that a full cap weighs as much as the lower bound.
//!
//! The scan over all groups is the whole cost, `items * groups * columns`. It runs on `f32` loads laid
//! out for the vector units: blocks of [`LANES`] groups, column by column. It uses additions and
//! comparisons only, which IEEE 754 defines to the bit, so every machine picks the same group. Loads are
//! kept in integers besides, and whatever is compared with a limit or returned comes from those.

use crate::partition::Partition;
use crate::problem::Problem;
use std::cmp::Reverse;

/// Groups in a block; a fixed number, whatever the machine's vectors.
const LANES: usize = 16;

/// Assigns all items; returns nothing if a cap leaves an item without room.
///
/// Ties: the item with the lower index first, the group with the lower index.
///
/// # Source
/// Graham's rule, 1969, with the maximum over dimensions as in Chekuri and Khanna, "On multidimensional
/// packing problems", SIAM J. Comput. 33, 2004.
pub(crate) fn assign(problem: &Problem<'_>) -> Option<Partition> {
    let scales = Scales::new(problem);
    let mut items: Vec<u32> = (0..problem.items as u32).collect();
    items.sort_by_key(|&item| Reverse(scales.size(problem.row(item))));
    let seeds = problem.groups.min(problem.items);
    let mut shortlist = Shortlist::new(problem.groups, problem.width());
    let mut partition = Partition::empty(problem);
    let mut scaled = vec![0.0; problem.width()];
    for (place, item) in items.into_iter().enumerate() {
        scales.scale(problem.row(item), &mut scaled);
        // The longest items seed the groups, so that none is empty.
        let mut group = if place < seeds { place } else { shortlist.find(&scaled) };
        if problem.has_caps() && !partition.has_room(problem, group, item) {
            group = best_with_room(problem, &partition, item)?;
        }
        shortlist.add(group, &scaled);
        partition.add(problem, group, item);
    }
    Some(partition)
}

/// The group with room whose value stays smallest, lowest index on ties.
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

/// Makes columns comparable: a module in lower bounds, a capped column in caps.
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

    /// The largest column in nanoseconds, an integer: it orders the items.
    fn size(&self, row: &[u64]) -> u64 {
        let (times, capped) = row.split_at(self.modules);
        let longest = times.iter().copied().max().unwrap_or(0);
        let share = |(&value, &limit): (&u64, &u64)| {
            (u128::from(value) * u128::from(self.bound_ns) / u128::from(limit.max(1))) as u64
        };
        capped.iter().zip(&self.limits).map(share).fold(longest, u64::max)
    }
}

/// Scaled loads of all groups, for a fast scan.
struct Shortlist {
    /// `[blocks][width]`, [`LANES`] groups each; groups beyond the last are infinitely loaded.
    loads: Vec<[f32; LANES]>,
    width: usize,
}

impl Shortlist {
    fn new(groups: usize, width: usize) -> Self {
        let mut shortlist = Self { loads: vec![[0.0; LANES]; groups.div_ceil(LANES) * width], width };
        for group in groups..groups.next_multiple_of(LANES) {
            shortlist.add(group, &vec![f32::INFINITY; width]);
        }
        shortlist
    }

    fn add(&mut self, group: usize, row: &[f32]) {
        let block = group / LANES * self.width;
        for (lanes, value) in self.loads[block..block + self.width].iter_mut().zip(row) {
            lanes[group % LANES] += value;
        }
    }

    /// The first group whose largest column is smallest with `row` added.
    fn find(&self, row: &[f32]) -> usize {
        let mut best = (f32::INFINITY, 0);
        for (block, columns) in self.loads.chunks_exact(self.width).enumerate() {
            let smallest = smallest(worst(columns, row));
            if smallest < best.0 {
                best = (smallest, block);
            }
        }
        let (smallest, block) = best;
        let columns = &self.loads[block * self.width..(block + 1) * self.width];
        let lane = worst(columns, row).iter().position(|value| *value <= smallest);
        block * LANES + lane.unwrap_or(0)
    }
}

/// Per lane, the largest column with `row` added.
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

/// The smallest lane, by halves: a fold from left to right would be a chain of scalars.
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

/// One vector instruction, unlike `f32::max`, which also minds NaN.
#[inline]
fn larger(left: f32, right: f32) -> f32 {
    if left > right { left } else { right }
}

/// One vector instruction, unlike `f32::min`, which also minds NaN.
#[inline]
fn smaller(left: f32, right: f32) -> f32 {
    if left < right { left } else { right }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};

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
