//! Assigns and orders the microbatches on every DP rank in a pipeline.

use super::bound::pipeline_lower_bound;
use super::config::{PipelineConfig, PipelineObjective};
use super::relaxation::Relaxation;
use super::search::{MoveSet, ScheduleState};
use super::{memory_start, order, relaxation, search};
use crate::budget::Budget;
use crate::error::{Error, Result};
use crate::instance::{Caps, Instance};
use crate::partition;
use crate::partition::{LowerBound, Partition, Problem, Strategy};

/// Minimum and maximum number of passes that the lower bound may visit.
const BOUND_PASSES: std::ops::Range<u64> = 1 << 16..1 << 20;
/// Number of passes that a relaxation visits if it is only a start.
const START_PASSES: u64 = 1 << 13;
/// Elementary search steps per bound step.
const BOUND_SHARE: u64 = 16;
/// Share of a search for relieving a start that exceeds memory.
const REPAIR_SHARE: u64 = 8;
/// Maximum number of elementary steps, per item, in a partition search before the order is searched.
const MIN_MAX_STEPS: u64 = 1 << 13;

/// Ordered microbatches on every DP rank, makespan and lower bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipelineAssignment {
    /// Items, ascending, by rank and by microbatch in execution order.
    pub ranks: Vec<Vec<Vec<u32>>>,
    /// Makespan per rank, `[dp_size]` nanoseconds.
    pub ranks_ns: Vec<u64>,
    /// Slowest rank's makespan, nanoseconds.
    pub makespan_ns: u64,
    /// Bytes above the memory limits, summed over limits and ranks; 0 if all limits are kept or there are
    /// none.
    ///
    /// A search lowers it before anything else, but as a heuristic: an assignment that keeps all limits may
    /// exist even if none was found. Other strategies ignore the limits.
    pub memory_excess: u64,
    /// Lower bound on the makespan for any assignment.
    pub bound: LowerBound,
    /// Work units spent by the search; see [`Budget`].
    pub work_spent: u64,
    /// Whether every machine finds this result: false only if a deadline cut the search short.
    pub is_reproducible: bool,
}

impl PipelineAssignment {
    /// Returns makespan / lower bound - 1, a fraction: the optimum is at most this much better.
    #[must_use]
    pub fn gap(&self) -> f64 {
        partition::gap(self.makespan_ns, self.bound.ns)
    }
}

/// Partitions an instance into ordered microbatches on every DP rank.
///
/// [`Strategy::ROUND_ROBIN`] is *data-blind*: item `i` goes to rank `i mod D`, microbatch `(i / D) mod K`,
/// and nothing is reordered, as with all blind strategies. Pure and deterministic like
/// [`balance`](crate::balance); caps hold for every microbatch, and a search keeps the
/// [`PipelineConfig::memory`] limits if it finds a way. A sixteenth of a search's budget goes into the bound,
/// and the initial assignment is counted as well.
///
/// # Errors
/// [`Error::Config`] if the configuration does not fit the instance; otherwise the
/// errors of [`balance`](crate::balance).
///
/// # Examples
/// ```
/// use dflop_balancer::{Budget, Caps, Instance, PipelineConfig, Strategy, balance_pipeline};
///
/// let instance = Instance::new(4, 2, vec![9, 1, 9, 1, 1, 9, 1, 9])?;
/// let config = PipelineConfig::new(2, vec![1, 1]);
/// let blind = balance_pipeline(
///     &instance, &config, Strategy::ROUND_ROBIN, &Caps::default(), &mut Budget::work(0),
/// )?;
/// assert_eq!(blind.ranks, [[[0], [2]], [[1], [3]]]);
/// # Ok::<(), dflop_balancer::Error>(())
/// ```
pub fn balance_pipeline(
    instance: &Instance,
    config: &PipelineConfig,
    strategy: Strategy,
    caps: &Caps,
    budget: &mut Budget,
) -> Result<PipelineAssignment> {
    config.check(instance)?;
    let problem = Problem::new(instance, caps)?;
    let work_before = budget.work_spent();
    let partition = start(&problem, config, strategy, budget)?;
    let slots = if strategy.is_blind() {
        assign_round_robin(partition.groups, config.dp_size)
    } else {
        assign_balanced(&problem, partition, config.dp_size)
    };
    let mut state = ScheduleState::new(&problem, Partition::from_groups(&problem, slots), config);
    let passes_max = bound_passes(strategy, budget);
    let relaxation = Relaxation::new(instance, config, passes_max);
    let bound = pipeline_lower_bound(instance, config, &relaxation)?;
    if strategy.searches_pipelines() {
        // A small budget is charged only its share, although the bound visits a minimum number of passes.
        budget.spend(passes_max.min(budget.steps_left() / BOUND_SHARE));
        improve(&problem, instance, caps, config, &mut state, (&relaxation, bound.ns), budget);
    }
    let memory_excess = state.memory_excess();
    let (groups, ranks_ns) = state.into_parts();
    Ok(PipelineAssignment {
        ranks: groups.chunks(instance.groups() / config.dp_size).map(<[_]>::to_vec).collect(),
        makespan_ns: ranks_ns.iter().copied().max().unwrap_or(0),
        ranks_ns,
        memory_excess,
        bound,
        work_spent: budget.work_spent() - work_before,
        is_reproducible: budget.is_reproducible(),
    })
}

