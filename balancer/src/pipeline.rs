//! Who does what when: ordered microbatches for every DP rank of a pipeline.
//!
//! The model's modules form one chain of stages in their order, encoder first; every DP rank has such a
//! chain and runs `groups / dp_size` microbatches a step on it, 1F1B. The makespan is the slowest rank's.
//! An item's time in a module is the time of **one stage** of that module, forward and backward together;
//! the forward pass takes a third ([`split_time`](crate::split_time)).
//!
//! Strategies that look at costs go three steps: partition into microbatches, deal these out to ranks,
//! order them with small ends. [`Strategy::Search`] then goes on in `crate::pipeline_search`, with the
//! simulated makespan itself as the objective, from there or from where `crate::fluid_start` leads.

use crate::assignment;
use crate::bound::LowerBound;
use crate::budget::Budget;
use crate::constraint::Caps;
use crate::error::{Error, Result};
use crate::fluid::Fluid;
use crate::fluid_start;
use crate::instance::Instance;
use crate::order;
use crate::partition::Partition;
use crate::pipeline_bound;
use crate::pipeline_search::{self, Freedom, Plan};
use crate::problem::Problem;
use crate::simulate::StageTimes;
use crate::strategy::{self, Strategy};

/// Most stages of one pipeline; a simulation takes time in proportion.
const STAGES_MAX: usize = 4_096;
/// Passes that the lower bound walks over at least and at most.
const BOUND_PASSES: std::ops::Range<u64> = 1 << 16..1 << 20;
/// Elementary steps of a search for each that its bound takes.
const BOUND_SHARE: u64 = 16;
/// Most elementary steps of a partition search before the order is looked at, for each item.
const MIN_MAX_STEPS: u64 = 1 << 13;

/// The devices that a step runs on, and what a search on them minimizes.
///
/// A module may have another DP size than the pipelines, as an encoder has whose GPUs are split apart from
/// the LLM's. Its items are then dealt out anew: those of all ranks' microbatches of the same slot are one
/// *pool*, shared by the module's own DP ranks. A stage of it takes, for the slot of every pipeline, the
/// pool's time divided by that DP size, rounded up, or the pool's longest item if that is longer. So the
/// module is bound by the sum over the DP groups of a step, not by any group of its own.
///
/// # Examples
/// ```
/// use dflop_balancer::PipelineConfig;
///
/// // four pipelines of three LLM stages, fed by eight ranks of one encoder stage
/// let config = PipelineConfig::new(4, vec![1, 3]).module_dp_sizes(vec![8, 4]);
/// assert_eq!((config.module_dp_size(0), config.module_dp_size(1)), (8, 4));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipelineConfig {
    /// DP ranks; the instance's groups are a multiple of it.
    pub dp_size: usize,
    /// Pipeline stages of every module, each at least 1; as many as the instance has modules.
    pub stages: Vec<usize>,
    /// DP ranks of every module, each at least 1; nothing where all are `dp_size`.
    pub module_dp_sizes: Vec<usize>,
    /// What [`Strategy::Search`] minimizes.
    pub objective: PipelineObjective,
}

/// What a search for pipelines minimizes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PipelineObjective {
    /// The slowest rank's simulated makespan, by moving items as well as microbatches.
    #[default]
    Makespan,
    /// The largest microbatch first, for half of the effort; then the makespan, by order and rank of whole
    /// microbatches alone. What min-max balancers do at best; here to compare with.
    MinMax,
}

/// Ordered microbatches of every DP rank, and how good that is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipelineAssignment {
    /// Items, ascending, by rank and by microbatch in the order to run.
    pub ranks: Vec<Vec<Vec<u32>>>,
    /// Makespan of every rank, `[dp_size]` nanoseconds.
    pub ranks_ns: Vec<u64>,
    /// Makespan of the slowest rank, nanoseconds.
    pub makespan_ns: u64,
    /// What no assignment can beat.
    pub bound: LowerBound,
    /// Work units that the search took; see [`Budget`].
    pub work_spent: u64,
    /// Whether every machine finds this answer: false only if a deadline cut the search short.
    pub is_reproducible: bool,
}

impl PipelineAssignment {
    /// Returns makespan / lower bound - 1, a fraction: the optimum is at most this much better.
    #[must_use]
    pub fn gap(&self) -> f64 {
        assignment::gap(self.makespan_ns, self.bound.ns)
    }
}

