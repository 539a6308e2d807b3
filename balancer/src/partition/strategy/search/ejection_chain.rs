//! Ejection chains: an item leaves the slowest group, and every visited group ejects an item.
//!
//! An item moves to a second group, an item from there to a third, until a group keeps the last item or the
//! chain closes at the slowest group. Every touched group ends within the target, and is visited once. The
//! search is breadth first, so the shortest chain is found.

use crate::budget::Budget;
use crate::partition::problem::{Partition, Problem};
use dflop_costmodel::random::SplitMix64;

/// Maximum number of checks per chain search; a check compares a group with an item.
const CHECKS_MAX: u64 = 60_000;
/// Marks an item that no chain reaches.
const NONE: u32 = u32::MAX;

/// Item move between groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Move {
    item: u32,
    from: usize,
    to: usize,
}

/// Chain finder that reuses memory between searches.
#[derive(Default)]
pub(super) struct ChainFinder {
    /// Predecessor of each item in the ejection chain: the item itself in the slowest group, [`NONE`] if
    /// unreached.
    pushed_by: Vec<u32>,
    /// Items to move, in the order in which they were found.
    queue: Vec<u32>,
    group_of: Vec<usize>,
    /// Position in the queue whose chain visited each group last.
    passed: Vec<usize>,
    /// A group's load with the moved item added.
    load: Vec<u64>,
}

/// Inputs that stay fixed while chains grow.
#[derive(Clone, Copy)]
struct Frame<'a> {
    problem: &'a Problem<'a>,
    partition: &'a Partition,
    limits: &'a [u64],
    slow: usize,
}

