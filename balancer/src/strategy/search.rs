//! Local search at the slowest group.
//!
//! Only the slowest group can lower the makespan, so every step relieves that one: it looks for a
//! partner with which an exchange, or else a new split of both groups, ends below a target. The target is
//! ambitious first (half of the way to the lower bound), then anything better. When nothing helps, a few
//! random swaps shake the groups and the search goes on from there; the best answer is kept.
//!
//! Every comparison that decides is one of integers, the generator is seeded from the instance, and
//! effort is counted in work units: the answer is the same on every machine.

use super::exchange;
use super::resplit::Resplitter;
use crate::budget::Budget;
use crate::partition::Partition;
use crate::problem::Problem;
use crate::rng::SplitMix64;

/// Random partners tried before all of them are.
const PARTNERS: usize = 64;
/// Shakes in a row, without a better answer, before the search goes back to the best.
const SHAKES_FROM_BEST: u32 = 50;
/// Shakes in a row, without a better answer, before the search gives up.
const SHAKES_MAX: u32 = 4096;
/// The same, once the answer is as good as at its bound.
const SHAKES_MAX_NEAR: u32 = 50;
/// Within 2 to the power of minus this above the bound, 15 ns in a second, an answer is as good as at it.
const NEAR_SHIFT: u32 = 26;
/// Most swaps of one shake.
const SHAKE_SWAPS_MAX: usize = 3;

/// Lowers the makespan until it meets the lower bound or the budget is spent. Never makes it worse.
///
/// # Source
/// The neighbourhood is that of Korf, "Multi-way number partitioning", IJCAI 2009, two sets at a time,
/// on several dimensions; restarts as in Lourenço, Martin and Stützle, "Iterated local search", 2003.
pub(crate) fn improve(problem: &Problem<'_>, partition: &mut Partition, budget: &mut Budget) {
    let (rng, resplitter) = (SplitMix64::new(problem.seed), Resplitter::default());
    let mut search = Search { problem, budget, rng, resplitter };
    search.descend(partition);
    let mut best = partition.clone();
    let mut shakes = 0;
    while best.makespan() > problem.bound.ns && shakes < patience(problem, &best) && !search.budget.is_spent()
    {
        if shakes % SHAKES_FROM_BEST == 0 {
            partition.clone_from(&best);
        }
        shakes += 1;
        search.shake(partition);
        search.descend(partition);
        if partition.makespan() < best.makespan() {
            best.clone_from(partition);
            shakes = 0;
        }
    }
    partition.clone_from(&best);
}

/// How many shakes in a row may fail. Times are rounded, so an optimum may sit nanoseconds above its bound.
fn patience(problem: &Problem<'_>, best: &Partition) -> u32 {
    let is_near = best.makespan() - problem.bound.ns <= problem.bound.ns >> NEAR_SHIFT;
    if is_near { SHAKES_MAX_NEAR } else { SHAKES_MAX }
}

struct Search<'a> {
    problem: &'a Problem<'a>,
    budget: &'a mut Budget,
    rng: SplitMix64,
    resplitter: Resplitter,
}

/// How two groups are looked at.
#[derive(Clone, Copy)]
enum Means {
    Exchange,
    Resplit,
    Both,
}

