//! Iterated local search that relieves the slowest group.
//!
//! Only the slowest group can lower the makespan, so every step relieves it, by the first operator that
//! succeeds: an exchange with a partner, a new split of two groups, detours through splits between other
//! groups, an ejection chain, a new split of three groups. The first target is ambitious (half the way to the
//! lower bound), then any improvement counts. If nothing helps, a few random swaps perturb the groups and the
//! search resumes from there; if groups hold few items, a target descent takes turns with that. The best
//! result is kept.
//!
//! Decisive comparisons use integers, the generator is seeded from the instance, and effort is counted in
//! work units: the result is the same on every machine.

mod ejection_chain;
mod exchange;
mod resplit;
mod subset_sums;
mod target_descent;
mod three_way;

use dflop_costmodel::random::SplitMix64;
use ejection_chain::ChainFinder;
use resplit::{Resplitter, Wanted};

use super::{Partitioner, Solution, multi_lpt, within};
use crate::budget::Budget;
use crate::error::Result;
use crate::partition::problem::{Partition, Problem};

/// Iterated local search, starting from the multi-LPT result.
#[derive(Debug)]
pub(super) struct IteratedSearch;

impl Partitioner for IteratedSearch {
    fn name(&self) -> &'static str {
        "search"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["balanced"]
    }

    fn searches_pipelines(&self) -> bool {
        true
    }

    fn solve(&self, problem: &Problem<'_>, budget: &mut Budget) -> Result<Solution> {
        let mut partition = within(problem, multi_lpt::assign(problem))?;
        improve(problem, &mut partition, budget);
        Ok(Solution::new(problem, partition))
    }
}

/// Random partners tried before all groups are tried.
const PARTNERS: usize = 64;
/// Pairs of other groups that are resplit on a detour.
const DETOURS_MAX: usize = 256;
/// Random group triples that are resplit.
const TRIPLES: usize = 6;
/// Perturbations in a row, without a better result, before the search returns to the best.
const PERTURBATIONS_FROM_BEST: u32 = 50;
/// Perturbations in a row, without a better result, before the search ends.
const PERTURBATIONS_MAX: u32 = 4096;
/// Perturbations in a row before the search ends, once the result counts as at the bound.
const PERTURBATIONS_MAX_NEAR: u32 = 8;
/// Binary order of the relative gap, 240 ns in a second, up to which a result counts as at the bound: tile
/// rounding may cost that.
const NEAR_SHIFT: u32 = 22;
/// Mean items per group up to which the target descent takes turns.
const FEW_ITEMS: usize = 5;
/// Minimum number of steps per target descent.
const DESCENT_STEPS_MIN: u64 = 20_000;

/// Lowers the makespan until it meets the lower bound or the budget is spent. Never makes it worse.
///
/// # Source
/// The neighborhood is from Korf, "Multi-way number partitioning", IJCAI 2009, two sets at a time, on several
/// dimensions; restarts as in Lourenço, Martin and Stützle, "Iterated local search", 2003.
pub(crate) fn improve(problem: &Problem<'_>, partition: &mut Partition, budget: &mut Budget) {
    let mut search = Search::new(problem, budget);
    search.descend(partition);
    if search.budget.is_spent() {
        return;
    }
    let mut best = partition.clone();
    let (mut perturbations, mut turn) = (0, search.budget.steps());
    let has_few_items = problem.items <= FEW_ITEMS * problem.groups;
    while best.makespan() > problem.bound.ns
        && perturbations < patience(problem, &best)
        && !search.budget.is_spent()
    {
        // Also at 0: at the start, and after every improvement.
        if perturbations % PERTURBATIONS_FROM_BEST == 0 {
            if has_few_items && search.descend_to_targets(&mut best, &mut turn) {
                perturbations = 0;
            }
            partition.clone_from(&best);
        }
        perturbations += 1;
        perturb(problem, partition, &mut search.rng);
        search.descend(partition);
        if partition.makespan() < best.makespan() {
            best.clone_from(partition);
            perturbations = 0;
        }
    }
    partition.clone_from(&best);
}

/// Returns how many perturbations in a row may fail.
///
/// Times are rounded, so an optimum may be nanoseconds above the bound.
fn patience(problem: &Problem<'_>, best: &Partition) -> u32 {
    let is_near = best.makespan() - problem.bound.ns <= problem.bound.ns >> NEAR_SHIFT;
    if is_near { PERTURBATIONS_MAX_NEAR } else { PERTURBATIONS_MAX }
}

struct Search<'a> {
    problem: &'a Problem<'a>,
    budget: &'a mut Budget,
    rng: SplitMix64,
    resplitter: Resplitter,
    chains: ChainFinder,
}

/// Operators that change a pair of groups.
#[derive(Clone, Copy)]
enum PairOperator {
    Exchange,
    Resplit,
    Both,
}

impl<'a> Search<'a> {
    fn new(problem: &'a Problem<'a>, budget: &'a mut Budget) -> Self {
        let (resplitter, chains) = (Resplitter::default(), ChainFinder::default());
        Self { problem, budget, rng: SplitMix64::new(problem.seed), resplitter, chains }
    }

    /// Relieves the slowest group repeatedly, until nothing helps.
    fn descend(&mut self, partition: &mut Partition) {
        while partition.makespan() > self.problem.bound.ns && !self.budget.is_spent() {
            if !self.relieve(partition) {
                return;
            }
        }
    }

