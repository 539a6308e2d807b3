//! Order in which lanes run work.

use crate::runtime::Lane;

/// Priority among lanes whose next work may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Operations before communication.
    ComputeFirst,
    /// Communication before operations, oldest communicators first.
    CommunicationFirst,
    /// Communication before operations, newest communicators first.
    LastFirst,
    /// At random, with this seed.
    Random(u64),
}

impl Order {
    /// Number of orders in [`numbered`](Self::numbered).
    pub const NUMBER: u64 = 5;

    /// Returns one of five orders: the three fixed orders, then random orders.
    #[must_use]
    pub const fn numbered(number: u64) -> Self {
        match number {
            0 => Self::ComputeFirst,
            1 => Self::CommunicationFirst,
            2 => Self::LastFirst,
            seed => Self::Random(seed),
        }
    }

    /// Returns the first random state for this order.
    pub(super) const fn random(self) -> u64 {
        let seed = if let Self::Random(seed) = self { seed } else { 0 };
        seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
    }

    /// Chooses a lane from a nonempty list of lanes that may run, sorted with compute first.
    pub(super) fn choose(self, ready: &[Lane], random: &mut u64) -> Lane {
        match self {
            Self::ComputeFirst => ready[0],
            Self::CommunicationFirst => ready.get(1).copied().unwrap_or(ready[0]),
            Self::LastFirst => ready[ready.len() - 1],
            Self::Random(_) => {
                *random ^= *random << 13;
                *random ^= *random >> 7;
                *random ^= *random << 17;
                ready[*random as usize % ready.len()]
            }
        }
    }
}
