//! Moves scored by the simulator: what min-max alone cannot see.
//!
//! Equal microbatches are not the best ones: small first and last ones shorten fill and drain, and what a
//! stage waits for depends on the order. So every move here, of slots or of items, is judged by the
//! simulated 1F1B makespan of the ranks that it touches. Only the slowest rank can lower the makespan, so
//! every move touches that one.

use crate::budget::Budget;
use crate::makespan::CompiledSchedule;
use crate::partition::Partition;
use crate::problem::Problem;
use crate::rng::SplitMix64;
use crate::simulate::split_time;

/// Rejected moves in a row before the search gives up.
const REJECTED_MAX: u32 = 200_000;

/// Microbatches in the slots of all ranks, with the makespan of each rank.
///
/// Slot `s` of rank `r` is group `r * microbatches + s` of the partition.
pub(crate) struct Plan<'a> {
    problem: &'a Problem<'a>,
    slots: Partition,
    compiled: CompiledSchedule,
    microbatches: usize,
    /// Per rank, `[modules * microbatches]` each.
    forward_ns: Vec<Vec<u64>>,
    backward_ns: Vec<Vec<u64>>,
    makespans_ns: Vec<u64>,
}

/// A change that can be taken back.
#[derive(Clone, Copy)]
enum Move {
    /// Two slots change places.
    Slots(usize, usize),
    /// The last item of the second slot came from the first.
    Item(usize, usize),
    /// The last items of both slots came from one another.
    Items(usize, usize),
}

impl<'a> Plan<'a> {
    /// Simulates all ranks.
    pub(crate) fn new(
        problem: &'a Problem<'a>,
        slots: Partition,
        compiled: CompiledSchedule,
        microbatches: usize,
    ) -> Self {
        let ranks = problem.groups / microbatches;
        let times = vec![vec![0; problem.modules * microbatches]; ranks];
        let (forward_ns, backward_ns) = (times.clone(), times);
        let makespans_ns = vec![0; ranks];
        let mut plan = Self { problem, slots, compiled, microbatches, forward_ns, backward_ns, makespans_ns };
        for slot in 0..problem.groups {
            plan.refresh(slot);
        }
        for rank in 0..ranks {
            plan.makespans_ns[rank] = plan.simulate(rank);
        }
        plan
    }

    /// Hands out the items of every slot, ascending, and the makespan of every rank.
    pub(crate) fn into_parts(self) -> (Vec<Vec<u32>>, Vec<u64>) {
        (self.slots.into_groups(), self.makespans_ns)
    }

    /// Lowers the slowest rank's makespan until it meets `goal_ns`, the budget is spent or nothing helps.
    /// Never makes it worse.
    pub(crate) fn improve(&mut self, goal_ns: u64, budget: &mut Budget) {
        let mut rng = SplitMix64::new(self.problem.seed);
        let mut rejected = 0;
        while rejected < REJECTED_MAX && !budget.is_spent() {
            let slow = self.slowest();
            let makespan_ns = self.makespans_ns[slow];
            if makespan_ns <= goal_ns {
                return;
            }
            budget.spend(1);
            rejected += 1;
            let Some(change) = self.draw(slow, &mut rng) else { continue };
            if !self.try_move(slow, change, budget) {
                self.undo(change);
            } else if self.makespans_ns[self.slowest()] < makespan_ns {
                rejected = 0;
            }
        }
    }

    /// The first of the slowest ranks.
    fn slowest(&self) -> usize {
        let mut slowest = 0;
        for (rank, makespan_ns) in self.makespans_ns.iter().enumerate() {
            if *makespan_ns > self.makespans_ns[slowest] {
                slowest = rank;
            }
        }
        slowest
    }

