//! What a microbatch takes besides its samples: a floor and a constant.

use serde::{Deserialize, Serialize};

/// Time of a microbatch besides what its samples add; both 0 where nothing is known.
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
    /// Least time, set by the host that launches kernels; nanoseconds.
    pub floor_ns: u64,
    /// Time that the device takes besides the samples, whatever they are; nanoseconds.
    pub base_ns: u64,
}

impl MicrobatchConstants {
    /// Returns the time of a microbatch whose samples add this much, nanoseconds; 0 without work.
    #[must_use]
    pub fn microbatch_ns(&self, added_ns: u64) -> u64 {
        if added_ns == 0 { 0 } else { self.base_ns.saturating_add(added_ns).max(self.floor_ns) }
    }

    /// Returns the share of one of several equal stages, rounded up.
    #[must_use]
    pub fn of_stage(&self, stages: u64) -> Self {
        let share = |ns: u64| ns.div_ceil(stages.max(1));
        Self { floor_ns: share(self.floor_ns), base_ns: share(self.base_ns) }
    }
}