/// Searches for a planner, which judges many results and needs no individual bounds: like
/// [`balance_pipeline`] without caps, starting from a short relaxation. Returns items by rank and microbatch.
///
/// # Errors
/// The errors of [`balance_pipeline`].
pub fn search_pipeline(
    instance: &Instance,
    config: &PipelineConfig,
    budget: &mut Budget,
) -> Result<Vec<Vec<Vec<u32>>>> {
    config.check(instance)?;
    let caps = Caps::default();
    let problem = Problem::new(instance, &caps)?;
    let partition = start(&problem, config, Strategy::SEARCH, budget)?;
    let slots = Partition::from_groups(&problem, assign_balanced(&problem, partition, config.dp_size));
    let mut state = ScheduleState::new(&problem, slots, config);
    let relaxation = Relaxation::new(instance, config, START_PASSES);
    let goal_ns = relaxation.bound_ns;
    improve(&problem, instance, &caps, config, &mut state, (&relaxation, goal_ns), budget);
    let (groups, _) = state.into_parts();
    Ok(groups.chunks(instance.groups() / config.dp_size).map(<[_]>::to_vec).collect())
}

/// Searches from the better of two starts, until the makespan reaches the goal, nanoseconds.
fn improve(
    problem: &Problem<'_>,
    instance: &Instance,
    caps: &Caps,
    config: &PipelineConfig,
    state: &mut ScheduleState<'_>,
    (relaxation, goal_ns): (&Relaxation, u64),
    budget: &mut Budget,
) {
    relax(problem, config, state, relaxation, budget);
    if state.memory_excess() > 0 {
        memory_start::improve(problem, instance, caps, config, state, budget);
    }
    let moves = match config.objective {
        PipelineObjective::Makespan => MoveSet::Contents,
        PipelineObjective::MinMax => MoveSet::Order,
    };
    search::improve(state, moves, goal_ns, budget);
}

/// Returns the number of passes that the bound may visit: a share of a search, the minimum without a search.
fn bound_passes(strategy: Strategy, budget: &Budget) -> u64 {
    if !strategy.searches_pipelines() {
        return BOUND_PASSES.start;
    }
    (budget.steps_left() / BOUND_SHARE).clamp(BOUND_PASSES.start, BOUND_PASSES.end)
}

/// Partitions the items before they are assigned to ranks.
fn start(
    problem: &Problem<'_>,
    config: &PipelineConfig,
    strategy: Strategy,
    budget: &mut Budget,
) -> Result<Partition> {
    if !strategy.searches_pipelines() {
        return partition::assign(problem, strategy, budget);
    }
    match config.objective {
        // The search moves items itself, so a quick partition is enough to start from.
        PipelineObjective::Makespan => partition::assign(problem, Strategy::MULTI_LPT, budget),
        PipelineObjective::MinMax => {
            let steps = (budget.steps_left() / 2).min(MIN_MAX_STEPS * problem.items as u64);
            budget.within(steps, |budget| partition::assign(problem, strategy, budget))
        }
    }
}

/// Uses slots that follow the relaxation, if items may move and these slots are better.
fn relax(
    problem: &Problem<'_>,
    config: &PipelineConfig,
    state: &mut ScheduleState<'_>,
    relaxation: &Relaxation,
    budget: &mut Budget,
) {
    if config.objective != PipelineObjective::Makespan {
        return;
    }
    let Some(slots) = relaxation::assign(problem, relaxation, budget) else { return };
    let before = state.value();
    let present = state.replace(slots);
    if state.memory_excess() > 0 {
        search::repair_memory(state, budget.steps_left() / REPAIR_SHARE, budget);
        // A search ends better from here than from the first start, whose makespan may be shorter.
        if state.memory_excess() == 0 {
            return;
        }
    }
    if state.value() >= before {
        state.replace(present);
    }
}

/// Assigns group `g` to rank `g mod ranks`; returns the groups rank by rank.
fn assign_round_robin(mut groups: Vec<Vec<u32>>, ranks: usize) -> Vec<Vec<u32>> {
    let count = groups.len();
    let order = (0..ranks).flat_map(|rank| (rank..count).step_by(ranks));
    order.map(|group| std::mem::take(&mut groups[group])).collect()
}

