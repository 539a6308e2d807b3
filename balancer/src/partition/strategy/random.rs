//! Random partition, seeded from the instance.

use super::round_robin::next_with_room;
use super::{Partitioner, Solution, within};
use crate::budget::Budget;
use crate::error::Result;
use crate::partition::problem::{Partition, Problem};
use dflop_costmodel::random::SplitMix64;

/// Draws each item's group.
#[derive(Debug)]
pub(super) struct Random;

impl Partitioner for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn is_blind(&self) -> bool {
        true
    }

    fn solve(&self, problem: &Problem<'_>, _budget: &mut Budget) -> Result<Solution> {
        Ok(Solution::new(problem, within(problem, assign(problem))?))
    }
}

/// Draws a group for every item, after one random item for each group; skips full groups.
///
/// Returns `None` if an item fits no group.
pub(crate) fn assign(problem: &Problem<'_>) -> Option<Partition> {
    let mut rng = SplitMix64::new(problem.seed);
    let mut items: Vec<u32> = (0..problem.items as u32).collect();
    rng.shuffle_front(&mut items, problem.items);
    let mut partition = Partition::empty(problem);
    for (place, item) in items.into_iter().enumerate() {
        let drawn = if place < problem.groups { place } else { rng.below(problem.groups) };
        let group = next_with_room(problem, &partition, drawn, item)?;
        partition.add(problem, group, item);
    }
    Some(partition)
}
