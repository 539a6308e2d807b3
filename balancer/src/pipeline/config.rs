//! Describes a step's pipelines: stages, DP sizes and search objective.
//!
//! Memory limits for stage GPUs, which hold several microbatches at once.

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

    /// Checks that there are stages for so many modules.
    pub(crate) fn check_stages(&self, modules: usize) -> Result<()> {
        let invalid = |reason| Err(Error::Config { setting: "stages", reason });
        let stages = self.stages.iter().fold(0, |sum: usize, count| sum.saturating_add(*count));
        if stages > STAGES_MAX {
            return invalid(format!("a pipeline has at most {STAGES_MAX}, got {stages}"));
        }
        if self.stages.len() != modules || self.stages.contains(&0) {
            let found = &self.stages;
            return invalid(format!(
                "expected {modules} numbers of at least 1, one per module, got {found:?}"
            ));
        }
        if self.has_parallel_encoders && modules > ENCODERS_MAX + 1 {
            let encoders = modules - 1;
            return invalid(format!("expected at most {ENCODERS_MAX} encoders side by side, got {encoders}"));
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
        self.check_stages(modules)?;
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

/// Binary order of the maximum total in units and bytes, so that sums of a few such values fit 64 bits.
const TOTAL_BITS: u32 = 62;

/// Memory limits for stage GPUs, and every item's units, to which memory is proportional.
///
/// A search keeps all limits if it can; [`PipelineAssignment::memory_excess`] is the bytes that remain above
/// them. Unlike a cap, a limit depends on microbatch order, because a stage holds activations from
/// consecutive microbatches.
///
/// [`PipelineAssignment::memory_excess`]: crate::PipelineAssignment::memory_excess
///
/// # Examples
/// ```
/// use dflop_balancer::{PipelineConfig, PipelineMemoryLimits, StageMemoryLimit};
///
/// // two stages of an LLM, 16 bytes per token: the first one holds two of the four microbatches
/// let config = PipelineConfig::new(1, vec![2]);
/// let stage = |stage| StageMemoryLimit {
///     in_flight: config.in_flight(stage, 4),
///     kept: vec![16],
///     working: vec![4],
///     bytes_max: 400,
/// };
/// let limits = PipelineMemoryLimits { units: vec![9, 1, 9, 1], stages: vec![stage(0), stage(1)] };
/// let config = config.memory(limits);
/// assert_eq!((config.in_flight(0, 4), config.in_flight(1, 4)), (2, 1));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipelineMemoryLimits {
    /// Every item's units in every module, `[items * modules]`: tokens or tiles, for example.
    pub units: Vec<u64>,
    /// Limits for stages whose memory may run out.
    pub stages: Vec<StageMemoryLimit>,
}

/// Memory limit for a stage GPU, on every DP rank.
///
/// A rank needs, over each window of [`in_flight`](Self::in_flight) consecutive microbatches, the kept bytes
/// for all of them and the working bytes for the rank's largest microbatch.
///
/// For a module with a different DP size than the pipelines, a microbatch's units are the units over all
/// ranks in the same slot, divided by that DP size and rounded up. Such a limit is checked once, not on every
/// rank, and has factors only for such modules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageMemoryLimit {
    /// Most consecutive microbatches that the stage holds, at least 1; see
    /// [`PipelineConfig::in_flight`](crate::PipelineConfig::in_flight).
    pub in_flight: usize,
    /// Bytes kept per unit in each module for every held microbatch, `[modules]`.
    pub kept: Vec<u64>,
    /// Additional bytes per unit in each module for the microbatch being computed, `[modules]`.
    pub working: Vec<u64>,
    /// Maximum bytes for microbatches.
    pub bytes_max: u64,
}

impl StageMemoryLimit {
    /// Whether the stage belongs to modules whose DP ranks share every slot: those with a DP size of their
    /// own.
    pub(super) fn is_shared(&self, has_own_dp_size: impl Fn(usize) -> bool) -> bool {
        self.modules().any(has_own_dp_size)
    }

