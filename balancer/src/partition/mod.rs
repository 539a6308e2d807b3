//! Partitions an instance's items into balanced groups, with a lower bound as certificate.
//!
//! [`balance`] is the entry point: a [`Strategy`] creates the groups, a [`LowerBound`] limits the best
//! makespan over all partitions. Inside, `problem` joins an instance with caps, `groups` holds a partition
//! under construction, `bound` proves lower bounds and `strategy` has one algorithm per file.

mod bound;
mod problem;
mod strategy;

use super::instance::Caps;
use crate::budget::Budget;
use crate::error::Result;
use crate::instance::Instance;

pub(crate) use bound::lower_bound_for;
pub use bound::{BoundKind, LowerBound, lower_bound};
pub(crate) use problem::Partition;
pub use problem::Problem;
pub(crate) use strategy::assign;
pub use strategy::{Partitioner, Solution, Strategy};

/// Items in every group, makespan and lower bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assignment {
    /// Items in every group, ascending; contains every item in the instance exactly once.
    pub groups: Vec<Vec<u32>>,
    /// Largest module sum in any group, nanoseconds.
    pub makespan_ns: u64,
    /// Lower bound on the makespan for any partition.
    pub bound: LowerBound,
    /// Work units spent by the search; see [`Budget`].
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

/// Partitions an instance, minimizing the slowest group's time.
///
/// Pure and deterministic: equal arguments give equal assignments on every machine, unless the budget's
/// deadline cuts the search short (then [`Assignment::is_reproducible`] is false). Only [`Strategy::SEARCH`]
/// and [`Strategy::EXACT`] spend the budget. Every group gets an item if there are enough items.
///
/// # Errors
/// [`Error::CapItem`](crate::Error::CapItem) and [`Error::CapTotal`](crate::Error::CapTotal) if no partition
/// keeps within the caps; [`Error::CapUnmet`](crate::Error::CapUnmet) if none was found;
/// [`Error::Config`](crate::Error::Config) if the instance lacks a capped column;
/// [`Error::TooLarge`](crate::Error::TooLarge) only from [`Strategy::EXACT`].
///
/// # Examples
/// ```
/// use dflop_balancer::{Budget, Caps, Instance, Strategy, balance};
///
/// let instance = Instance::new(2, 2, vec![9, 1, 9, 1, 1, 9, 1, 9])?;
/// let assignment = balance(&instance, Strategy::SEARCH, &Caps::default(), &mut Budget::work(20_000))?;
/// assert_eq!(assignment.groups, [[0, 2], [1, 3]]);
/// assert!(assignment.is_optimal());
/// # Ok::<(), dflop_balancer::Error>(())
/// ```
pub fn balance(
    instance: &Instance,
    strategy: Strategy,
    caps: &Caps,
    budget: &mut Budget,
) -> Result<Assignment> {
    let problem = Problem::new(instance, caps)?;
    let work_before = budget.work_spent();
    let Solution { partition, bound } = strategy::solve(&problem, strategy, budget)?;
    Ok(Assignment {
        makespan_ns: partition.makespan(),
        groups: partition.into_groups(),
        bound,
        work_spent: budget.work_spent() - work_before,
        is_reproducible: budget.is_reproducible(),
    })
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
