//! Solution to a partition problem, with a certificate.

use crate::partition::bound::LowerBound;

/// Items in every group, makespan and lower bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// Items in every group, ascending; contains every item in the instance exactly once.
    pub groups: Vec<Vec<u32>>,
    /// Largest module sum in any group, nanoseconds.
    pub makespan_ns: u64,
    /// Lower bound on the makespan for any partition.
    pub bound: LowerBound,
    /// Work units spent by the search; see [`Budget`](crate::Budget).
    pub work_spent: u64,
    /// Whether every machine finds this result: false only if a deadline cut the search short.
    pub is_reproducible: bool,
}

impl Assignment {
    /// Returns makespan / lower bound - 1, a fraction: the optimum is at most this much better.
    #[must_use]
    pub fn gap(&self) -> f64 {
        gap(self.makespan_ns, self.bound.ns)
    }

    /// Whether the lower bound proves that no partition is better.
    #[must_use]
    pub fn is_optimal(&self) -> bool {
        self.makespan_ns == self.bound.ns
    }
}

/// Returns makespan / bound - 1; equal makespan and bound have gap 0, even if both are 0.
pub(crate) fn gap(makespan_ns: u64, bound_ns: u64) -> f64 {
    if makespan_ns == bound_ns {
        return 0.0;
    }
    (makespan_ns - bound_ns) as f64 / bound_ns as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gap_is_the_excess_over_the_bound() {
        assert!((gap(110, 100) - 0.1).abs() < 1e-12);
        assert_eq!(gap(0, 0).to_bits(), 0);
    }
}
