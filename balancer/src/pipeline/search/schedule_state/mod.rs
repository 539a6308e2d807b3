//! Microbatches in slots on all ranks, with the step's makespan.
//!
//! Slot `s` on rank `r` is group `r * microbatches + s` in the partition. A change is tried on the times
//! first; the partition follows only if the change is accepted.
//!
//! Ranks whose modules all have the pipelines' DP size run independently, each on a separate timeline. A
//! shared module couples them: the module's backward pass for a slot waits for all ranks, so a single
//! timeline holds all ranks.

use super::shared_modules::SharedModules;
use super::stage_memory::{FullestWindow, StageMemory};
use super::{Change, Touched, Trial};
use crate::budget::Budget;
use crate::partition::{Partition, Problem};
use crate::pipeline::config::PipelineConfig;
use crate::pipeline::pass_graph::PassShape;
use crate::pipeline::timeline::{PassTimes, Timeline};
use crate::simulate::split_time;
use std::cmp::Ordering;

/// Search state, and the best visited state.
pub(crate) struct ScheduleState<'a> {
    problem: &'a Problem<'a>,
    slots: Partition,
    timeline: Timeline,
    shared: SharedModules,
    memory: Option<StageMemory<'a>>,
    microbatches: usize,
    dp_size: usize,
    /// Whether the ranks are coupled, on a single timeline.
    is_coupled: bool,
    /// Times for each rank, or for all ranks together.
    timelines: Vec<PassTimes>,
    /// Index of the slowest timeline.
    slowest: usize,
    best_ns: u64,
    /// Slots in the best state, once the search has left it for a worse state.
    best: Option<Partition>,
    trial: Trial,
}

impl<'a> ScheduleState<'a> {
    /// Simulates all ranks; `config` fits the problem.
    pub(crate) fn new(problem: &'a Problem<'a>, slots: Partition, config: &'a PipelineConfig) -> Self {
        let microbatches = problem.groups / config.dp_size;
        let (dp_size, shared) = (config.dp_size, SharedModules::new(problem, config));
        let is_coupled = dp_size > 1 && !shared.is_empty();
        let is_shared: Vec<bool> =
            (0..problem.modules).map(|module| is_coupled && shared.is_shared(module)).collect();
        let (rows, ranks) = (config.rows(), if is_coupled { dp_size } else { 1 });
        let step = config.step_shape(microbatches);
        let shape = PassShape { step, rows: &rows, is_shared: &is_shared, ranks };
        let timeline = Timeline::new(shape);
        let timelines = vec![timeline.times(); if is_coupled { 1 } else { dp_size }];
        let trial = Trial { after: [(); 2].map(|()| vec![0; problem.width()]), ..Trial::default() };
        let memory = StageMemory::new(&slots, config);
        let mut state = Self {
            problem,
            slots,
            timeline,
            shared,
            memory,
            microbatches,
            dp_size,
            is_coupled,
            timelines,
            slowest: 0,
            best_ns: 0,
            best: None,
            trial,
        };
        state.refresh();
        state.best_ns = state.makespan_ns();
        state
    }

    /// Returns the items in every slot, ascending, and every rank's makespan.
    pub(crate) fn into_parts(self) -> (Vec<Vec<u32>>, Vec<u64>) {
        let ranks_ns = self.timelines.iter().flat_map(|times| self.timeline.rank_ends_ns(times)).collect();
        (self.slots.into_groups(), ranks_ns)
    }

    /// Returns the step's makespan.
    pub(crate) fn makespan_ns(&self) -> u64 {
        self.timelines[self.slowest].makespan_ns
    }

    /// Whether memory has limits.
    pub(super) fn has_limits(&self) -> bool {
        self.memory.is_some()
    }

    /// Returns the bytes above the memory limits, summed over limits and ranks; 0 without limits.
    pub(crate) fn memory_excess(&self) -> u64 {
        self.memory.as_ref().map_or(0, StageMemory::excess)
    }

    /// Returns the state's sort key: the bytes above the memory limits, then the makespan.
    pub(crate) fn value(&self) -> (u64, u64) {
        (self.memory_excess(), self.makespan_ns())
    }

    /// Whether all memory limits are kept and the makespan is at most the goal.
    pub(super) fn is_at(&self, goal_ns: u64) -> bool {
        self.value() <= (0, goal_ns)
    }

    /// Returns the items in every slot, with their loads.
    pub(crate) fn slots(&self) -> &Partition {
        &self.slots
    }

    /// Returns the microbatches that exceed a memory limit most; `None` if no limit is exceeded.
    pub(crate) fn fullest_window(&self) -> Option<FullestWindow> {
        self.memory.as_ref().filter(|memory| memory.excess() > 0)?.fullest_window()
    }

