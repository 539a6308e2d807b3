//! Target descent: lowers the total excess over a falling target.
//!
//! If groups hold few items, the slowest group often has no exchange that helps. This search fixes a target
//! slightly below the best makespan and lowers the *excess*, the load above the target summed over groups and
//! modules. Any exchange that lowers the excess, or keeps it, is applied, and now and then an exchange that
//! raises it. At excess zero a better partition is found, and the target falls further.

use crate::budget::Budget;
use crate::partition::problem::{Partition, Problem};
use dflop_costmodel::random::SplitMix64;

/// Random partners compared with a group above the target.
const PARTNERS: usize = 24;
/// Divisor of the bound: far from it, the target is `bound / STEP_SHARE` below the best.
const STEP_SHARE: u64 = 10_000;
/// Divisor of the bound: within `bound / NEAR_SHARE` of it, the target is the bound plus 7/10 of the gap.
const NEAR_SHARE: u64 = 1_000;
/// Divisor of the bound: a rise of the excess by `bound / RISE_SHARE` halves the chance of acceptance.
const RISE_SHARE: u64 = 720;

/// Exchange by positions in the two groups; a move returns nothing.
struct Exchange {
    rise: i64,
    partner: usize,
    gives: usize,
    takes: Option<usize>,
}

/// Searches for a better partition until `steps_max` are spent; returns whether it found a better partition.
///
/// # Source
/// Lowering the overfull rest over a fixed number of bins: Alvim, Ribeiro, Glover and Aloise, "A hybrid
/// improvement heuristic for the one-dimensional bin packing problem", J. Heuristics 10, 2004; acceptance as
/// in Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated annealing", Science 220, 1983.
pub(super) fn lower(
    problem: &Problem<'_>,
    best: &mut Partition,
    steps_max: u64,
    rng: &mut SplitMix64,
    budget: &mut Budget,
) -> bool {
    let end = budget.steps().saturating_add(steps_max);
    let mut has_found = false;
    let mut walker = best.clone();
    while best.makespan() > problem.bound.ns {
        let target = target(problem.bound.ns, best.makespan());
        if !reach(problem, &mut walker, target, end, rng, budget) {
            break;
        }
        best.clone_from(&walker);
        has_found = true;
    }
    has_found
}

/// Returns the next target.
fn target(bound: u64, makespan: u64) -> u64 {
    let above = makespan - bound;
    if above > bound / NEAR_SHARE {
        makespan - (bound / STEP_SHARE).max(1)
    } else {
        bound + (u128::from(above) * 7 / 10) as u64
    }
}

/// Exchanges items until no group is above the target; returns whether that succeeded.
fn reach(
    problem: &Problem<'_>,
    partition: &mut Partition,
    target: u64,
    end: u64,
    rng: &mut SplitMix64,
    budget: &mut Budget,
) -> bool {
    let mut above: Vec<usize> =
        (0..problem.groups).filter(|&group| partition.value(group) > target).collect();
    while !above.is_empty() {
        if budget.is_spent() || budget.steps() >= end {
            return false;
        }
        budget.spend(1);
        let drawn = rng.below(above.len());
        let group = above[drawn];
        if partition.value(group) <= target {
            // An exchange has relieved this group in the meantime.
            above.swap_remove(drawn);
            continue;
        }
        let Some(found) = best_exchange(problem, partition, group, target, rng, budget) else { continue };
        if found.rise > 0 && !is_accepted(found.rise as u64, problem.bound.ns, rng) {
            continue;
        }
        let partner = found.partner;
        make(problem, partition, group, &found);
        // The exchange may raise the partner above the target; then the partner is relieved in turn.
        if partition.value(partner) > target && !above.contains(&partner) {
            above.push(partner);
        }
    }
    true
}

/// Whether a rise is accepted: with chance 1/2 for none, halved for every [`RISE_SHARE`]th of the bound.
///
/// Leading zeros of random bits replace an exponential, which would differ between machines.
fn is_accepted(rise: u64, bound: u64, rng: &mut SplitMix64) -> bool {
    let halvings = rise.div_ceil((bound / RISE_SHARE).max(1));
    u64::from(rng.next_u64().leading_zeros()) > halvings
}