impl PipelineConfig {
    /// Describes pipelines whose modules all have their DP size, for the least makespan.
    #[must_use]
    pub fn new(dp_size: usize, stages: Vec<usize>) -> Self {
        let objective = PipelineObjective::default();
        Self { dp_size, stages, module_dp_sizes: Vec::new(), objective }
    }

    /// Sets the DP size of every module. Default: that of the pipelines.
    #[must_use]
    pub fn module_dp_sizes(mut self, dp_sizes: Vec<usize>) -> Self {
        self.module_dp_sizes = dp_sizes;
        self
    }

    /// Sets what a search minimizes. Default: [`PipelineObjective::Makespan`].
    #[must_use]
    pub fn objective(mut self, objective: PipelineObjective) -> Self {
        self.objective = objective;
        self
    }

    /// Returns the DP ranks that share a module's work.
    #[must_use]
    pub fn module_dp_size(&self, module: usize) -> usize {
        self.module_dp_sizes.get(module).copied().unwrap_or(self.dp_size)
    }

    /// Returns the times of one rank's microbatches in every stage, ready to simulate.
    ///
    /// - `microbatches`: items by microbatch, as in [`PipelineAssignment::ranks`]
    ///
    /// # Errors
    /// [`Error::Config`] if this configuration does not fit the instance, the times overflow, or a module
    /// has a DP size of its own: then they depend on the other ranks, see [`PipelineConfig::ranks_times`].
    ///
    /// # Panics
    /// If a microbatch names an item that the instance does not have.
    pub fn stage_times(&self, instance: &Instance, microbatches: &[Vec<u32>]) -> Result<StageTimes> {
        self.check(instance)?;
        if (0..instance.modules()).any(|module| self.module_dp_size(module) != self.dp_size) {
            let reason = "the times of one rank depend on the others".to_owned();
            return Err(Error::Config { setting: "module_dp_sizes", reason });
        }
        self.split_loads(&slot_loads(instance, microbatches))
    }

    /// Returns the times of all ranks' microbatches in every stage, ready to simulate.
    ///
    /// - `ranks`: items by rank and microbatch, as in [`PipelineAssignment::ranks`]; as many ranks as
    ///   `dp_size`, with equally many microbatches
    ///
    /// # Errors
    /// [`Error::Config`] if this configuration does not fit the instance, or the times overflow;
    /// [`Error::Length`] if there are other ranks or microbatches than these.
    ///
    /// # Panics
    /// If a microbatch names an item that the instance does not have.
    pub fn ranks_times(&self, instance: &Instance, ranks: &[Vec<Vec<u32>>]) -> Result<Vec<StageTimes>> {
        self.check(instance)?;
        let microbatches = instance.groups() / self.dp_size;
        for (field, found, expected) in std::iter::once(("ranks", ranks.len(), self.dp_size))
            .chain(ranks.iter().map(|rank| ("microbatches", rank.len(), microbatches)))
        {
            if found != expected {
                return Err(Error::Length { field, found, expected });
            }
        }
        let mut loads: Vec<_> = ranks.iter().map(|rank| slot_loads(instance, rank)).collect();
        for module in (0..instance.modules()).filter(|&module| self.module_dp_size(module) != self.dp_size) {
            for slot in 0..microbatches {
                let pool_ns: u64 = loads.iter().map(|rank| rank[slot][module]).sum();
                let items = ranks.iter().flat_map(|rank| &rank[slot]);
                let longest_ns = items.map(|&item| instance.times_ns(item)[module]).max().unwrap_or(0);
                let time_ns = pool_ns.div_ceil(self.module_dp_size(module) as u64).max(longest_ns);
                for rank in &mut loads {
                    rank[slot][module] = time_ns;
                }
            }
        }
        loads.iter().map(|rank| self.split_loads(rank)).collect()
    }

    fn split_loads(&self, loads: &[Vec<u64>]) -> Result<StageTimes> {
        let rows = self.rows();
        let times: Vec<u64> =
            rows.iter().flat_map(|&module| loads.iter().map(move |load| load[module])).collect();
        StageTimes::split(rows.len(), loads.len(), &times)
    }

    /// The module of every stage.
    pub(crate) fn rows(&self) -> Vec<usize> {
        let stages = self.stages.iter().enumerate();
        stages.flat_map(|(module, count)| std::iter::repeat_n(module, *count)).collect()
    }

