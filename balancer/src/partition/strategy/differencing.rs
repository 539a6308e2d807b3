//! Karmarkar-Karp largest differencing, on a single number per item: its **largest module**, as in
//! [`super::lpt`].
//!
//! A *tuple* is a partition of some items into all groups, largest sum first. Initially every item is a
//! separate tuple. The two tuples with the largest spread are joined, the largest sum in the first with the
//! smallest sum in the second, until a single tuple is left.

use super::{Partitioner, Solution, within};
use crate::budget::Budget;
use crate::error::Result;
use crate::partition::problem::{Partition, Problem};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Largest differencing, on each item's largest module.
#[derive(Debug)]
pub(super) struct Differencing;

impl Partitioner for Differencing {
    fn name(&self) -> &'static str {
        "kk"
    }

    fn solve(&self, problem: &Problem<'_>, _budget: &mut Budget) -> Result<Solution> {
        Ok(Solution::new(problem, within(problem, assign(problem))?))
    }
}

/// Marks the end of an item list.
const NONE: u32 = u32::MAX;

/// Group in a tuple: sum, number of items, and the first item.
#[derive(Debug, Clone, Copy)]
struct Set {
    sum: u64,
    items: u32,
    first: u32,
}

/// Items in every set as linked lists, which are cheap to join.
struct Lists {
    next: Vec<u32>,
    /// Last item in a list, indexed by the first item.
    last: Vec<u32>,
}

/// Partitions by largest differencing; returns `None` if a cap is exceeded.
///
/// Ties: the tuple with the lower first item; more items before fewer, so that no group is empty if there are
/// enough items.
///
/// # Source
/// Karmarkar and Karp, "The differencing method of set partitioning", UC Berkeley technical report
/// UCB/CSD 82/113, 1982.
pub(crate) fn assign(problem: &Problem<'_>) -> Option<Partition> {
    let sum = |item: u32| problem.value(problem.row(item));
    let items = 0..problem.items as u32;
    let mut lists = Lists { next: vec![NONE; problem.items], last: items.clone().collect() };
    let mut tuples: Vec<Vec<Set>> =
        items.clone().map(|item| vec![Set { sum: sum(item), items: 1, first: item }]).collect();
    let spread = |tuple: &[Set]| {
        // Groups without items are not listed, so a short tuple has a group of sum 0.
        let smallest = if tuple.len() < problem.groups { 0 } else { tuple[tuple.len() - 1].sum };
        tuple[0].sum - smallest
    };
    let mut heap: BinaryHeap<_> = items.map(|item| (spread(&tuples[item as usize]), Reverse(item))).collect();
    let mut groups = vec![Vec::new(); problem.groups];
    while let Some((_, Reverse(first))) = heap.pop() {
        let first = first as usize;
        let Some((_, Reverse(second))) = heap.pop() else {
            for (group, set) in groups.iter_mut().zip(&tuples[first]) {
                *group = lists.items(set.first);
            }
            break;
        };
        let second = std::mem::take(&mut tuples[second as usize]);
        join(&mut tuples[first], second, problem.groups, &mut lists);
        heap.push((spread(&tuples[first]), Reverse(first as u32)));
    }
    let partition = Partition::from_groups(problem, groups);
    partition.is_within(problem).then_some(partition)
}

/// Joins the largest sums in `tuple` with the smallest sums in `other`; sets without items are not listed.
fn join(tuple: &mut Vec<Set>, other: Vec<Set>, groups: usize, lists: &mut Lists) {
    let listed = tuple.len();
    for (rank, set) in other.into_iter().enumerate() {
        let partner = groups - 1 - rank;
        if partner < listed {
            let partner = &mut tuple[partner];
            lists.join(partner.first, set.first);
            partner.sum += set.sum;
            partner.items += set.items;
        } else {
            tuple.push(set);
        }
    }
    // The first item is unique, so an unstable sort gives the same order everywhere.
    tuple.sort_unstable_by_key(|set| (Reverse((set.sum, set.items)), set.first));
}

impl Lists {
    /// Appends the list that starts with `second` to the list that starts with `first`.
    fn join(&mut self, first: u32, second: u32) {
        self.next[self.last[first as usize] as usize] = second;
        self.last[first as usize] = self.last[second as usize];
    }

    fn items(&self, first: u32) -> Vec<u32> {
        let next = |item: &u32| Some(self.next[*item as usize]).filter(|next| *next != NONE);
        std::iter::successors(Some(first), next).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};

    fn groups(instance: &Instance) -> Vec<Vec<u32>> {
        assign(&Problem::new(instance, &Caps::default()).unwrap()).unwrap().into_groups()
    }

    #[test]
    fn differences_are_those_of_the_textbook() {
        // 8, 7, 6, 5, 4: differencing leaves 2, where LPT leaves 4.
        let instance = Instance::new(2, 1, vec![8, 7, 6, 5, 4]).unwrap();
        let sums: Vec<u64> = groups(&instance).iter().map(|items| instance.load_ns(items)[0]).collect();
        assert_eq!(sums, [16, 14]);
    }

    #[test]
    fn items_without_cost_still_fill_every_group() {
        let instance = Instance::new(3, 1, vec![0, 0, 9, 0]).unwrap();
        assert!(groups(&instance).iter().all(|items| !items.is_empty()));
    }

    #[test]
    fn three_groups_get_an_item_each() {
        let instance = Instance::new(3, 1, vec![9, 1, 1, 1]).unwrap();
        assert_eq!(groups(&instance).iter().filter(|items| !items.is_empty()).count(), 3);
    }

    #[test]
    fn fewer_items_than_groups_leave_groups_empty() {
        let instance = Instance::with_empty_groups(3, 1, vec![4, 5]).unwrap();
        assert_eq!(groups(&instance), [vec![1], vec![0], vec![]]);
    }
}