    /// Lowers the slowest group's value; returns whether that succeeded.
    fn relieve(&mut self, partition: &mut Partition) -> bool {
        let slow = partition.slowest();
        let (value, goal) = (partition.value(slow), self.problem.bound.ns);
        let halfway = goal + (value - goal) / 2;
        let some = self.some_partners(slow);
        let some = || some.iter().copied();
        let groups = self.problem.groups;
        let all = || (0..groups).filter(|&other| other != slow);
        // A group with more items than a pool holds takes part with different items each time.
        self.resplitter.redraw(slow);
        self.try_partners(partition, slow, some(), halfway, PairOperator::Both)
            || self.try_partners(partition, slow, some(), value - 1, PairOperator::Both)
            || self.try_partners(partition, slow, all(), value - 1, PairOperator::Exchange)
            || self.try_partners(partition, slow, all(), value - 1, PairOperator::Resplit)
            || self.try_detours(partition, slow)
            || self.try_chains(partition, slow)
            || self.try_triples(partition, slow)
    }

    /// Draws random partners.
    fn some_partners(&mut self, slow: usize) -> Vec<usize> {
        (0..PARTNERS.min(self.problem.groups - 1)).map(|_| self.other_group(slow)).collect()
    }

    /// Draws a different group.
    fn other_group(&mut self, group: usize) -> usize {
        let drawn = self.rng.below(self.problem.groups - 1);
        drawn + usize::from(drawn >= group)
    }

    /// Changes the slowest group together with the first partner that helps.
    fn try_partners(
        &mut self,
        partition: &mut Partition,
        slow: usize,
        partners: impl IntoIterator<Item = usize>,
        target: u64,
        operator: PairOperator,
    ) -> bool {
        for other in partners {
            if self.budget.is_spent() {
                return false;
            }
            if partition.value(other) <= target && self.try_pair(partition, (slow, other), target, operator) {
                return true;
            }
        }
        false
    }

    /// Changes two groups so that both end at or below the target, if possible.
    fn try_pair(
        &mut self,
        partition: &mut Partition,
        pair: (usize, usize),
        target: u64,
        operator: PairOperator,
    ) -> bool {
        let problem = self.problem;
        if !matches!(operator, PairOperator::Resplit)
            && let Some(found) = exchange::find(problem, partition, pair, target, self.budget)
        {
            exchange::apply(problem, partition, pair, found);
            return true;
        }
        !matches!(operator, PairOperator::Exchange) && self.try_resplit(partition, pair, target, Wanted::Best)
    }

    /// Resplits two groups, if a matching split exists.
    fn try_resplit(
        &mut self,
        partition: &mut Partition,
        pair: (usize, usize),
        target: u64,
        wanted: Wanted,
    ) -> bool {
        let (problem, target) = (self.problem, (target, wanted));
        let of = (problem, &*partition);
        let found = self.resplitter.find(of, pair, target, &mut self.rng, self.budget);
        let Some([first, second]) = found else { return false };
        partition.set(problem, pair.0, first);
        partition.set(problem, pair.1, second);
        true
    }

    /// Resplits pairs of other groups within the target: either may then be the missing partner.
    fn try_detours(&mut self, partition: &mut Partition, slow: usize) -> bool {
        if self.problem.groups < 3 {
            return false;
        }
        let target = partition.value(slow) - 1;
        for _ in 0..DETOURS_MAX {
            let first = self.other_group(slow);
            let second = self.other_group(first);
            // The detour must keep both groups below the slowest group, or nothing is gained.
            if second == slow || partition.value(first).max(partition.value(second)) > target {
                continue;
            }
            if self.budget.is_spent() {
                return false;
            }
            if self.try_resplit(partition, (first, second), target, Wanted::Another)
                && self.try_partners(partition, slow, [first, second], target, PairOperator::Resplit)
            {
                return true;
            }
        }
        false
    }

    /// Moves items along a chain of groups; first tries most of the way to the bound.
    fn try_chains(&mut self, partition: &mut Partition, slow: usize) -> bool {
        let (problem, value, goal) = (self.problem, partition.value(slow), self.problem.bound.ns);
        for target in [goal + (u128::from(value - goal) * 7 / 10) as u64, value - 1] {
            let of = (problem, &*partition);
            if let Some(moves) = self.chains.find(of, slow, target, &mut self.rng, self.budget) {
                ejection_chain::apply(problem, partition, &moves);
                return true;
            }
        }
        false
    }

    /// Resplits the slowest and two random groups.
    fn try_triples(&mut self, partition: &mut Partition, slow: usize) -> bool {
        if self.problem.groups < 3 {
            return false;
        }
        let target = partition.value(slow) - 1;
        for _ in 0..TRIPLES {
            let groups = [slow, self.other_group(slow), self.other_group(slow)];
            if groups[1] == groups[2] || self.budget.is_spent() {
                continue;
            }
            let found = three_way::find((self.problem, partition), groups, target, self.budget);
            // If nothing was found, there are no pairs and the groups stay.
            for (group, items) in groups.into_iter().zip(found.into_iter().flatten()) {
                partition.set(self.problem, group, items);
            }
            if partition.value(slow) <= target {
                return true;
            }
        }
        false
    }

    /// Runs a target descent with as many steps as were spent since the last descent.
    fn descend_to_targets(&mut self, best: &mut Partition, turn: &mut u64) -> bool {
        let steps_max = (self.budget.steps() - *turn).max(DESCENT_STEPS_MIN);
        let has_found = target_descent::lower(self.problem, best, steps_max, &mut self.rng, self.budget);
        *turn = self.budget.steps();
        has_found
    }
}

/// Maximum number of swaps in a perturbation.
const SWAPS_MAX: usize = 3;

/// Swaps a few random items; every second swap involves the slowest group.
///
/// # Source
/// Lourenço, Martin and Stützle, "Iterated local search", Handbook of Metaheuristics, 2003.
fn perturb(problem: &Problem<'_>, partition: &mut Partition, rng: &mut SplitMix64) {
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
    use crate::partition::strategy::multi_lpt;
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
