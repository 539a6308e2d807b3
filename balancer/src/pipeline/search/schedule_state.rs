//! Microbatches in the slots of all ranks, with the makespan of each rank.
//!
//! Slot `s` of rank `r` is group `r * microbatches + s` of the partition. A change is tried on the times
//! first; the partition follows only if the change is accepted.

use super::change::Change;
use super::shared_modules::SharedModules;
use crate::budget::Budget;
use crate::error::Result;
use crate::partition::Partition;
use crate::partition::Problem;
use crate::pipeline::config::PipelineConfig;
use crate::pipeline::timeline::{RankTimes, Timeline};
use crate::simulate::split_time;

/// State of the search, and the best one seen.
pub(crate) struct ScheduleState<'a> {
    problem: &'a Problem<'a>,
    slots: Partition,
    timeline: Timeline,
    shared: SharedModules,
    microbatches: usize,
    ranks: Vec<RankTimes>,
    slowest: usize,
    best_ns: u64,
    /// Slots of the best state, once the search has left it for a worse one.
    best: Option<Partition>,
    trial: Trial,
}

/// A change on trial; kept to reuse its memory.
#[derive(Default)]
struct Trial {
    /// Columns of the two slots after the change.
    after: [Vec<u64>; 2],
    /// Cells of the ranks' times before the change: rank, cell, nanoseconds.
    before: Vec<(usize, usize, u64)>,
    touched: Vec<Touched>,
}

/// A rank that a change touches, from one of its microbatches to another.
struct Touched {
    rank: usize,
    from: usize,
    to: usize,
    /// Makespan after the change.
    makespan_ns: u64,
}

impl<'a> ScheduleState<'a> {
    /// Simulates all ranks; `config` fits the problem.
    pub(crate) fn new(problem: &'a Problem<'a>, slots: Partition, config: &PipelineConfig) -> Result<Self> {
        let microbatches = problem.groups / config.dp_size;
        let timeline = Timeline::new(&config.rows(), problem.modules, microbatches)?;
        let shared = SharedModules::new(problem, config);
        let ranks = vec![timeline.rank(2 * problem.modules * microbatches); config.dp_size];
        let trial = Trial { after: [(); 2].map(|()| vec![0; problem.width()]), ..Trial::default() };
        let (slowest, best_ns, best) = (0, 0, None);
        let mut state =
            Self { problem, slots, timeline, shared, microbatches, ranks, slowest, best_ns, best, trial };
        state.refresh();
        state.best_ns = state.makespan_ns();
        Ok(state)
    }

    /// Returns the items of every slot, ascending, and the makespan of every rank.
    pub(crate) fn into_parts(self) -> (Vec<Vec<u32>>, Vec<u64>) {
        (self.slots.into_groups(), self.ranks.iter().map(|rank| rank.makespan_ns).collect())
    }

    /// Returns the slowest rank's makespan.
    pub(crate) fn makespan_ns(&self) -> u64 {
        self.ranks[self.slowest].makespan_ns
    }

    /// Returns the first of the slowest ranks.
    pub(super) fn slowest(&self) -> usize {
        self.slowest
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the microbatches per rank.
    pub(super) fn microbatches(&self) -> usize {
        self.microbatches
    }

    pub(super) fn problem(&self) -> &Problem<'a> {
        self.problem
    }

