//! Describes a step's pipelines: stages, DP sizes and search objective.

use super::memory_limits::PipelineMemoryLimits;
use crate::error::{Error, Result};
use crate::instance::Instance;
use crate::schedule::{ENCODERS_MAX, EncoderChain, EncoderChains, ScheduleKind, StepShape};
use crate::simulate::StageTimes;

/// Maximum number of stages in a pipeline; simulation time is proportional to it.
const STAGES_MAX: usize = 4_096;

/// Pipelines in a step, and the search objective.
///
/// A module may have a different DP size than the pipelines, for example an encoder on separate GPUs. The
/// module's items are then shared: the items in all ranks' microbatches in the same slot form a *pool*,
/// shared by the module's DP ranks. In every pipeline's slot, a stage in the module takes the pool's time
/// divided by that DP size, rounded up, or the pool's longest item if that is longer. So the module is bound
/// by the sum over a step's DP groups, not by any single group. All ranks wait for the pool, and the pool's
/// backward pass waits for all ranks: the makespan covers the whole job, as the executor runs it.
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
    /// Number of DP ranks; the instance's number of groups is a multiple.
    pub dp_size: usize,
    /// Pipeline stages in every module, each at least 1; as many entries as the instance has modules.
    pub stages: Vec<usize>,
    /// DP ranks in every module, each at least 1; empty if all are `dp_size`.
    pub module_dp_sizes: Vec<usize>,
    /// Search objective for [`Strategy::SEARCH`](crate::Strategy::SEARCH).
    pub objective: PipelineObjective,
    /// Whether all modules before the last feed the last in parallel, as several encoders do; otherwise each
    /// module feeds the next.
    pub has_parallel_encoders: bool,
    /// Microbatch schedule: `gpipe`, `1f1b`, `1f1b-ahead`, whose encoders are all modules before the last, or
    /// `interleaved`, which treats the stages of all modules as a single chain.
    pub schedule: ScheduleKind,
    /// Memory limits for stage GPUs. Default: none.
    pub memory: Option<PipelineMemoryLimits>,
}

/// Objective for a pipeline search.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PipelineObjective {
    /// Slowest rank's simulated makespan, by moving items as well as microbatches.
    #[default]
    Makespan,
    /// Largest microbatch first, for half the effort; then the makespan, only by order and rank of whole
    /// microbatches. The best that min-max balancers do, for comparison. Items move nevertheless while a
    /// memory limit is exceeded.
    MinMax,
}

impl PipelineConfig {
    /// Describes pipelines whose modules all have the pipelines' DP size, run by 1F1B, with the makespan as
    /// objective.
    #[must_use]
    pub fn new(dp_size: usize, stages: Vec<usize>) -> Self {
        let objective = PipelineObjective::default();
        let schedule = ScheduleKind::OneForwardOneBackward;
        Self {
            dp_size,
            stages,
            module_dp_sizes: Vec::new(),
            has_parallel_encoders: false,
            objective,
            schedule,
            memory: None,
        }
    }

    /// Lets all modules before the last feed the last in parallel, as several encoders do: the last module
    /// waits for all. Default: each module feeds the next.
    #[must_use]
    pub fn parallel_encoders(mut self) -> Self {
        self.has_parallel_encoders = true;
        self
    }

    /// Sets every module's DP size. Default: the pipelines' DP size.
    #[must_use]
    pub fn module_dp_sizes(mut self, dp_sizes: Vec<usize>) -> Self {
        self.module_dp_sizes = dp_sizes;
        self
    }

    /// Sets the search objective. Default: [`PipelineObjective::Makespan`].
    #[must_use]
    pub fn objective(mut self, objective: PipelineObjective) -> Self {
        self.objective = objective;
        self
    }

    /// Sets the microbatch schedule. Default: 1F1B.
    #[must_use]
    pub fn schedule(mut self, schedule: ScheduleKind) -> Self {
        self.schedule = schedule;
        self
    }

    /// Sets memory limits for stage GPUs. Default: none.
    #[must_use]
    pub fn memory(mut self, limits: PipelineMemoryLimits) -> Self {
        self.memory = Some(limits);
        self
    }

    /// Returns the number of DP ranks that share a module's work.
    #[must_use]
    pub fn module_dp_size(&self, module: usize) -> usize {
        self.module_dp_sizes.get(module).copied().unwrap_or(self.dp_size)
    }