    /// Returns a rank that determines the makespan: the first slowest rank, or for coupled ranks the rank
    /// with the largest part of the longest path.
    pub(super) fn slowest(&self) -> usize {
        if !self.is_coupled {
            return self.slowest;
        }
        let critical = &self.timelines[0].critical;
        let of_rank = |rank: usize| {
            let slots = (0..self.microbatches).flat_map(|place| {
                let own = (0..self.problem.modules).filter(|module| !self.shared.is_shared(*module));
                own.map(move |module| (place, module))
            });
            let passes = slots.map(|(place, module)| {
                let cell = self.cell(rank, place, module);
                critical[cell] + critical[cell + 1]
            });
            passes.sum::<u32>()
        };
        (0..self.dp_size).rev().max_by_key(|rank| of_rank(*rank)).unwrap_or(0)
    }

    pub(super) fn ranks(&self) -> usize {
        self.dp_size
    }

    /// Returns the index for a forward time on its timeline.
    fn cell(&self, rank: usize, place: usize, module: usize) -> usize {
        let rank = if self.is_coupled && !self.shared.is_shared(module) { rank } else { 0 };
        2 * ((rank * self.microbatches + place) * self.problem.modules + module)
    }

    /// Returns the microbatches per rank.
    pub(super) fn microbatches(&self) -> usize {
        self.microbatches
    }