    /// Returns the number of items in a slot.
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
        let slowest = self.trial.touched.iter().map(|touched| self.ranks[touched.rank].makespan_ns).max();
        let limit_ns = slowest.unwrap_or(0).saturating_add(threshold_ns);
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
            for &(rank, cell, time_ns) in &self.trial.before {
                self.ranks[rank].times_ns[cell] = time_ns;
            }
        }
    }

    /// Lists the ranks whose times a change alters.
    fn touch(&mut self, change: Change, budget: &mut Budget) {
        let [first, second] = self.places(change);
        let (from, to) = (first.1.min(second.1), first.1.max(second.1));
        let touched = |rank, from, to| Touched { rank, from, to, makespan_ns: 0 };
        self.trial.touched.clear();
        // A move between pools changes the time of a shared module on every rank.
        if from != to && !self.shared.is_empty() {
            budget.spend(self.shared.compute_change(self.problem, &self.slots, change, &self.trial.after));
            self.trial.touched.extend((0..self.ranks.len()).map(|rank| touched(rank, from, to)));
        } else if first.0 == second.0 {
            self.trial.touched.push(touched(first.0, from, to));
        } else {
            let both = [first, second].map(|(rank, place)| touched(rank, place, place));
            self.trial.touched.extend(both);
        }
    }

    /// Returns rank and place of both slots.
    fn places(&self, change: Change) -> [(usize, usize); 2] {
        [change.first, change.second].map(|slot| (slot / self.microbatches, slot % self.microbatches))
    }

    /// Whether the currently longest paths stay within the limit; if not, the new makespan cannot either.
    fn may_fit(&self, change: Change, limit_ns: u64, budget: &mut Budget) -> bool {
        self.trial.touched.iter().all(|touched| {
            let times = &self.ranks[touched.rank];
            let mut path_ns = times.makespan_ns as i64;
            let mut cells = 0;
            self.new_times(change, touched.rank, |cell, new_ns| {
                cells += 1;
                path_ns += i64::from(times.critical[cell]) * (new_ns as i64 - times.times_ns[cell] as i64);
            });
            budget.spend(cells);
            path_ns <= limit_ns as i64
        })
    }

    /// Calls `show` with every cell of a rank that a change touches, and its new time.
    fn new_times(&self, change: Change, rank: usize, mut show: impl FnMut(usize, u64)) {
        let modules = self.problem.modules;
        let slots = self.places(change);
        let moves_pools = slots[0].1 != slots[1].1;
        for (side, &(owner, place)) in slots.iter().enumerate() {
            if owner != rank && self.shared.is_empty() {
                continue;
            }
            for module in 0..modules {
                let time_ns = match self.shared.time_after_ns(module, side) {
                    Some(time_ns) if moves_pools => time_ns,
                    None if owner == rank => self.trial.after[side][module],
                    _ => continue,
                };
                let (forward_ns, backward_ns) = split_time(time_ns);
                let cell = 2 * (place * modules + module);
                show(cell, forward_ns);
                show(cell + 1, backward_ns);
            }
        }
    }

    /// Writes the new times of the ranks touched, and keeps the old ones.
    fn write(&mut self, change: Change) {
        let mut before = std::mem::take(&mut self.trial.before);
        before.clear();
        for touched in &self.trial.touched {
            let rank = touched.rank;
            self.new_times(change, rank, |cell, new_ns| before.push((rank, cell, new_ns)));
        }
        for (rank, cell, time_ns) in &mut before {
            // After the swap, `before` holds the old times.
            std::mem::swap(time_ns, &mut self.ranks[*rank].times_ns[*cell]);
        }
        self.trial.before = before;
    }

    /// Computes the makespans of the ranks touched; returns false as soon as one is above the limit.
    fn simulate(&mut self, limit_ns: u64, budget: &mut Budget) -> bool {
        let Self { trial, timeline, ranks, .. } = self;
        trial.touched.iter_mut().all(|touched| {
            let (makespan_ns, steps) =
                timeline.makespan_with(&mut ranks[touched.rank], touched.from, touched.to);
            budget.spend(steps);
            touched.makespan_ns = makespan_ns;
            makespan_ns <= limit_ns
        })
    }

    /// Copies the slots if the state is the best so far and the change on trial makes it worse.
    fn keep_best(&mut self) {
        let touched = self.trial.touched.iter().map(|touched| touched.makespan_ns).max();
        // Only the step away from the best state is copied; later states need no copy.
        if self.best.is_none() && touched > Some(self.best_ns) {
            self.best = Some(self.slots.clone());
        }
    }

    /// Applies the change on trial, whose times are written.
    fn apply(&mut self, change: Change, budget: &mut Budget) {
        change.apply(self.problem, &mut self.slots);
        self.shared.apply(self.problem, &self.slots, change);
        for touched in &self.trial.touched {
            self.timeline.settle(&mut self.ranks[touched.rank], touched.from, touched.to);
            budget.spend(self.timeline.passes());
        }
        self.find_slowest();
        if self.makespan_ns() < self.best_ns {
            self.best_ns = self.makespan_ns();
            self.best = None;
        }
    }

    /// Returns to the best state seen.
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

    /// Computes everything from the slots.
    fn refresh(&mut self) {
        let modules = self.problem.modules;
        self.shared.refresh(self.problem, &self.slots);
        for slot in 0..self.problem.groups {
            let (rank, place) = (slot / self.microbatches, slot % self.microbatches);
            for module in 0..modules {
                let own_ns = self.slots.load(self.problem, slot)[module];
                let time_ns = self.shared.time_ns(module, place).unwrap_or(own_ns);
                let (forward_ns, backward_ns) = split_time(time_ns);
                let cell = 2 * (place * modules + module);
                self.ranks[rank].times_ns[cell] = forward_ns;
                self.ranks[rank].times_ns[cell + 1] = backward_ns;
            }
        }
        for rank in &mut self.ranks {
            self.timeline.settle(rank, 0, self.microbatches - 1);
        }
        self.find_slowest();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::search::change::ChangeKind;
    use crate::rng::SplitMix64;
    use crate::schedule::ScheduleKind;
    use crate::simulate::CompiledSchedule;
    use crate::{Caps, Instance};
    use proptest::prelude::*;

    /// Simulates the makespans of a state's ranks from its items.
    fn simulated(instance: &Instance, config: &PipelineConfig, state: &ScheduleState<'_>) -> Vec<u64> {
        let ranks: Vec<Vec<Vec<u32>>> =
            state.slots.groups.chunks(state.microbatches).map(<[_]>::to_vec).collect();
        let rows: Vec<usize> = (0..config.rows().len()).collect();
        let kind = ScheduleKind::OneForwardOneBackward;
        let mut compiled = CompiledSchedule::new(kind, &rows, state.microbatches).unwrap();
        let times = config.ranks_times(instance, &ranks).unwrap();
        times.iter().map(|times| compiled.makespan_ns(times)).collect()
    }

    fn random_change(state: &ScheduleState<'_>, rng: &mut SplitMix64) -> Option<Change> {
        let [first, second] = [(); 2].map(|()| rng.below(state.problem.groups));
        let (givers, takers) = (state.items(first), state.items(second));
        let kind = match rng.below(3) {
            0 => ChangeKind::Slots,
            1 if givers > 0 => ChangeKind::Items { gives: rng.below(givers), takes: None },
            _ if givers > 0 && takers > 0 => {
                ChangeKind::Items { gives: rng.below(givers), takes: Some(rng.below(takers)) }
            }
            _ => return None,
        };
        (first != second).then_some(Change { first, second, kind })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn makespans_follow_every_change(
            times_ns in prop::collection::vec(0..1000_u64, 60),
            stages in prop::collection::vec(1..4_usize, 2),
            shape in prop::sample::select(vec![(1, 6), (2, 3), (3, 4), (4, 1)]),
            encoder_dp in 1..6_usize,
            seed in any::<u64>(),
        ) {
            let (dp_size, microbatches) = shape;
            let instance = Instance::new(dp_size * microbatches, 2, times_ns).unwrap();
            let config = PipelineConfig::new(dp_size, stages).module_dp_sizes(vec![encoder_dp, dp_size]);
            let problem = Problem::new(&instance, &Caps::default()).unwrap();
            let mut rng = SplitMix64::new(seed);
            let mut groups = vec![Vec::new(); instance.groups()];
            (0..30).for_each(|item| groups[rng.below(instance.groups())].push(item));
            let mut state = ScheduleState::new(&problem, Partition::from_groups(&problem, groups), &config).unwrap();
            let mut best_ns = state.makespan_ns();
            for _ in 0..40 {
                let limit_ns = if rng.below(2) == 0 { u64::MAX / 4 } else { 100 };
                let Some(change) = random_change(&state, &mut rng) else { continue };
                state.try_change(change, limit_ns, &mut Budget::work(u64::MAX));
                let makespans_ns: Vec<u64> = state.ranks.iter().map(|rank| rank.makespan_ns).collect();
                prop_assert_eq!(&makespans_ns, &simulated(&instance, &config, &state));
                prop_assert_eq!(state.makespan_ns(), makespans_ns.into_iter().max().unwrap());
                best_ns = best_ns.min(state.makespan_ns());
            }
            state.return_to_best();
            prop_assert_eq!(state.makespan_ns(), best_ns);
            prop_assert_eq!(simulated(&instance, &config, &state).into_iter().max(), Some(best_ns));
        }
    }

    #[test]
    fn a_change_above_the_limit_leaves_no_trace() {
        let instance = Instance::new(4, 1, vec![90, 90, 90, 90]).unwrap();
        let config = PipelineConfig::new(2, vec![2]);
        let problem = Problem::new(&instance, &Caps::default()).unwrap();
        let groups = (0..4).map(|item| vec![item]).collect();
        let mut state =
            ScheduleState::new(&problem, Partition::from_groups(&problem, groups), &config).unwrap();
        let kind = ChangeKind::Items { gives: 0, takes: None };
        state.try_change(Change { first: 0, second: 2, kind }, 149, &mut Budget::work(1));
        assert_eq!(state.slots.groups, [[0], [1], [2], [3]]);
        assert_eq!(simulated(&instance, &config, &state), [270, 270]);
        state.try_change(Change { first: 0, second: 2, kind }, 150, &mut Budget::work(1));
        assert_eq!(simulated(&instance, &config, &state), [180, 420]);
    }
}