impl ChainFinder {
    /// Finds a chain that leaves every group it touches, the slowest included, within `target`.
    ///
    /// # Source
    /// Glover, "Ejection chains, reference structures and alternating path methods for traveling salesman
    /// problems", Discrete Applied Mathematics 65, 1996; for machines: Frangioni, Necciari and Scutellà, "A
    /// multi-exchange neighborhood for minimum makespan parallel machine scheduling problems", J.
    /// Combinatorial Optimization 8, 2004.
    pub(super) fn find(
        &mut self,
        (problem, partition): (&Problem<'_>, &Partition),
        slow: usize,
        target: u64,
        rng: &mut SplitMix64,
        budget: &mut Budget,
    ) -> Option<Vec<Move>> {
        let limits = problem.limits_within(target);
        let frame = Frame { problem, partition, limits: &limits, slow };
        self.start(frame, rng);
        // A random first group, so that repeated searches do not favor low indices.
        let first_group = rng.below(problem.groups);
        let (mut place, mut checks) = (0, 0);
        // The queue holds shorter chains before longer ones.
        while place < self.queue.len() && checks < CHECKS_MAX && !budget.is_spent() {
            let (found, steps) = self.extend(frame, place, first_group);
            if found.is_some() {
                return found;
            }
            budget.spend(steps);
            checks += steps;
            place += 1;
        }
        None
    }

    /// Starts a chain with every item whose removal relieves the slowest group enough.
    fn start(&mut self, frame: Frame<'_>, rng: &mut SplitMix64) {
        let Frame { problem, partition, limits, slow } = frame;
        self.pushed_by.clear();
        self.pushed_by.resize(problem.items, NONE);
        self.group_of.resize(problem.items, 0);
        for (group, items) in partition.groups.iter().enumerate() {
            for &item in items {
                self.group_of[item as usize] = group;
            }
        }
        self.passed.clear();
        self.passed.resize(problem.groups, usize::MAX);
        let load = partition.load(problem, slow);
        let relieves = |item: &u32| problem.fits(load, Some(problem.row(*item)), limits);
        self.queue.clear();
        self.queue.extend(partition.groups[slow].iter().copied().filter(relieves));
        let starts = self.queue.len();
        rng.shuffle_front(&mut self.queue, starts);
        for &item in &self.queue {
            self.pushed_by[item as usize] = item;
        }
    }

    /// Extends the chain at a queue position; returns a chain that ends, and the steps spent.
    fn extend(&mut self, frame: Frame<'_>, place: usize, first_group: usize) -> (Option<Vec<Move>>, u64) {
        let Frame { problem, partition, limits, slow } = frame;
        let item = self.queue[place];
        let root = self.mark_path(item, place);
        let relieved: Vec<u64> = without(partition.load(problem, slow), problem.row(root));
        let mut steps = 0;
        for group in (first_group..problem.groups).chain(0..first_group) {
            // The chain already goes through this group; its load would be counted twice.
            if self.passed[group] == place {
                continue;
            }
            let items = &partition.groups[group];
            steps += items.len() as u64 + 1;
            self.load.clear();
            self.load.extend_from_slice(partition.load(problem, group));
            add(&mut self.load, problem.row(item));
            if partition.groups[slow].len() > 1 && problem.fits(&self.load, None, limits) {
                return (Some(self.moves(item, group)), steps);
            }
            for &pushed in items {
                let row = problem.row(pushed);
                if self.pushed_by[pushed as usize] != NONE || !problem.fits(&self.load, Some(row), limits) {
                    continue;
                }
                self.pushed_by[pushed as usize] = item;
                self.queue.push(pushed);
                // Close the chain: the ejected item replaces the first item in the slowest group.
                let mut closed = relieved.clone();
                add(&mut closed, row);
                if problem.fits(&closed, None, limits) {
                    return (Some(self.moves(pushed, slow)), steps);
                }
            }
        }
        (None, steps)
    }

    /// Marks the groups on the way to an item; returns the first item in the chain.
    fn mark_path(&mut self, mut item: u32, place: usize) -> u32 {
        loop {
            self.passed[self.group_of[item as usize]] = place;
            let pushed_by = self.pushed_by[item as usize];
            if pushed_by == item {
                return item;
            }
            item = pushed_by;
        }
    }

    /// Lists the moves for a chain whose last item goes to a group.
    fn moves(&self, mut item: u32, mut to: usize) -> Vec<Move> {
        let mut moves = Vec::new();
        loop {
            let from = self.group_of[item as usize];
            moves.push(Move { item, from, to });
            let pushed_by = self.pushed_by[item as usize];
            if pushed_by == item {
                return moves;
            }
            (item, to) = (pushed_by, from);
        }
    }
}

/// Applies a chain's moves.
pub(super) fn apply(problem: &Problem<'_>, partition: &mut Partition, moves: &[Move]) {
    for &Move { item, from, to } in moves {
        let position = partition.groups[from].iter().position(|other| *other == item);
        if let Some(position) = position {
            partition.take(problem, from, position);
            partition.add(problem, to, item);
        }
    }
}

fn add(load: &mut [u64], row: &[u64]) {
    for (load, value) in load.iter_mut().zip(row) {
        *load += value;
    }
}

fn without(load: &[u64], row: &[u64]) -> Vec<u64> {
    load.iter().zip(row).map(|(load, value)| load - value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};

    fn chained(instance: &Instance, groups: &[&[u32]], target: u64) -> Option<Vec<u64>> {
        let problem = Problem::new(instance, &Caps::default()).unwrap();
        let groups = groups.iter().map(|items| items.to_vec()).collect();
        let mut partition = Partition::from_groups(&problem, groups);
        let (mut rng, mut budget) = (SplitMix64::new(1), Budget::work(1000));
        let slow = partition.slowest();
        let found =
            ChainFinder::default().find((&problem, &partition), slow, target, &mut rng, &mut budget)?;
        apply(&problem, &mut partition, &found);
        let mut all = partition.groups.concat();
        all.sort_unstable();
        assert_eq!(all, (0..instance.items() as u32).collect::<Vec<_>>());
        Some((0..instance.groups()).map(|group| partition.value(group)).collect())
    }

    #[test]
    fn three_groups_pass_items_on() {
        // 4 + 8, 3 + 8 and 5 + 5: only a cycle of three brings all to 11 or less in both modules.
        let instance = Instance::new(3, 2, vec![4, 0, 8, 8, 2, 4, 8, 7, 3, 2, 5, 5]).unwrap();
        let values = chained(&instance, &[&[0, 1], &[2, 3], &[4, 5]], 11).unwrap();
        assert!(values.iter().all(|value| *value <= 11), "{values:?}");
    }

    #[test]
    fn a_chain_may_end_in_a_group_with_room() {
        let instance = Instance::new(3, 1, vec![5, 6, 4, 5, 3, 2]).unwrap();
        // 6 ejects 5 from 4 + 5 = 9, which fits with 3.
        let values = chained(&instance, &[&[0, 1], &[2, 3], &[4, 5]], 10).unwrap();
        assert!(values.iter().all(|value| *value <= 10), "{values:?}");
    }

    #[test]
    fn nothing_is_found_where_nothing_is() {
        let instance = Instance::new(2, 1, vec![5, 5, 5]).unwrap();
        assert_eq!(chained(&instance, &[&[0, 1], &[2]], 9), None);
    }
}