    /// Returns whether a module has a DP size of its own.
    pub(in crate::pipeline) fn has_own_dp_size(&self, module: usize) -> bool {
        self.module_dp_size(module) != self.dp_size
    }

    /// Returns the most microbatches whose activations a stage holds at once under the schedule, at least 1.
    ///
    /// - `stage`: below the number of stages
    /// - `microbatches`: number on a DP rank
    ///
    /// # Panics
    /// If there is no such stage, or the schedule does not fit the stages ([`Self::check_schedule`]).
    #[must_use]
    pub fn in_flight(&self, stage: usize, microbatches: usize) -> usize {
        let shape = self.step_shape(microbatches);
        assert!(shape.check().is_ok(), "{} does not fit {} stages", self.schedule, shape.stages);
        assert!(stage < shape.stages, "stage {stage} of {}", shape.stages);
        shape.in_flight(stage)
    }

    /// Returns the stages in a step with this many microbatches on each DP rank.
    pub(crate) fn step_shape(&self, microbatches: usize) -> StepShape {
        let before = &self.stages[..self.stages.len().saturating_sub(1)];
        let chain = |stages: usize| EncoderChain { stages: stages as u16, has_backward: true };
        let encoders = if matches!(self.schedule, ScheduleKind::Interleaved { .. }) {
            EncoderChains::default()
        } else if self.has_parallel_encoders {
            EncoderChains::new(before.iter().map(|stages| chain(*stages)))
        } else {
            EncoderChains::one(before.iter().sum())
        };
        StepShape { kind: self.schedule, encoders, stages: self.stages.iter().sum(), slots: microbatches }
    }

    /// Returns a rank's microbatch times in every stage, ready to simulate.
    ///
    /// - `microbatches`: items by microbatch, as in
    ///   [`PipelineAssignment::ranks`](crate::PipelineAssignment::ranks)
    ///
    /// # Errors
    /// [`Error::Config`] if this configuration does not fit the instance, the times overflow, or a module has
    /// a different DP size: then they depend on the other ranks, see [`PipelineConfig::ranks_times`].
    ///
    /// # Panics
    /// If a microbatch names an item that the instance does not have.
    pub fn stage_times(&self, instance: &Instance, microbatches: &[Vec<u32>]) -> Result<StageTimes> {
        self.check(instance)?;
        if (0..instance.modules()).any(|module| self.module_dp_size(module) != self.dp_size) {
            let reason = "the times of one rank depend on the others; use `ranks_times`".to_owned();
            return Err(Error::Config { setting: "module_dp_sizes", reason });
        }
        self.split_loads(instance, &slot_loads(instance, microbatches))
    }

    /// Returns all ranks' microbatch times in every stage, ready to simulate.
    ///
    /// - `ranks`: items by rank and microbatch, as in
    ///   [`PipelineAssignment::ranks`](crate::PipelineAssignment::ranks); as many ranks as `dp_size`, with
    ///   equally many microbatches
    ///
    /// # Errors
    /// [`Error::Config`] if this configuration does not fit the instance, or the times overflow;
    /// [`Error::Length`] if the number of ranks or microbatches differs.
    ///
    /// # Panics
    /// If a microbatch names an item that the instance does not have.
    pub fn ranks_times(&self, instance: &Instance, ranks: &[Vec<Vec<u32>>]) -> Result<Vec<StageTimes>> {
        let microbatches = self.check_ranks(instance, ranks)?;
        let mut loads: Vec<_> = ranks.iter().map(|rank| slot_loads(instance, rank)).collect();
        for module in (0..instance.modules()).filter(|&module| self.module_dp_size(module) != self.dp_size) {
            for slot in 0..microbatches {
                let pool_ns: u64 = loads.iter().map(|rank| rank[slot][module]).sum();
                let items = ranks.iter().flat_map(|rank| &rank[slot]);
                let longest_ns = items.map(|&item| instance.times_ns(item)[module]).max().unwrap_or(0);
                // Items are indivisible, so no pool ends before its longest item.
                let time_ns = pool_ns.div_ceil(self.module_dp_size(module) as u64).max(longest_ns);
                for rank in &mut loads {
                    rank[slot][module] = time_ns;
                }
            }
        }
        loads.iter().map(|rank| self.split_loads(instance, rank)).collect()
    }