    fn check(&self, instance: &Instance) -> Result<()> {
        let invalid = |setting, reason| Err(Error::Config { setting, reason });
        let (groups, modules) = (instance.groups(), instance.modules());
        if self.dp_size == 0 || !groups.is_multiple_of(self.dp_size) {
            return invalid("dp_size", format!("{groups} groups do not divide by {}", self.dp_size));
        }
        let stages = self.stages.iter().fold(0, |sum: usize, count| sum.saturating_add(*count));
        if stages > STAGES_MAX {
            return invalid("stages", format!("{stages} in one pipeline, more than {STAGES_MAX}"));
        }
        if self.stages.len() != modules || self.stages.contains(&0) {
            let reason = format!("{:?} is not one number above 0 for each of {modules} modules", self.stages);
            return invalid("stages", reason);
        }
        let sizes = &self.module_dp_sizes;
        if !sizes.is_empty() && (sizes.len() != modules || sizes.contains(&0)) {
            let reason = format!("{sizes:?} is not one number above 0 for each of {modules} modules");
            return invalid("module_dp_sizes", reason);
        }
        let total = |(module, count): (usize, &usize)| {
            instance.module_ns(module).map(u128::from).sum::<u128>() * *count as u128
        };
        let total: u128 = self.stages.iter().enumerate().map(total).fold(0, u128::saturating_add);
        if i64::try_from(total).is_err() {
            return invalid("stages", "the time of all stages together overflows".to_owned());
        }
        Ok(())
    }
}

/// Sums by microbatch and module.
fn slot_loads(instance: &Instance, microbatches: &[Vec<u32>]) -> Vec<Vec<u64>> {
    microbatches.iter().map(|items| instance.load_ns(items)).collect()
}

/// Partitions an instance into ordered microbatches of every DP rank.
///
/// [`Strategy::RoundRobin`] is *data-blind*: item `i` goes to rank `i mod D`, microbatch `(i / D) mod K`,
/// and nothing is reordered. [`Strategy::Random`] keeps its random order as well. Pure and deterministic
/// as [`balance`](crate::balance); caps hold for every microbatch. Of a search's budget, a sixteenth goes
/// into the bound, and what the search starts from counts as well.
///
/// # Errors
/// [`Error::Config`] if the configuration does not fit the instance; else those of
/// [`balance`](crate::balance).
///
/// # Examples
/// ```
/// use dflop_balancer::{Budget, Caps, Instance, PipelineConfig, Strategy, balance_pipeline};
///
/// let instance = Instance::new(4, 2, vec![9, 1, 9, 1, 1, 9, 1, 9])?;
/// let config = PipelineConfig::new(2, vec![1, 1]);
/// let blind = balance_pipeline(
///     &instance, &config, Strategy::RoundRobin, &Caps::default(), &mut Budget::work(0),
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
    let dealt = match strategy {
        Strategy::RoundRobin | Strategy::Random => deal_blindly(partition.groups, config.dp_size),
        _ => deal(&problem, partition, config.dp_size),
    };
    let mut plan = Plan::new(&problem, Partition::from_groups(&problem, dealt), config)?;
    let passes_max = bound_passes(strategy, budget);
    let fluid = Fluid::new(instance, config, passes_max)?;
    let bound = pipeline_bound::pipeline_lower_bound(instance, config, &fluid)?;
    if strategy == Strategy::Search {
        budget.spend(passes_max.min(budget.steps_left() / BOUND_SHARE));
        plan = search(&problem, config, plan, &fluid, bound.ns, budget)?;
    }
    let (groups, ranks_ns) = plan.into_parts();
    Ok(PipelineAssignment {
        ranks: groups.chunks(instance.groups() / config.dp_size).map(<[_]>::to_vec).collect(),
        makespan_ns: ranks_ns.iter().copied().max().unwrap_or(0),
        ranks_ns,
        bound,
        work_spent: budget.work_spent() - work_before,
        is_reproducible: budget.is_reproducible(),
    })
}

/// How many passes the bound may walk over: a share of a search, and as many as in a small one without.
fn bound_passes(strategy: Strategy, budget: &Budget) -> u64 {
    if strategy != Strategy::Search {
        return BOUND_PASSES.start;
    }
    (budget.steps_left() / BOUND_SHARE).clamp(BOUND_PASSES.start, BOUND_PASSES.end)
}