/// Evens the ranks and puts each rank in peak order; returns the groups rank by rank.
fn assign_balanced(problem: &Problem<'_>, mut partition: Partition, ranks: usize) -> Vec<Vec<u32>> {
    let times = |group: usize| {
        let items_ns = &partition.load(problem, group)[..problem.modules];
        items_ns.iter().enumerate().map(|(module, ns)| problem.microbatch_ns(module, *ns))
    };
    let loads: Vec<u64> = (0..problem.groups).flat_map(times).collect();
    let sizes: Vec<u64> = loads.chunks_exact(problem.modules).map(|load| load.iter().sum()).collect();
    let mut slots = Vec::with_capacity(problem.groups);
    for rank in order::assign_ranks(&loads, problem.modules, ranks) {
        let rank_sizes: Vec<u64> = rank.iter().map(|&group| sizes[group as usize]).collect();
        for slot in order::peak_order(&rank_sizes) {
            slots.push(std::mem::take(&mut partition.groups[rank[slot as usize] as usize]));
        }
    }
    slots
}

impl PipelineConfig {
    /// Returns the makespan of an assignment of items to ranks and microbatches, nanoseconds: that of the
    /// whole job, without messages.
    ///
    /// - `ranks`: as in [`PipelineConfig::ranks_times`]
    ///
    /// # Errors
    /// The errors of [`PipelineConfig::ranks_times`]; [`Error::Config`] if an item is missing or twice.
    pub fn makespan_ns(&self, instance: &Instance, ranks: &[Vec<Vec<u32>>]) -> Result<u64> {
        self.check_ranks(instance, ranks)?;
        let mut items: Vec<u32> = ranks.iter().flatten().flatten().copied().collect();
        items.sort_unstable();
        if !items.into_iter().eq(0..instance.items() as u32) {
            let reason = format!("expected each of {} items once", instance.items());
            return Err(Error::Config { setting: "ranks", reason });
        }
        let caps = Caps::default();
        let problem = Problem::new(instance, &caps)?;
        let slots = Partition::from_groups(&problem, ranks.concat());
        Ok(ScheduleState::new(&problem, slots, self).makespan_ns())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::schedule::{ScheduleKind, schedule};
    use crate::simulate::simulate;
    use dflop_costmodel::MicrobatchConstants;

    fn pipeline(
        instance: &Instance,
        dp_size: usize,
        stages: &[usize],
        strategy: Strategy,
    ) -> PipelineAssignment {
        let config = PipelineConfig::new(dp_size, stages.to_vec());
        balance_pipeline(instance, &config, strategy, &Caps::default(), &mut Budget::work(5_000)).unwrap()
    }

    #[test]
    fn data_blind_deals_over_ranks_first() {
        let instance = Instance::new(6, 1, vec![1; 14]).unwrap();
        let ranks = pipeline(&instance, 2, &[2], Strategy::ROUND_ROBIN).ranks;
        assert_eq!(ranks[0], [vec![0, 6, 12], vec![2, 8], vec![4, 10]]);
        assert_eq!(ranks[1], [vec![1, 7, 13], vec![3, 9], vec![5, 11]]);
    }

    #[test]
    fn makespan_is_that_of_the_simulated_timeline() {
        let times_ns: Vec<u64> = (0..60).map(|i| i * 7919 % 101).collect();
        let plain = Instance::new(8, 2, times_ns).unwrap();
        let constants = |floor_ns, base_ns| vec![MicrobatchConstants { floor_ns, base_ns }; 2];
        let config = PipelineConfig::new(2, vec![1, 2]);
        for constants in [constants(0, 0), constants(0, 300), constants(900, 10)] {
            let instance = plain.clone().constants(constants.clone()).unwrap();
            let found = pipeline(&instance, 2, &[1, 2], Strategy::SEARCH);
            for (rank, makespan_ns) in found.ranks.iter().zip(&found.ranks_ns) {
                let lists: Vec<_> =
                    (0..3).map(|s| schedule(ScheduleKind::OneForwardOneBackward, s, 3, 4)).collect();
                let times = config.stage_times(&instance, rank).unwrap();
                assert_eq!(simulate(&lists, &times).unwrap().makespan_ns, *makespan_ns);
            }
            // Without its constants a bound would be far below.
            assert!((0.0..0.25).contains(&found.gap()), "{constants:?}: {}", found.gap());
        }
    }

    #[test]
    fn a_configuration_that_does_not_fit_is_refused() {
        let instance = Instance::new(4, 2, vec![1; 8]).unwrap();
        for (dp_size, stages) in [(0, vec![1, 1]), (3, vec![1, 1]), (2, vec![1]), (2, vec![1, 0])] {
            let config = PipelineConfig::new(dp_size, stages);
            let caps = Caps::default();
            let found = balance_pipeline(&instance, &config, Strategy::LPT, &caps, &mut Budget::work(0));
            assert!(matches!(found, Err(Error::Config { .. })));
        }
    }
}
