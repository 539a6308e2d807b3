//! Splits three groups again at once, depth first.
//!
//! Items are assigned longest first, each to the least loaded group first; equally loaded groups are tried
//! once. The number of nodes is bounded, so only small splits are searched completely.

use crate::budget::Budget;
use crate::partition::problem::{Partition, Problem};
use std::cmp::Reverse;

/// Maximum number of nodes in a search.
const NODES_MAX: u64 = 6_000;
/// Maximum number of nodes after the first split is found, in search for a better split.
const NODES_FOUND_MAX: u64 = NODES_MAX / 4;
const GROUPS: usize = 3;

/// A split under construction.
struct Split<'a> {
    problem: &'a Problem<'a>,
    items: Vec<u32>,
    /// Limits by column, below every found split.
    limits: Vec<u64>,
    /// `[GROUPS * width]`.
    loads: Vec<u64>,
    sizes: [usize; GROUPS],
    /// Group for each item.
    choice: Vec<usize>,
    found: Option<Vec<usize>>,
    nodes: u64,
}

/// Finds new groups for three groups' items, each within `target`; `None` if it finds none.
///
/// # Source
/// Korf, "A complete anytime algorithm for number partitioning", Artificial Intelligence 106, 1998, section
/// on several subsets, without bounds on the remaining items.
pub(super) fn find(
    (problem, partition): (&Problem<'_>, &Partition),
    groups: [usize; GROUPS],
    target: u64,
    budget: &mut Budget,
) -> Option<[Vec<u32>; GROUPS]> {
    let limits = problem.limits_within(target);
    for (column, limit) in limits.iter().enumerate() {
        let total: u64 = groups.iter().map(|&group| partition.load(problem, group)[column]).sum();
        // Even a perfect split would be above the limit.
        if total.div_ceil(GROUPS as u64) > *limit {
            return None;
        }
    }
    let mut items: Vec<u32> = groups.iter().flat_map(|&group| &partition.groups[group]).copied().collect();
    items.sort_by_key(|&item| (Reverse(problem.value(problem.row(item))), item));
    let mut split = Split {
        problem,
        choice: vec![0; items.len()],
        items,
        limits,
        loads: vec![0; GROUPS * problem.width()],
        sizes: [0; GROUPS],
        found: None,
        nodes: 0,
    };
    split.place(0);
    budget.spend(split.nodes * GROUPS as u64);
    let Split { items, found, .. } = split;
    let mut result = [Vec::new(), Vec::new(), Vec::new()];
    for (item, group) in items.into_iter().zip(found?) {
        result[group].push(item);
    }
    Some(result)
}

impl Split<'_> {
    /// Places the items from a depth on in all ways that fit.
    fn place(&mut self, depth: usize) {
        self.nodes += 1;
        let Some(&item) = self.items.get(depth) else { return self.keep() };
        let problem = self.problem;
        let mut order = [0, 1, 2];
        order.sort_by_key(|&group| (self.value(group), group));
        for (rank, &group) in order.iter().enumerate() {
            // Groups with equal loads are interchangeable, so trying the first is enough.
            let is_repeated = rank > 0 && self.load(group) == self.load(order[rank - 1]);
            if is_repeated || self.is_over() || !self.has_room(group, problem.row(item)) {
                continue;
            }
            let width = problem.width();
            for (column, value) in problem.row(item).iter().enumerate() {
                self.loads[group * width + column] += value;
            }
            self.sizes[group] += 1;
            self.choice[depth] = group;
            self.place(depth + 1);
            self.sizes[group] -= 1;
            for (column, value) in problem.row(item).iter().enumerate() {
                self.loads[group * width + column] -= value;
            }
        }
    }

    /// Keeps a complete split without empty groups, and requires later splits to be better.
    fn keep(&mut self) {
        if self.sizes.contains(&0) {
            return;
        }
        self.found = Some(self.choice.clone());
        let value = (0..GROUPS).map(|group| self.value(group)).max().unwrap_or(0);
        for limit in &mut self.limits[..self.problem.modules] {
            // Only strictly better splits count from here on.
            *limit = value.saturating_sub(1);
        }
    }

    fn is_over(&self) -> bool {
        self.nodes >= if self.found.is_some() { NODES_FOUND_MAX } else { NODES_MAX }
    }

    fn load(&self, group: usize) -> &[u64] {
        let width = self.problem.width();
        &self.loads[group * width..(group + 1) * width]
    }

    fn value(&self, group: usize) -> u64 {
        self.problem.value(self.load(group))
    }

    fn has_room(&self, group: usize, row: &[u64]) -> bool {
        let sums = self.load(group).iter().zip(row);
        sums.zip(&self.limits).all(|((load, value), limit)| load + value <= *limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};

    fn found_makespan(instance: &Instance, groups: [&[u32]; 3], target: u64) -> Option<u64> {
        let problem = Problem::new(instance, &Caps::default()).unwrap();
        let partition = Partition::from_groups(&problem, groups.map(<[u32]>::to_vec).to_vec());
        let found = find((&problem, &partition), [0, 1, 2], target, &mut Budget::work(1))?;
        assert!(found.iter().all(|items| !items.is_empty()));
        Some(Partition::from_groups(&problem, found.to_vec()).makespan())
    }

    #[test]
    fn three_groups_are_split_where_no_two_can_be() {
        // 9, 6 and 6: 7 + 0, 4 + 3 and 5 + 2 need all three.
        let instance = Instance::new(3, 1, vec![5, 4, 3, 3, 4, 2]).unwrap();
        assert_eq!(found_makespan(&instance, [&[0, 1], &[2, 3], &[4, 5]], 8), Some(7));
    }

    #[test]
    fn no_group_ends_empty() {
        let instance = Instance::new(3, 1, vec![1, 1, 1]).unwrap();
        assert_eq!(found_makespan(&instance, [&[0], &[1], &[2]], 9), Some(1));
        assert_eq!(found_makespan(&instance, [&[0], &[1], &[2]], 0), None);
    }

    #[test]
    fn a_hard_split_ends_at_the_bound_on_nodes() {
        let instance =
            Instance::new(3, 1, (0..60).map(|i| 1_000_003 + i * i * 7919 % 99_991).collect()).unwrap();
        let problem = Problem::new(&instance, &Caps::default()).unwrap();
        let groups = (0..3).map(|group| (group * 20..(group + 1) * 20).collect()).collect();
        let partition = Partition::from_groups(&problem, groups);
        let mut budget = Budget::work(u64::MAX);
        find((&problem, &partition), [0, 1, 2], problem.bound.ns, &mut budget);
        assert!(budget.work_spent() <= 3 * NODES_MAX);
    }
}
