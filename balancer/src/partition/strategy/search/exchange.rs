//! Finds the best single move or 1-1 swap between two groups.
//!
//! A move shifts an item from the slow group to the partner; a swap returns an item. Both groups must end at
//! or below a target in every module, and within the limits for every capped column.

use crate::budget::Budget;
use crate::partition::problem::{Partition, Problem};

/// A swap, or a move if `takes` is `None`, by positions in the groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Exchange {
    gives: usize,
    takes: Option<usize>,
}

/// Two groups with limits; signed, because integers are subtracted.
struct Pair<'a> {
    problem: &'a Problem<'a>,
    slow: &'a [u64],
    other: &'a [u64],
    /// Column that makes the slow group slow: most candidates fail there.
    tight: usize,
    target: i64,
}

/// Finds the exchange that minimizes the larger of the two groups, at most `target`.
///
/// Ties: the first by position in `slow`, then move before swap, then by position in `other`. Once the
/// budget is spent, the best exchange so far is returned.
pub(super) fn find(
    problem: &Problem<'_>,
    partition: &Partition,
    (slow, other): (usize, usize),
    target: u64,
    budget: &mut Budget,
) -> Option<Exchange> {
    let (slow_items, other_items) = (&partition.groups[slow], &partition.groups[other]);
    let mut pair = Pair::new(problem, partition.load(problem, slow), partition.load(problem, other), target);
    let mut best = None;
    for (gives, &given) in slow_items.iter().enumerate() {
        if budget.is_spent() {
            break;
        }
        budget.spend(other_items.len() as u64 + 1);
        let given = problem.row(given);
        // A move must not empty the group.
        if slow_items.len() > 1 && pair.accepts(given, None) {
            best = Some(Exchange { gives, takes: None });
        }
        let (least, most) = pair.window(given[pair.tight]);
        for (position, &taken) in other_items.iter().enumerate() {
            let taken = problem.row(taken);
            // One comparison in the tight column rejects most candidates before the other columns.
            let is_near = (least..=most).contains(&(taken[pair.tight] as i64));
            if is_near && pair.accepts(given, Some(taken)) {
                best = Some(Exchange { gives, takes: Some(position) });
            }
        }
    }
    best
}

/// Applies an exchange.
pub(super) fn apply(
    problem: &Problem<'_>,
    partition: &mut Partition,
    (slow, other): (usize, usize),
    exchange: Exchange,
) {
    let given = partition.take(problem, slow, exchange.gives);
    if let Some(position) = exchange.takes {
        let taken = partition.take(problem, other, position);
        partition.add(problem, slow, taken);
    }
    partition.add(problem, other, given);
}

impl<'a> Pair<'a> {
    fn new(problem: &'a Problem<'a>, slow: &'a [u64], other: &'a [u64], target: u64) -> Self {
        let mut tight = 0;
        for column in 1..problem.modules {
            if slow[column] > slow[tight] {
                tight = column;
            }
        }
        Self { problem, slow, other, tight, target: target as i64 }
    }

    /// Returns the range, in the tight column, of an item taken in return for `given`.
    fn window(&self, given: u64) -> (i64, i64) {
        let given = given as i64;
        let least = given - (self.target - self.other[self.tight] as i64);
        let most = given - (self.slow[self.tight] as i64 - self.target);
        (least, most)
    }

    /// Tries an exchange; if both groups end at or below the target, lowers the target below them.
    fn accepts(&mut self, given: &[u64], taken: Option<&[u64]>) -> bool {
        let mut worst = 0;
        for column in 0..given.len() {
            let shift = given[column] as i64 - taken.map_or(0, |taken| taken[column] as i64);
            let (slow, other) = (self.slow[column] as i64 - shift, self.other[column] as i64 + shift);
            let larger = slow.max(other);
            if column >= self.problem.modules {
                if larger as u64 > self.problem.limits[column] {
                    return false;
                }
            } else if larger > self.target {
                return false;
            } else {
                worst = worst.max(larger);
            }
        }
        // Only strictly better exchanges count from here on.
        self.target = worst - 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};

    fn exchanged(instance: &Instance, caps: Caps, groups: [&[u32]; 2], target: u64) -> Option<Vec<Vec<u32>>> {
        let problem = Problem::new(instance, &caps).unwrap();
        let mut partition = Partition::from_groups(&problem, groups.map(<[u32]>::to_vec).to_vec());
        let exchange = find(&problem, &partition, (0, 1), target, &mut Budget::work(1))?;
        apply(&problem, &mut partition, (0, 1), exchange);
        Some(partition.into_groups())
    }

    #[test]
    fn the_best_of_moves_and_swaps_is_found() {
        let instance = Instance::new(2, 1, vec![7, 4, 2, 3, 2]).unwrap();
        let found = exchanged(&instance, Caps::default(), [&[0, 1], &[2, 3, 4]], 10);
        assert_eq!(found.unwrap(), [vec![0, 2], vec![1, 3, 4]]);
    }

    #[test]
    fn both_modules_must_end_below_the_target() {
        let instance = Instance::new(2, 2, vec![5, 0, 5, 9, 1, 9]).unwrap();
        let found = exchanged(&instance, Caps::default(), [&[0, 1], &[2]], 9);
        assert_eq!(found.unwrap(), [vec![1], vec![0, 2]]);
    }

    #[test]
    fn a_cap_forbids_an_exchange() {
        let instance = Instance::new(2, 1, vec![5, 5, 1]).unwrap().tokens(vec![4, 4, 5]).unwrap();
        let caps = Caps { tokens_max: Some(8), bytes_max: None };
        assert_eq!(exchanged(&instance, Caps::default(), [&[0, 1], &[2]], 9).unwrap(), [vec![1], vec![0, 2]]);
        assert_eq!(exchanged(&instance, caps, [&[0, 1], &[2]], 9), None);
    }
}
