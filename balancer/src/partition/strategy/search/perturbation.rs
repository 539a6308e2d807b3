//! Perturbation step for the iterated local search: a few random swaps within the caps.

use crate::partition::groups::Partition;
use crate::partition::problem::Problem;
use dflop_costmodel::random::SplitMix64;

/// Maximum number of swaps in a perturbation.
const SWAPS_MAX: usize = 3;

/// Swaps a few random items; every second swap involves the slowest group.
///
/// # Source
/// Lourenço, Martin and Stützle, "Iterated local search", Handbook of Metaheuristics, 2003.
pub(super) fn perturb(problem: &Problem<'_>, partition: &mut Partition, rng: &mut SplitMix64) {
    for _ in 0..=rng.below(SWAPS_MAX) {
        let is_at_slowest = rng.below(2) == 0;
        let first = if is_at_slowest { partition.slowest() } else { rng.below(problem.groups) };
        let second = rng.below(problem.groups);
        swap_random(problem, partition, (first, second), rng);
    }
}

/// Swaps a random item from each group, unless a cap forbids it.
fn swap_random(
    problem: &Problem<'_>,
    partition: &mut Partition,
    (first, second): (usize, usize),
    rng: &mut SplitMix64,
) {
    if first == second || partition.groups[first].is_empty() || partition.groups[second].is_empty() {
        return;
    }
    let given = partition.take(problem, first, rng.below(partition.groups[first].len()));
    let taken = partition.take(problem, second, rng.below(partition.groups[second].len()));
    // Both items are out of their groups by now, so each group is checked without its own item.
    let is_allowed = partition.has_room(problem, first, taken) && partition.has_room(problem, second, given);
    let (to_first, to_second) = if is_allowed { (taken, given) } else { (given, taken) };
    partition.add(problem, first, to_first);
    partition.add(problem, second, to_second);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};

    #[test]
    fn a_perturbation_keeps_every_item_and_every_cap() {
        let instance = Instance::new(3, 1, (1..=9).collect()).unwrap().tokens((1..=9).collect()).unwrap();
        let problem = Problem::new(&instance, &Caps { tokens_max: Some(17), bytes_max: None }).unwrap();
        let groups = vec![vec![8, 3, 0], vec![7, 4, 1], vec![6, 5, 2]];
        let mut partition = Partition::from_groups(&problem, groups);
        let mut rng = SplitMix64::new(5);
        for _ in 0..100 {
            perturb(&problem, &mut partition, &mut rng);
            assert!(partition.is_within(&problem));
        }
        let mut all = partition.groups.concat();
        all.sort_unstable();
        assert_eq!(all, (0..9).collect::<Vec<_>>());
    }
}