impl Search<'_> {
    /// Relieves the slowest group, again and again, until nothing helps.
    fn descend(&mut self, partition: &mut Partition) {
        while partition.makespan() > self.problem.bound.ns && !self.budget.is_spent() {
            if !self.relieve(partition) {
                return;
            }
        }
    }

    /// Lowers the value of the slowest group; returns whether that worked.
    fn relieve(&mut self, partition: &mut Partition) -> bool {
        let slow = partition.slowest();
        let (value, goal) = (partition.value(slow), self.problem.bound.ns);
        let halfway = goal + (value - goal) / 2;
        let some = self.some_partners(slow);
        let all: Vec<usize> = (0..self.problem.groups).filter(|&other| other != slow).collect();
        self.try_partners(partition, slow, &some, halfway, Means::Both)
            || self.try_partners(partition, slow, &some, value - 1, Means::Both)
            || self.try_partners(partition, slow, &all, value - 1, Means::Exchange)
            || self.try_partners(partition, slow, &all, value - 1, Means::Resplit)
    }

    /// Draws random partners.
    fn some_partners(&mut self, slow: usize) -> Vec<usize> {
        let others = self.problem.groups - 1;
        let draw = |_| {
            let drawn = self.rng.below(others);
            drawn + usize::from(drawn >= slow)
        };
        (0..PARTNERS.min(others)).map(draw).collect()
    }

    /// Changes the slowest group and the first partner that helps.
    fn try_partners(
        &mut self,
        partition: &mut Partition,
        slow: usize,
        partners: &[usize],
        target: u64,
        means: Means,
    ) -> bool {
        for &other in partners {
            if self.budget.is_spent() {
                return false;
            }
            if partition.value(other) <= target && self.try_pair(partition, (slow, other), target, means) {
                return true;
            }
        }
        false
    }

    /// Changes two groups so that both end at or below the target, if there is a way.
    fn try_pair(
        &mut self,
        partition: &mut Partition,
        pair: (usize, usize),
        target: u64,
        means: Means,
    ) -> bool {
        let problem = self.problem;
        if !matches!(means, Means::Resplit)
            && let Some(found) = exchange::find(problem, partition, pair, target, self.budget)
        {
            exchange::apply(problem, partition, pair, found);
            return true;
        }
        if !matches!(means, Means::Exchange)
            && let Some([first, second]) =
                self.resplitter.find(problem, partition, pair, target, &mut self.rng, self.budget)
        {
            partition.set(problem, pair.0, first);
            partition.set(problem, pair.1, second);
            return true;
        }
        false
    }

    /// Swaps a few random items; every other swap takes one of the slowest group's.
    fn shake(&mut self, partition: &mut Partition) {
        for _ in 0..=self.rng.below(SHAKE_SWAPS_MAX) {
            let is_at_slowest = self.rng.below(2) == 0;
            let first = if is_at_slowest { partition.slowest() } else { self.rng.below(self.problem.groups) };
            let second = self.rng.below(self.problem.groups);
            self.swap_random(partition, first, second);
        }
    }

    /// Swaps a random item of each group, unless a cap forbids it.
    fn swap_random(&mut self, partition: &mut Partition, first: usize, second: usize) {
        if first == second || partition.groups[first].is_empty() || partition.groups[second].is_empty() {
            return;
        }
        let (problem, rng) = (self.problem, &mut self.rng);
        let given = partition.take(problem, first, rng.below(partition.groups[first].len()));
        let taken = partition.take(problem, second, rng.below(partition.groups[second].len()));
        let is_allowed =
            partition.has_room(problem, first, taken) && partition.has_room(problem, second, given);
        let (to_first, to_second) = if is_allowed { (taken, given) } else { (given, taken) };
        partition.add(problem, first, to_first);
        partition.add(problem, second, to_second);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::multi_lpt;
    use crate::{Caps, Instance};

    #[test]
    fn a_split_that_lpt_misses_is_found() {
        let instance = Instance::new(2, 1, vec![5, 4, 3, 3, 3]).unwrap();
        let problem = Problem::new(&instance, &Caps::default()).unwrap();
        let mut partition = multi_lpt::assign(&problem).unwrap();
        assert_eq!(partition.makespan(), 10);
        improve(&problem, &mut partition, &mut Budget::work(1000));
        assert_eq!(partition.makespan(), 9);
    }

    #[test]
    fn an_empty_budget_changes_nothing() {
        let instance = Instance::new(2, 1, vec![5, 4, 3, 3, 3]).unwrap();
        let problem = Problem::new(&instance, &Caps::default()).unwrap();
        let mut partition = multi_lpt::assign(&problem).unwrap();
        let before = partition.groups.clone();
        improve(&problem, &mut partition, &mut Budget::work(0));
        assert_eq!(partition.groups, before);
    }
}
