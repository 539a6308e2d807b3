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

    /// Adds the constants of what runs after it on the same device; saturates.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            floor_ns: self.floor_ns.saturating_add(other.floor_ns),
            base_ns: self.base_ns.saturating_add(other.base_ns),
        }
    }

    /// Returns the share of some of the layers, rounded up.
    ///
    /// - `part`, `all`: a fraction; `all` of 0 counts as 1
    #[must_use]
    pub fn share(&self, [part, all]: [u64; 2]) -> Self {
        // Nanoseconds times layers may exceed 64 bits.
        let share = |ns: u64| (u128::from(ns) * u128::from(part)).div_ceil(u128::from(all.max(1))) as u64;
        Self { floor_ns: share(self.floor_ns), base_ns: share(self.base_ns) }
    }
}
