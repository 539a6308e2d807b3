//! Microbatches in the slots of all ranks, with the makespan of each rank.
//!
//! Slot `s` of rank `r` is group `r * microbatches + s` of the partition. A change is tried on the times
//! first; the partition follows only if the change stays.

use super::change::Change;
use super::redealt::Redealt;
use super::timeline::{RankTimes, Timeline};
use crate::budget::Budget;
use crate::error::Result;
use crate::partition::Partition;
use crate::pipeline::PipelineConfig;
use crate::problem::Problem;
use crate::simulate::split_time;

/// A plan that can be changed, and the best that it was.
pub(crate) struct Plan<'a> {
    problem: &'a Problem<'a>,
    slots: Partition,
    timeline: Timeline,
    redealt: Redealt,
    microbatches: usize,
    ranks: Vec<RankTimes>,
    slowest: usize,
    best_ns: u64,
    /// The best plan, once it was left for a worse one.
    best: Option<Partition>,
    trial: Trial,
}

/// A change on trial; kept for its memory.
#[derive(Default)]
struct Trial {
    /// Columns of the two slots after the change.
    after: [Vec<u64>; 2],
    /// Cells of the ranks' times before it: rank, cell, nanoseconds.
    before: Vec<(usize, usize, u64)>,
    /// Ranks that it touches, with their makespans after it.
    touched: Vec<(usize, u64)>,
}

impl<'a> Plan<'a> {
    /// Simulates all ranks; `config` fits the problem.
    pub(crate) fn new(problem: &'a Problem<'a>, slots: Partition, config: &PipelineConfig) -> Result<Self> {
        let microbatches = problem.groups / config.dp_size;
        let timeline = Timeline::new(&config.rows(), problem.modules, microbatches)?;
        let redealt = Redealt::new(problem, config);
        let ranks = vec![timeline.rank(2 * problem.modules * microbatches); config.dp_size];
        let trial = Trial { after: [(); 2].map(|()| vec![0; problem.width()]), ..Trial::default() };
        let (slowest, best_ns, best) = (0, 0, None);
        let mut plan =
            Self { problem, slots, timeline, redealt, microbatches, ranks, slowest, best_ns, best, trial };
        plan.refresh();
        plan.best_ns = plan.makespan_ns();
        Ok(plan)
    }

    /// Hands out the items of every slot, ascending, and the makespan of every rank.
    pub(crate) fn into_parts(self) -> (Vec<Vec<u32>>, Vec<u64>) {
        (self.slots.into_groups(), self.ranks.iter().map(|rank| rank.makespan_ns).collect())
    }

    /// The slowest rank's makespan.
    pub(crate) fn makespan_ns(&self) -> u64 {
        self.ranks[self.slowest].makespan_ns
    }

    /// The first of the slowest ranks.
    pub(super) fn slowest(&self) -> usize {
        self.slowest
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Microbatches of a rank.
    pub(super) fn microbatches(&self) -> usize {
        self.microbatches
    }

    pub(super) fn problem(&self) -> &Problem<'a> {
        self.problem
    }

    /// Items in a slot.
    pub(super) fn items(&self, slot: usize) -> usize {
        self.slots.groups[slot].len()
    }

    /// Makes a change if no rank that it touches ends later than `threshold_ns` above the slowest of these
    /// before, and no cap is exceeded.
    pub(super) fn try_change(&mut self, change: Change, threshold_ns: u64, budget: &mut Budget) {
        if !change.loads_after(self.problem, &self.slots, &mut self.trial.after) {
            return;
        }
        self.touch(change, budget);
        let slowest = self.trial.touched.iter().map(|(rank, _)| self.ranks[*rank].makespan_ns).max();
        let limit_ns = slowest.unwrap_or(0).saturating_add(threshold_ns);
        self.trial.before.clear();
        if self.write(change, limit_ns) && self.simulate(change, limit_ns, budget) {
            self.keep_best();
            self.apply(change, budget);
        } else {
            for &(rank, cell, time_ns) in &self.trial.before {
                self.ranks[rank].times_ns[cell] = time_ns;
            }
        }
    }

    /// Lists the ranks whose times a change alters.
    fn touch(&mut self, change: Change, budget: &mut Budget) {
        let [first, second] = self.places(change);
        self.trial.touched.clear();
        if self.redealt.is_empty() || first.1 == second.1 {
            self.trial.touched.push((first.0, 0));
            if first.0 != second.0 {
                self.trial.touched.push((second.0, 0));
            }
        } else {
            let steps = self.redealt.work_out(self.problem, &self.slots, change, &self.trial.after);
            budget.spend(steps);
            self.trial.touched.extend((0..self.ranks.len()).map(|rank| (rank, 0)));
        }
    }

