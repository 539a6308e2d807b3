//! Longest processing time first, on a single number per item.
//!
//! The number is the item's **largest module**, and a group's load is the sum of the item numbers: plain LPT
//! reduces several modules to one. [`super::multi_lpt`] keeps them separate.

use super::{Partitioner, Solution, within};
use crate::budget::Budget;
use crate::error::Result;
use crate::partition::problem::{Partition, Problem};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Longest processing time first, on each item's largest module.
#[derive(Debug)]
pub(super) struct Lpt;

impl Partitioner for Lpt {
    fn name(&self) -> &'static str {
        "lpt"
    }

    fn solve(&self, problem: &Problem<'_>, _budget: &mut Budget) -> Result<Solution> {
        Ok(Solution::new(problem, within(problem, assign(problem))?))
    }
}

/// Assigns each item, longest first, to the group with the smallest load.
///
/// Ties: the item with the lower index first; the group with fewer items, then the lower index. Groups that a
/// cap closes for an item are skipped; returns `None` if the item fits no group.
///
/// # Source
/// Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969.
pub(crate) fn assign(problem: &Problem<'_>) -> Option<Partition> {
    let size = |item: u32| problem.value(problem.row(item));
    let mut items: Vec<u32> = (0..problem.items as u32).collect();
    items.sort_by_key(|&item| Reverse(size(item)));
    let mut partition = Partition::empty(problem);
    let mut heap: BinaryHeap<_> = (0..problem.groups).map(|group| Reverse((0, 0, group))).collect();
    let mut closed = Vec::new();
    for item in items {
        loop {
            let Reverse((load, count, group)) = heap.pop()?;
            if partition.has_room(problem, group, item) {
                partition.add(problem, group, item);
                heap.push(Reverse((load + size(item), count + 1, group)));
                break;
            }
            // Closed for this item only: a shorter item may still fit.
            closed.push(Reverse((load, count, group)));
        }
        heap.extend(closed.drain(..));
    }
    Some(partition)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};

    #[test]
    fn longest_items_go_first_to_the_emptiest_group() {
        let instance = Instance::new(2, 1, vec![3, 3, 2, 2, 2]).unwrap();
        let problem = Problem::new(&instance, &Caps::default()).unwrap();
        assert_eq!(assign(&problem).unwrap().into_groups(), [vec![0, 2, 4], vec![1, 3]]);
    }

    #[test]
    fn items_without_cost_still_fill_every_group() {
        let instance = Instance::new(3, 1, vec![0; 3]).unwrap();
        let problem = Problem::new(&instance, &Caps::default()).unwrap();
        assert_eq!(assign(&problem).unwrap().into_groups(), [[0], [1], [2]]);
    }
}