    /// Checks the numbers of ranks and microbatches; returns the microbatches of each rank.
    pub(super) fn check_ranks(&self, instance: &Instance, ranks: &[Vec<Vec<u32>>]) -> Result<usize> {
        self.check(instance)?;
        let microbatches = instance.groups() / self.dp_size;
        for (field, found, expected) in std::iter::once(("ranks", ranks.len(), self.dp_size))
            .chain(ranks.iter().map(|rank| ("microbatches", rank.len(), microbatches)))
        {
            if found != expected {
                return Err(Error::Length { field, found, expected });
            }
        }
        Ok(microbatches)
    }

    /// Adds microbatch constants to item times.
    fn split_loads(&self, instance: &Instance, loads: &[Vec<u64>]) -> Result<StageTimes> {
        let rows = self.rows();
        let microbatch_ns = |module: usize, load: &Vec<u64>| instance.microbatch_ns(module, load[module]);
        let times: Vec<u64> = rows
            .iter()
            .flat_map(|&module| loads.iter().map(move |load| microbatch_ns(module, load)))
            .collect();
        StageTimes::split(rows.len(), loads.len(), &times)
    }

    /// Returns every stage's module.
    pub(crate) fn rows(&self) -> Vec<usize> {
        let stages = self.stages.iter().enumerate();
        stages.flat_map(|(module, count)| std::iter::repeat_n(module, *count)).collect()
    }

    /// Checks that microbatches can be ordered for the schedule.
    ///
    /// # Errors
    /// [`Error::Config`] for `zb-h1`, and for `interleaved` if the number of stages is no multiple of the
    /// chunks or a module has a separate DP size.
    pub fn check_schedule(&self) -> Result<()> {
        self.step_shape(1).check()?;
        let has_own = |dp_size: &usize| *dp_size != self.dp_size;
        if matches!(self.schedule, ScheduleKind::Interleaved { .. })
            && self.module_dp_sizes.iter().any(has_own)
        {
            let reason = format!("{} needs modules with the DP size of the pipelines", self.schedule);
            return Err(Error::Config { setting: "schedule", reason });
        }
        Ok(())
    }

    pub(super) fn check(&self, instance: &Instance) -> Result<()> {
        let invalid = |setting, reason| Err(Error::Config { setting, reason });
        let (groups, modules) = (instance.groups(), instance.modules());
        if self.dp_size == 0 || !groups.is_multiple_of(self.dp_size) {
            return invalid(
                "dp_size",
                format!("must divide the number of groups, {groups}, got {}", self.dp_size),
            );
        }
        let stages = self.stages.iter().fold(0, |sum: usize, count| sum.saturating_add(*count));
        if stages > STAGES_MAX {
            return invalid("stages", format!("a pipeline has at most {STAGES_MAX}, got {stages}"));
        }
        if self.stages.len() != modules || self.stages.contains(&0) {
            let reason =
                format!("expected {modules} numbers of at least 1, one per module, got {:?}", self.stages);
            return invalid("stages", reason);
        }
        if self.has_parallel_encoders && modules > ENCODERS_MAX + 1 {
            let reason =
                format!("expected at most {ENCODERS_MAX} encoders side by side, got {}", modules - 1);
            return invalid("stages", reason);
        }
        self.check_schedule()?;
        let sizes = &self.module_dp_sizes;
        if !sizes.is_empty() && (sizes.len() != modules || sizes.contains(&0)) {
            let reason = format!("expected {modules} numbers of at least 1, one per module, got {sizes:?}");
            return invalid("module_dp_sizes", reason);
        }
        let total = |(module, count): (usize, &usize)| {
            let constants_ns = u128::from(instance.microbatch_ns(module, 1)) * instance.groups() as u128;
            (instance.module_ns(module).map(u128::from).sum::<u128>() + constants_ns) * *count as u128
        };
        let total: u128 = self.stages.iter().enumerate().map(total).fold(0, u128::saturating_add);
        // No makespan exceeds this sum, so makespan differences fit `i64` as well.
        if i64::try_from(total).is_err() {
            return invalid("stages", "the total time of all stages must be below 2^63 ns".to_owned());
        }
        self.memory
            .as_ref()
            .map_or(Ok(()), |limits| limits.check(instance, |module| self.has_own_dp_size(module)))
    }
}

/// Sums times by microbatch and module.
fn slot_loads(instance: &Instance, microbatches: &[Vec<u32>]) -> Vec<Vec<u64>> {
    microbatches.iter().map(|items| instance.load_ns(items)).collect()
}