    /// Rank and place of both slots.
    fn places(&self, change: Change) -> [(usize, usize); 2] {
        [change.first, change.second].map(|slot| (slot / self.microbatches, slot % self.microbatches))
    }

    /// Writes the times of the ranks touched. Returns false, at once, if the path that was longest in one
    /// of them now ends above the limit: then so does the rank.
    fn write(&mut self, change: Change, limit_ns: u64) -> bool {
        let (modules, slots) = (self.problem.modules, self.places(change));
        let moves_shared = slots[0].1 != slots[1].1;
        for &(rank, _) in &self.trial.touched {
            let times = &mut self.ranks[rank];
            let mut path_ns = times.makespan_ns as i64;
            for (side, &(owner, place)) in slots.iter().enumerate() {
                for module in 0..modules {
                    let time_ns = match self.redealt.time_after_ns(module, side) {
                        Some(time_ns) if moves_shared => time_ns,
                        None if owner == rank => self.trial.after[side][module],
                        _ => continue,
                    };
                    let (forward_ns, backward_ns) = split_time(time_ns);
                    let cell = 2 * (place * modules + module);
                    for (cell, new_ns) in [(cell, forward_ns), (cell + 1, backward_ns)] {
                        let old_ns = std::mem::replace(&mut times.times_ns[cell], new_ns);
                        path_ns += i64::from(times.critical[cell]) * (new_ns as i64 - old_ns as i64);
                        self.trial.before.push((rank, cell, old_ns));
                    }
                }
            }
            if path_ns > limit_ns as i64 {
                return false;
            }
        }
        true
    }

    /// Works out the makespans of the ranks touched; returns false, at once, if one is above the limit.
    fn simulate(&mut self, change: Change, limit_ns: u64, budget: &mut Budget) -> bool {
        let [first, second] = self.places(change);
        let is_everywhere = !self.redealt.is_empty() && first.1 != second.1;
        for (rank, makespan_ns) in &mut self.trial.touched {
            let (from, to) = if is_everywhere || first.0 == second.0 {
                (first.1.min(second.1), first.1.max(second.1))
            } else if *rank == first.0 {
                (first.1, first.1)
            } else {
                (second.1, second.1)
            };
            budget.spend(self.timeline.window_passes(from, to));
            *makespan_ns = self.timeline.makespan_with(&mut self.ranks[*rank], from, to);
            if *makespan_ns > limit_ns {
                return false;
            }
        }
        true
    }

    /// Copies the plan if it is the best so far and the change on trial makes it worse.
    fn keep_best(&mut self) {
        let touched = self.trial.touched.iter().map(|(_, makespan_ns)| *makespan_ns).max().unwrap_or(0);
        if self.best.is_none() && touched > self.best_ns {
            self.best = Some(self.slots.clone());
        }
    }

    /// Carries out the change on trial, whose times are written.
    fn apply(&mut self, change: Change, budget: &mut Budget) {
        change.apply(self.problem, &mut self.slots);
        self.redealt.apply(self.problem, &self.slots, change);
        for &(rank, _) in &self.trial.touched {
            self.timeline.settle(&mut self.ranks[rank]);
            budget.spend(2 * self.timeline.passes());
        }
        self.find_slowest();
        if self.makespan_ns() < self.best_ns {
            self.best_ns = self.makespan_ns();
            self.best = None;
        }
    }

    /// Takes the best plan seen.
    pub(super) fn return_to_best(&mut self) {
        if let Some(best) = self.best.take() {
            self.slots = best;
            self.refresh();
        }
    }

    fn find_slowest(&mut self) {
        self.slowest = 0;
        for (rank, times) in self.ranks.iter().enumerate() {
            if times.makespan_ns > self.ranks[self.slowest].makespan_ns {
                self.slowest = rank;
            }
        }
    }

    /// Works everything out from the slots.
    fn refresh(&mut self) {
        let modules = self.problem.modules;
        self.redealt.refresh(self.problem, &self.slots);
        for slot in 0..self.problem.groups {
            let (rank, place) = (slot / self.microbatches, slot % self.microbatches);
            for module in 0..modules {
                let own_ns = self.slots.load(self.problem, slot)[module];
                let time_ns = self.redealt.time_ns(module, place).unwrap_or(own_ns);
                let (forward_ns, backward_ns) = split_time(time_ns);
                let cell = 2 * (place * modules + module);
                self.ranks[rank].times_ns[cell] = forward_ns;
                self.ranks[rank].times_ns[cell + 1] = backward_ns;
            }
        }
        for rank in &mut self.ranks {
            self.timeline.settle(rank);
        }
        self.find_slowest();
    }
}
