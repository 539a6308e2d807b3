//! Measured microbatch times, from which tables are learned, and the constants besides the samples.

use serde::{Deserialize, Serialize};

use crate::module::Module;

/// Measured time of one microbatch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Observation {
    /// Measured module; `None` for all modules of the microbatch together.
    pub module: Option<Module>,
    /// Data-parallel rank that ran it.
    pub rank: u32,
    /// Measured forward and backward in nanoseconds.
    pub measured_ns: u64,
    /// Time of the microbatch besides its samples, **without** correction.
    pub constants: MicrobatchConstants,
    /// Samples with work for the module.
    pub samples: Vec<SampleTime>,
}

/// What a sample adds to a microbatch in one module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SampleTime {
    /// The module.
    pub module: Module,
    /// Tokens inside the module.
    pub size: u64,
    /// Nanoseconds **without** correction, as [`crate::CostModel::predict_uncorrected`] returns them.
    pub ns: u64,
}

/// Microbatch time in addition to what the samples add; both 0 if unknown.
///
/// # Examples
/// ```
/// use dflop_costmodel::MicrobatchConstants;
///
/// let constants = MicrobatchConstants { floor_ns: 300, base_ns: 40 };
/// assert_eq!([0, 10, 500].map(|added_ns| constants.microbatch_ns(added_ns)), [0, 300, 540]);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MicrobatchConstants {
    /// Minimum time, set by the host that launches kernels; nanoseconds.
    pub floor_ns: u64,
    /// Device time in addition to any samples; nanoseconds.
    pub base_ns: u64,
}

impl MicrobatchConstants {
    /// Returns the time for a microbatch whose samples add this much, nanoseconds; 0 without work.
    #[must_use]
    pub fn microbatch_ns(&self, added_ns: u64) -> u64 {
        if added_ns == 0 { 0 } else { self.base_ns.saturating_add(added_ns).max(self.floor_ns) }
    }

    /// Adds the constants for work that runs afterwards on the same device; saturates.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            floor_ns: self.floor_ns.saturating_add(other.floor_ns),
            base_ns: self.base_ns.saturating_add(other.base_ns),
        }
    }

    /// Returns the share for some of the layers, rounded up.
    ///
    /// - `part`, `all`: a fraction; `all` of 0 counts as 1
    #[must_use]
    pub fn share(&self, [part, all]: [u64; 2]) -> Self {
        // Nanoseconds times layers may exceed 64 bits.
        let share = |ns: u64| (u128::from(ns) * u128::from(part)).div_ceil(u128::from(all.max(1))) as u64;
        Self { floor_ns: share(self.floor_ns), base_ns: share(self.base_ns) }
    }
}

/// Microbatch constants for a model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelConstants {
    /// Constants per module, in [`crate::CostModel::modules`] order; empty if unknown.
    pub modules: Vec<MicrobatchConstants>,
    /// Constants for all modules together, if they were learned from whole-microbatch times; `modules` does
    /// not count then.
    pub whole: Option<MicrobatchConstants>,
}

impl ModelConstants {
    /// Returns the microbatch time in each module, forward and backward. Constants for all modules together
    /// are part of the last module's time.
    ///
    /// - `added_ns`: time that the samples add, in module order, LLM last
    #[must_use]
    pub fn microbatch_ns(&self, mut added_ns: Vec<u64>) -> Vec<u64> {
        if let Some(whole) = &self.whole {
            let added = added_ns.iter().copied().fold(0, u64::saturating_add);
            if let Some(llm) = added_ns.last_mut() {
                *llm = llm.saturating_add(whole.microbatch_ns(added) - added);
            }
            return added_ns;
        }
        for (ns, constants) in added_ns.iter_mut().zip(&self.modules) {
            *ns = constants.microbatch_ns(*ns);
        }
        added_ns
    }

    /// Returns the part of the microbatch time in which launches limit a module, and the total microbatch
    /// time, in nanoseconds.
    ///
    /// - `microbatch_ns`: as returned by [`Self::microbatch_ns`]
    #[must_use]
    pub fn launch_limited_ns(&self, microbatch_ns: &[u64]) -> [u64; 2] {
        let all = microbatch_ns.iter().copied().fold(0, u64::saturating_add);
        let is_limited = |(ns, constants): &(&u64, &MicrobatchConstants)| **ns == constants.floor_ns;
        let limited = self.whole.map_or_else(
            || microbatch_ns.iter().zip(&self.modules).filter(is_limited).map(|(ns, _)| *ns).sum(),
            |whole| if all == whole.floor_ns { all } else { 0 },
        );
        [limited, all]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_count_once_in_a_microbatch() {
        let constants = |floor_ns, base_ns| MicrobatchConstants { floor_ns, base_ns };
        let modules = vec![constants(100, 10), constants(0, 20)];
        let apart = ModelConstants { modules: modules.clone(), whole: None };
        assert_eq!(apart.microbatch_ns(vec![50, 300]), [100, 320]);
        assert_eq!(apart.microbatch_ns(vec![0, 300]), [0, 320], "no work in the encoder");
        assert_eq!(apart.launch_limited_ns(&[100, 320]), [100, 420]);
        let whole = ModelConstants { modules, whole: Some(constants(400, 30)) };
        assert_eq!(whole.microbatch_ns(vec![50, 300]), [50, 350]);
        assert_eq!(whole.microbatch_ns(vec![500, 300]), [500, 330]);
        assert_eq!(whole.launch_limited_ns(&[50, 350]), [400, 400]);
        assert_eq!(ModelConstants::default().microbatch_ns(vec![5, 0]), [5, 0]);
    }
}