    pub(super) fn problem(&self) -> &Problem<'a> {
        self.problem
    }

    /// Applies a change if no touched rank ends later than `threshold_ns` above the slowest touched rank
    /// before, no cap is exceeded and memory is exceeded no more than before; or at any makespan, if memory
    /// is exceeded less.
    pub(super) fn try_change(&mut self, change: Change, threshold_ns: u64, budget: &mut Budget) {
        if !change.loads_after(self.problem, &self.slots, &mut self.trial.after) {
            return;
        }
        let memory = self.memory.as_mut();
        let excess =
            memory.map_or(Ordering::Equal, |memory| memory.compare_change(&self.slots, change, budget));
        if excess == Ordering::Greater {
            return;
        }
        self.trial.is_repair = excess == Ordering::Less;
        self.touch(change, budget);
        let makespans_ns =
            self.trial.touched.iter().map(|touched| self.timelines[touched.timeline].makespan_ns);
        let slowest = makespans_ns.max();
        let limit_ns = if self.trial.is_repair {
            i64::MAX as u64
        } else {
            slowest.unwrap_or(0).saturating_add(threshold_ns)
        };
        // Rejects at the cost of a few cells what would otherwise take a simulation.
        if !self.may_fit(change, limit_ns, budget) {
            return;
        }
        self.write(change);
        if self.simulate(limit_ns, budget) {
            self.keep_best();
            self.apply(change, budget);
        } else {
            // Rejected: the old times return.
            for &(timeline, cell, time_ns) in &self.trial.before {
                self.timelines[timeline].times_ns[cell] = time_ns;
            }
        }
    }

    /// Lists the timelines that a change alters.
    fn touch(&mut self, change: Change, budget: &mut Budget) {
        let [first, second] = self.places(change);
        let (from, to) = (first.1.min(second.1), first.1.max(second.1));
        let touched = |timeline, from, to| Touched { timeline, from, to, makespan_ns: 0 };
        self.trial.touched.clear();
        // A move between pools changes the time of a shared module.
        if from != to && !self.shared.is_empty() {
            budget.spend(self.shared.compute_change(self.problem, &self.slots, change, &self.trial.after));
        }
        if self.is_coupled {
            self.trial.touched.push(touched(0, from, to));
        } else if first.0 == second.0 {
            self.trial.touched.push(touched(first.0, from, to));
        } else {
            let both = [first, second].map(|(rank, place)| touched(rank, place, place));
            self.trial.touched.extend(both);
        }
    }

    /// Returns the rank and place for both slots.
    fn places(&self, change: Change) -> [(usize, usize); 2] {
        [change.first, change.second].map(|slot| (slot / self.microbatches, slot % self.microbatches))
    }

    /// Whether the currently longest paths stay within the limit; if not, the new makespan cannot either.
    fn may_fit(&self, change: Change, limit_ns: u64, budget: &mut Budget) -> bool {
        self.trial.touched.iter().all(|touched| {
            let times = &self.timelines[touched.timeline];
            let mut path_ns = times.makespan_ns as i64;
            let mut cells = 0;
            self.new_times(change, touched.timeline, |cell, new_ns| {
                cells += 1;
                path_ns += i64::from(times.critical[cell]) * (new_ns as i64 - times.times_ns[cell] as i64);
            });
            budget.spend(cells);
            path_ns <= limit_ns as i64
        })
    }

    /// Calls `show` with every cell of a timeline that a change touches, and its new time.
    fn new_times(&self, change: Change, timeline: usize, mut show: impl FnMut(usize, u64)) {
        let modules = self.problem.modules;
        let slots = self.places(change);
        let moves_pools = slots[0].1 != slots[1].1;
        for (side, &(owner, place)) in slots.iter().enumerate() {
            let is_here = self.is_coupled || owner == timeline;
            if !is_here && self.shared.is_empty() {
                continue;
            }
            for module in 0..modules {
                let time_ns = match self.shared.time_after_ns(module, side) {
                    Some(time_ns) if moves_pools => time_ns,
                    None if is_here => self.trial.after[side][module],
                    _ => continue,
                };
                let (forward_ns, backward_ns) = split_time(self.problem.microbatch_ns(module, time_ns));
                let cell = self.cell(owner, place, module);
                show(cell, forward_ns);
                show(cell + 1, backward_ns);
            }
        }
    }

    /// Writes the new times for the touched timelines, and keeps the old times.
    fn write(&mut self, change: Change) {
        let mut before = std::mem::take(&mut self.trial.before);
        before.clear();
        for touched in &self.trial.touched {
            let timeline = touched.timeline;
            self.new_times(change, timeline, |cell, new_ns| before.push((timeline, cell, new_ns)));
        }
        for (timeline, cell, time_ns) in &mut before {
            // After the swap, `before` holds the old times.
            std::mem::swap(time_ns, &mut self.timelines[*timeline].times_ns[*cell]);
        }
        self.trial.before = before;
    }

    /// Computes the makespans for the touched timelines; returns false as soon as a makespan is above the
    /// limit.
    fn simulate(&mut self, limit_ns: u64, budget: &mut Budget) -> bool {
        let Self { trial, timeline, timelines, .. } = self;
        trial.touched.iter_mut().all(|touched| {
            let (makespan_ns, steps) =
                timeline.makespan_with(&mut timelines[touched.timeline], touched.from, touched.to);
            budget.spend(steps);
            touched.makespan_ns = makespan_ns;
            makespan_ns <= limit_ns
        })
    }

    /// Copies the slots if the state is the best so far and the change on trial makes it worse.
    fn keep_best(&mut self) {
        let touched = self.trial.touched.iter().map(|touched| touched.makespan_ns).max();
        // Only the step away from the best state is copied; later states need no copy.
        if self.best.is_none() && !self.trial.is_repair && touched > Some(self.best_ns) {
            self.best = Some(self.slots.clone());
        }
    }

    /// Applies the change on trial, whose times are written.
    fn apply(&mut self, change: Change, budget: &mut Budget) {
        change.apply(self.problem, &mut self.slots);
        self.shared.apply(self.problem, &self.slots, change);
        if let Some(memory) = &mut self.memory {
            memory.apply(change, budget);
        }
        for touched in &self.trial.touched {
            self.timeline.settle(&mut self.timelines[touched.timeline], touched.from, touched.to);
            budget.spend(self.timeline.passes());
        }
        self.find_slowest();
        // The excess never rises, so a state with less is better than all previous states.
        if self.trial.is_repair || self.makespan_ns() < self.best_ns {
            self.best_ns = self.makespan_ns();
            self.best = None;
        }
    }

    /// Returns to the best visited state.
    pub(super) fn return_to_best(&mut self) {
        if let Some(best) = self.best.take() {
            self.slots = best;
            self.refresh();
        }
    }

    /// Replaces the slots as if there had been no search; returns the present slots.
    pub(crate) fn replace(&mut self, slots: Partition) -> Partition {
        let present = std::mem::replace(&mut self.slots, slots);
        self.refresh();
        (self.best_ns, self.best) = (self.makespan_ns(), None);
        present
    }

    /// Restarts from different slots; returns the present slots.
    pub(super) fn restart(&mut self, slots: Partition, budget: &mut Budget) -> Partition {
        budget.spend(self.timeline.passes() * self.timelines.len() as u64 + self.problem.items as u64);
        self.replace(slots)
    }

    fn find_slowest(&mut self) {
        self.slowest = 0;
        for (timeline, times) in self.timelines.iter().enumerate() {
            if times.makespan_ns > self.timelines[self.slowest].makespan_ns {
                self.slowest = timeline;
            }
        }
    }

    /// Computes everything from the slots.
    fn refresh(&mut self) {
        let modules = self.problem.modules;
        self.shared.refresh(self.problem, &self.slots);
        if let Some(memory) = &mut self.memory {
            memory.refresh(&self.slots);
        }
        for slot in 0..self.problem.groups {
            let (rank, place) = (slot / self.microbatches, slot % self.microbatches);
            for module in 0..modules {
                let own_ns = self.slots.load(self.problem, slot)[module];
                let items_ns = self.shared.time_ns(module, place).unwrap_or(own_ns);
                let (forward_ns, backward_ns) = split_time(self.problem.microbatch_ns(module, items_ns));
                let cell = self.cell(rank, place, module);
                let times = &mut self.timelines[if self.is_coupled { 0 } else { rank }];
                (times.times_ns[cell], times.times_ns[cell + 1]) = (forward_ns, backward_ns);
            }
        }
        for times in &mut self.timelines {
            self.timeline.settle(times, 0, self.microbatches - 1);
        }
        self.find_slowest();
    }
}

#[cfg(test)]
mod tests;