    /// Lists the modules whose units take memory.
    pub(super) fn modules(&self) -> impl Iterator<Item = usize> + '_ {
        let factors = self.kept.iter().zip(&self.working).enumerate();
        factors.filter(|(_, (kept, working))| (**kept, **working) != (0, 0)).map(|(module, _)| module)
    }
}

impl PipelineMemoryLimits {
    /// Checks that the limits fit an instance, so that no sum of units or bytes overflows.
    pub(super) fn check(&self, instance: &Instance, has_own_dp_size: impl Fn(usize) -> bool) -> Result<()> {
        let invalid = |reason| Err(Error::Config { setting: "memory", reason });
        let modules = instance.modules();
        let expected = instance.items() * modules;
        if self.units.len() != expected {
            return Err(Error::Length { field: "units", found: self.units.len(), expected });
        }
        let mut units = vec![0_u128; modules];
        for (at, value) in self.units.iter().enumerate() {
            units[at % modules] += u128::from(*value);
        }
        let is_too_large = |sum: u128| sum >= 1 << TOTAL_BITS;
        if units.iter().any(|sum| is_too_large(*sum)) {
            return invalid(format!("the units of all items must be below 2^{TOTAL_BITS}"));
        }
        let mut total = 0_u128;
        for (stage, limit) in self.stages.iter().enumerate() {
            for (field, factors) in [("kept", &limit.kept), ("working", &limit.working)] {
                if factors.len() != modules {
                    return Err(Error::Length { field, found: factors.len(), expected: modules });
                }
            }
            if limit.in_flight == 0 {
                return invalid(format!("`in_flight` of limit {stage} must be at least 1, got 0"));
            }
            let is_shared = limit.is_shared(&has_own_dp_size);
            if limit.modules().any(|module| has_own_dp_size(module) != is_shared) {
                let reason = "has bytes of modules with the DP size of the pipelines and of others";
                return invalid(format!("limit {stage} {reason}; expected one kind"));
            }
            for module in limit.modules() {
                // A slot share is rounded up, by less than a unit.
                let units = units[module] + instance.groups() as u128;
                let factor = u128::from(limit.kept[module]) + u128::from(limit.working[module]);
                total = total.saturating_add(units.saturating_mul(factor));
            }
        }
        if is_too_large(total) {
            return invalid(format!("the bytes of all items in all stages must be below 2^{TOTAL_BITS}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{PipelineConfig, *};

    fn limit(kept: &[u64], in_flight: usize) -> StageMemoryLimit {
        StageMemoryLimit { in_flight, kept: kept.to_vec(), working: vec![0; kept.len()], bytes_max: 9 }
    }

    fn checked(units: &[u64], limit: StageMemoryLimit) -> Result<()> {
        let instance = Instance::new(2, 2, vec![1; 4]).unwrap();
        let limits = PipelineMemoryLimits { units: units.to_vec(), stages: vec![limit] };
        PipelineConfig::new(2, vec![1, 1]).module_dp_sizes(vec![1, 2]).memory(limits).check(&instance)
    }

    #[test]
    fn limits_that_do_not_fit_are_refused() {
        assert!(checked(&[1; 4], limit(&[3, 0], 1)).is_ok());
        assert!(checked(&[1 << 60; 4], limit(&[0, 0], 1)).is_ok(), "no module takes memory");
        assert!(matches!(checked(&[1; 3], limit(&[3, 0], 1)), Err(Error::Length { expected: 4, .. })));
        assert!(matches!(checked(&[1; 4], limit(&[3], 1)), Err(Error::Length { field: "kept", .. })));
        for (units, limit) in [
            ([1; 4], limit(&[3, 0], 0)),
            ([1; 4], limit(&[3, 1], 1)),
            ([u64::MAX; 4], limit(&[0, 0], 1)),
            ([1; 4], limit(&[u64::MAX, 0], 1)),
        ] {
            assert!(matches!(checked(&units, limit), Err(Error::Config { setting: "memory", .. })));
        }
    }
}