/// The partition that is dealt out.
fn start(
    problem: &Problem<'_>,
    config: &PipelineConfig,
    strategy: Strategy,
    budget: &mut Budget,
) -> Result<Partition> {
    if strategy != Strategy::Search {
        return strategy::assign(problem, strategy, budget);
    }
    match config.objective {
        PipelineObjective::Makespan => strategy::assign(problem, Strategy::MultiLpt, budget),
        PipelineObjective::MinMax => {
            let steps = (budget.steps_left() / 2).min(MIN_MAX_STEPS * problem.items as u64);
            budget.within(steps, |budget| strategy::assign(problem, strategy, budget))
        }
    }
}

/// Searches from a plan, or from one that follows the fluid if that is better.
fn search<'a>(
    problem: &'a Problem<'a>,
    config: &PipelineConfig,
    mut plan: Plan<'a>,
    fluid: &Fluid,
    goal_ns: u64,
    budget: &mut Budget,
) -> Result<Plan<'a>> {
    let freedom = match config.objective {
        PipelineObjective::Makespan => Freedom::Contents,
        PipelineObjective::MinMax => Freedom::Order,
    };
    if freedom == Freedom::Contents
        && let Some(slots) = fluid_start::deal(problem, fluid, budget)
    {
        let other = Plan::new(problem, slots, config)?;
        if other.makespan_ns() < plan.makespan_ns() {
            plan = other;
        }
    }
    pipeline_search::improve(&mut plan, freedom, goal_ns, budget);
    Ok(plan)
}

/// Group `g` to rank `g mod ranks`; returns the groups rank by rank.
fn deal_blindly(mut groups: Vec<Vec<u32>>, ranks: usize) -> Vec<Vec<u32>> {
    let count = groups.len();
    let order = (0..ranks).flat_map(|rank| (rank..count).step_by(ranks));
    order.map(|group| std::mem::take(&mut groups[group])).collect()
}

/// Even ranks, each with small ends; returns the groups rank by rank.
fn deal(problem: &Problem<'_>, mut partition: Partition, ranks: usize) -> Vec<Vec<u32>> {
    let times = |group: usize| &partition.load(problem, group)[..problem.modules];
    let loads: Vec<u64> = (0..problem.groups).flat_map(times).copied().collect();
    let sizes: Vec<u64> = loads.chunks_exact(problem.modules).map(|load| load.iter().sum()).collect();
    let mut dealt = Vec::with_capacity(problem.groups);
    for rank in order::assign_ranks(&loads, problem.modules, ranks) {
        let rank_sizes: Vec<u64> = rank.iter().map(|&group| sizes[group as usize]).collect();
        for slot in order::small_ends(&rank_sizes) {
            dealt.push(std::mem::take(&mut partition.groups[rank[slot as usize] as usize]));
        }
    }
    dealt
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{ScheduleKind, schedule};
    use crate::simulate::simulate;

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
        let ranks = pipeline(&instance, 2, &[2], Strategy::RoundRobin).ranks;
        assert_eq!(ranks[0], [vec![0, 6, 12], vec![2, 8], vec![4, 10]]);
        assert_eq!(ranks[1], [vec![1, 7, 13], vec![3, 9], vec![5, 11]]);
    }

    #[test]
    fn makespan_is_that_of_the_simulated_timeline() {
        let times_ns: Vec<u64> = (0..60).map(|i| i * 7919 % 101).collect();
        let instance = Instance::new(8, 2, times_ns).unwrap();
        let config = PipelineConfig::new(2, vec![1, 2]);
        let found = pipeline(&instance, 2, &[1, 2], Strategy::Search);
        for (rank, makespan_ns) in found.ranks.iter().zip(&found.ranks_ns) {
            let lists: Vec<_> =
                (0..3).map(|s| schedule(ScheduleKind::OneForwardOneBackward, s, 3, 4)).collect();
            let times = config.stage_times(&instance, rank).unwrap();
            assert_eq!(simulate(&lists, &times).unwrap().makespan_ns, *makespan_ns);
        }
    }

    #[test]
    fn a_configuration_that_does_not_fit_is_refused() {
        let instance = Instance::new(4, 2, vec![1; 8]).unwrap();
        for (dp_size, stages) in [(0, vec![1, 1]), (3, vec![1, 1]), (2, vec![1]), (2, vec![1, 0])] {
            let config = PipelineConfig::new(dp_size, stages);
            let caps = Caps::default();
            let found = balance_pipeline(&instance, &config, Strategy::Lpt, &caps, &mut Budget::work(0));
            assert!(matches!(found, Err(Error::Config { .. })));
        }
    }
}