/// Finds the exchange with some random partners that raises the excess least; ties go to the first exchange.
fn best_exchange(
    problem: &Problem<'_>,
    partition: &Partition,
    group: usize,
    target: u64,
    rng: &mut SplitMix64,
    budget: &mut Budget,
) -> Option<Exchange> {
    let mut best: Option<Exchange> = None;
    let items = &partition.groups[group];
    for _ in 0..PARTNERS.min(problem.groups - 1) {
        let drawn = rng.below(problem.groups - 1);
        let partner = drawn + usize::from(drawn >= group);
        let others = &partition.groups[partner];
        budget.spend((items.len() * (others.len() + 1)) as u64);
        let loads = (partition.load(problem, group), partition.load(problem, partner));
        let before = excess(problem, loads.0, target) + excess(problem, loads.1, target);
        for (gives, &given) in items.iter().enumerate() {
            let given = problem.row(given);
            let mut offer = |takes: Option<usize>, taken: Option<&[u64]>| {
                let Some(after) = excess_after(problem, loads, given, taken, target) else { return };
                let rise = after as i64 - before as i64;
                if best.as_ref().is_none_or(|best| rise < best.rise) {
                    best = Some(Exchange { rise, partner, gives, takes });
                }
            };
            // A move must not empty the group.
            if items.len() > 1 {
                offer(None, None);
            }
            for (takes, &taken) in others.iter().enumerate() {
                offer(Some(takes), Some(problem.row(taken)));
            }
        }
    }
    best
}

/// Returns a load's excess over the target.
fn excess(problem: &Problem<'_>, load: &[u64], target: u64) -> u64 {
    load[..problem.modules].iter().map(|load| load.saturating_sub(target)).sum()
}

/// Returns the excess in both groups after an exchange; `None` if a cap forbids it.
fn excess_after(
    problem: &Problem<'_>,
    (slow, other): (&[u64], &[u64]),
    given: &[u64],
    taken: Option<&[u64]>,
    target: u64,
) -> Option<u64> {
    let mut sum = 0;
    for column in 0..given.len() {
        let taken = taken.map_or(0, |taken| taken[column]);
        let slow = slow[column] - given[column] + taken;
        let other = other[column] + given[column] - taken;
        if column < problem.modules {
            sum += slow.saturating_sub(target) + other.saturating_sub(target);
        } else if slow.max(other) > problem.limits[column] {
            return None;
        }
    }
    Some(sum)
}

fn make(problem: &Problem<'_>, partition: &mut Partition, group: usize, found: &Exchange) {
    let given = partition.take(problem, group, found.gives);
    if let Some(takes) = found.takes {
        let taken = partition.take(problem, found.partner, takes);
        partition.add(problem, group, taken);
    }
    partition.add(problem, found.partner, given);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};

    #[test]
    fn a_perfect_partition_of_few_items_is_found() {
        // Four groups with two items: 1 + 8, 2 + 7, 3 + 6 and 4 + 5, badly assigned at first.
        let instance = Instance::new(4, 1, vec![1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        let problem = Problem::new(&instance, &Caps::default()).unwrap();
        let groups = vec![vec![0, 1], vec![2, 3], vec![4, 5], vec![6, 7]];
        let mut partition = Partition::from_groups(&problem, groups);
        let (mut rng, mut budget) = (SplitMix64::new(3), Budget::work(10_000));
        assert!(lower(&problem, &mut partition, 100_000, &mut rng, &mut budget));
        assert_eq!(partition.makespan(), 9);
    }

    #[test]
    fn steps_are_bounded_and_nothing_gets_worse() {
        let instance = Instance::new(3, 2, (0..24).map(|i| 1 + i * 7919 % 997).collect()).unwrap();
        let problem = Problem::new(&instance, &Caps::default()).unwrap();
        let groups = (0..3).map(|group| (group * 4..(group + 1) * 4).collect()).collect();
        let mut partition = Partition::from_groups(&problem, groups);
        let before = partition.makespan();
        let (mut rng, mut budget) = (SplitMix64::new(3), Budget::work(10_000));
        lower(&problem, &mut partition, 2_000, &mut rng, &mut budget);
        assert!(partition.makespan() <= before && budget.steps() < 4_000);
    }

    #[test]
    fn the_target_comes_down_in_steps() {
        assert_eq!(target(1_000_000, 1_100_000), 1_099_900);
        assert_eq!(target(1_000_000, 1_000_100), 1_000_070);
        assert_eq!(target(1_000_000, 1_000_001), 1_000_000);
    }
}
