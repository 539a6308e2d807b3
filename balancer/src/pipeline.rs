//! Who does what when: ordered microbatches for every DP rank of a pipeline.
//!
//! The model's modules form one chain of stages in their order, encoder first; every DP rank has such a
//! chain and runs `groups / dp_size` microbatches a step on it, 1F1B. The makespan is the slowest rank's.
//! An item's time in a module is the time of **one stage** of that module, forward and backward together;
//! the forward pass takes a third ([`split_time`](crate::split_time)).
//!
//! Strategies that look at costs go three steps: partition into microbatches, deal these out to ranks,
//! order them with small ends. [`Strategy::Search`] then goes on in `crate::pipeline_search`, with the
//! simulated makespan itself as the objective.

use crate::assignment;
use crate::bound::LowerBound;
use crate::budget::Budget;
use crate::constraint::Caps;
use crate::error::{Error, Result};
use crate::instance::Instance;
use crate::makespan::CompiledSchedule;
use crate::order;
use crate::partition::Partition;
use crate::pipeline_bound;
use crate::pipeline_search;
use crate::problem::Problem;
use crate::schedule::ScheduleKind;
use crate::simulate::StageTimes;
use crate::strategy::{self, Strategy};

/// Most stages of one pipeline; a simulation takes time in proportion.
const STAGES_MAX: usize = 4_096;

/// The devices that a step runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipelineConfig {
    /// DP ranks; the instance's groups are a multiple of it.
    pub dp_size: usize,
    /// Pipeline stages of every module, each at least 1; as many as the instance has modules.
    pub stages: Vec<usize>,
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
    /// Returns the times of one rank's microbatches in every stage, ready to simulate.
    ///
    /// - `microbatches`: items by microbatch, as in [`PipelineAssignment::ranks`]
    ///
    /// # Errors
    /// [`Error::Config`] if this configuration does not fit the instance, or the times overflow.
    ///
    /// # Panics
    /// If a microbatch names an item that the instance does not have.
    pub fn stage_times(&self, instance: &Instance, microbatches: &[Vec<u32>]) -> Result<StageTimes> {
        self.check(instance)?;
        let loads: Vec<Vec<u64>> = microbatches.iter().map(|items| instance.load_ns(items)).collect();
        let rows = self.rows();
        let times: Vec<u64> =
            rows.iter().flat_map(|&module| loads.iter().map(move |load| load[module])).collect();
        StageTimes::split(rows.len(), microbatches.len(), &times)
    }

    /// The module of every stage.
    fn rows(&self) -> Vec<usize> {
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

/// Partitions an instance into ordered microbatches of every DP rank.
///
/// [`Strategy::RoundRobin`] is *data-blind*: item `i` goes to rank `i mod D`, microbatch `(i / D) mod K`,
/// and nothing is reordered. [`Strategy::Random`] keeps its random order as well. Pure and deterministic
/// as [`balance`](crate::balance); caps hold for every microbatch.
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
/// let config = PipelineConfig { dp_size: 2, stages: vec![1, 1] };
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
    let start = if strategy == Strategy::Search { Strategy::MultiLpt } else { strategy };
    let partition = strategy::assign(&problem, start, budget)?;
    let dealt = match strategy {
        Strategy::RoundRobin | Strategy::Random => deal_blindly(partition.groups, config.dp_size),
        Strategy::Lpt | Strategy::MultiLpt | Strategy::Search => deal(&problem, partition, config.dp_size),
    };
    let slots = Partition::from_groups(&problem, dealt);
    let microbatches = problem.groups / config.dp_size;
    let compiled = CompiledSchedule::new(ScheduleKind::OneForwardOneBackward, &config.rows(), microbatches)?;
    let bound = pipeline_bound::pipeline_lower_bound(instance, config);
    let mut plan = pipeline_search::Plan::new(&problem, slots, compiled, microbatches);
    if strategy == Strategy::Search {
        plan.improve(bound.ns, budget);
    }
    let (groups, ranks_ns) = plan.into_parts();
    Ok(PipelineAssignment {
        ranks: groups.chunks(microbatches).map(<[_]>::to_vec).collect(),
        makespan_ns: ranks_ns.iter().copied().max().unwrap_or(0),
        ranks_ns,
        bound,
        work_spent: budget.work_spent() - work_before,
        is_reproducible: budget.is_reproducible(),
    })
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
    use crate::schedule::schedule;
    use crate::simulate::simulate;

    fn pipeline(
        instance: &Instance,
        dp_size: usize,
        stages: &[usize],
        strategy: Strategy,
    ) -> PipelineAssignment {
        let config = PipelineConfig { dp_size, stages: stages.to_vec() };
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
        let config = PipelineConfig { dp_size: 2, stages: vec![1, 2] };
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
            let config = PipelineConfig { dp_size, stages };
            let caps = Caps::default();
            let found = balance_pipeline(&instance, &config, Strategy::Lpt, &caps, &mut Budget::work(0));
            assert!(matches!(found, Err(Error::Config { .. })));
        }
    }
}