    /// Makes a random move at the slowest rank; nothing if it is not allowed.
    fn draw(&mut self, slow: usize, rng: &mut SplitMix64) -> Option<Move> {
        let ranks = self.makespans_ns.len();
        let kind = rng.below(4);
        let first = slow * self.microbatches + rng.below(self.microbatches);
        let is_inside = kind < 2 || ranks == 1;
        let rank = if is_inside { slow } else { (slow + 1 + rng.below(ranks - 1)) % ranks };
        let second = rank * self.microbatches + rng.below(self.microbatches);
        if first == second {
            return None;
        }
        if kind == 0 {
            self.slots.swap_groups(self.problem, first, second);
            return Some(Move::Slots(first, second));
        }
        let is_swap = rng.below(3) > 0 || self.slots.groups[first].len() == 1;
        self.exchange(first, second, is_swap, rng)
    }

    /// Moves a random item, or swaps two; nothing if a slot would be empty or a cap exceeded.
    fn exchange(&mut self, first: usize, second: usize, is_swap: bool, rng: &mut SplitMix64) -> Option<Move> {
        let (problem, slots) = (self.problem, &mut self.slots);
        let (givers, takers) = (slots.groups[first].len(), slots.groups[second].len());
        if givers == 0 || (is_swap && takers == 0) {
            return None;
        }
        let given = slots.take(problem, first, rng.below(givers));
        let taken = is_swap.then(|| slots.take(problem, second, rng.below(takers)));
        slots.add(problem, second, given);
        if let Some(taken) = taken {
            slots.add(problem, first, taken);
        }
        let change = if is_swap { Move::Items(first, second) } else { Move::Item(first, second) };
        let is_allowed =
            [first, second].iter().all(|&slot| problem.is_within(self.slots.load(problem, slot)));
        if !is_allowed {
            self.take_back(change);
        }
        is_allowed.then_some(change)
    }

    /// Simulates a move that was made; returns whether it is to stay.
    ///
    /// Inside the slowest rank a move stays if it is not worse; across ranks if neither ends slower than
    /// the slowest was and one ends faster.
    fn try_move(&mut self, slow: usize, change: Move, budget: &mut Budget) -> bool {
        let (first, second) = change.slots();
        self.refresh(first);
        self.refresh(second);
        let other = second / self.microbatches;
        let makespan_ns = self.makespans_ns[slow];
        budget.spend(self.compiled.passes() as u64);
        let slow_ns = self.simulate(slow);
        if slow_ns > makespan_ns {
            return false;
        }
        if other != slow {
            budget.spend(self.compiled.passes() as u64);
            let other_ns = self.simulate(other);
            if other_ns > makespan_ns || slow_ns.min(other_ns) == makespan_ns {
                return false;
            }
            self.makespans_ns[other] = other_ns;
        }
        self.makespans_ns[slow] = slow_ns;
        true
    }

    fn undo(&mut self, change: Move) {
        self.take_back(change);
        let (first, second) = change.slots();
        self.refresh(first);
        self.refresh(second);
    }

    /// Puts the items back where a move took them from.
    fn take_back(&mut self, change: Move) {
        let (problem, slots) = (self.problem, &mut self.slots);
        match change {
            Move::Slots(first, second) => slots.swap_groups(problem, first, second),
            Move::Item(first, second) => {
                let item = slots.take(problem, second, slots.groups[second].len() - 1);
                slots.add(problem, first, item);
            }
            Move::Items(first, second) => {
                let given = slots.take(problem, second, slots.groups[second].len() - 1);
                let taken = slots.take(problem, first, slots.groups[first].len() - 1);
                slots.add(problem, first, given);
                slots.add(problem, second, taken);
            }
        }
    }

    /// Writes a slot's times where the simulator reads them.
    fn refresh(&mut self, slot: usize) {
        let (rank, place) = (slot / self.microbatches, slot % self.microbatches);
        let load = &self.slots.load(self.problem, slot)[..self.problem.modules];
        for (module, time) in load.iter().enumerate() {
            let cell = module * self.microbatches + place;
            (self.forward_ns[rank][cell], self.backward_ns[rank][cell]) = split_time(*time);
        }
    }

    fn simulate(&mut self, rank: usize) -> u64 {
        self.compiled.makespan_of(&self.forward_ns[rank], &self.backward_ns[rank])
    }
}

impl Move {
    fn slots(self) -> (usize, usize) {
        match self {
            Self::Slots(first, second) | Self::Item(first, second) | Self::Items(first, second) => {
                (first, second)
            }
        }
    }
}
