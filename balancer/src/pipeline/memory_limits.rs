//! Memory limits for stage GPUs, which hold several microbatches at once.

use crate::error::{Error, Result};
use crate::instance::Instance;

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
    use super::*;
    use crate::pipeline::config::PipelineConfig;

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
