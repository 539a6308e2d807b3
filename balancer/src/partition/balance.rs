//! Entry point for partitions: requires a strategy and returns an assignment.

use crate::budget::Budget;
use crate::caps::Caps;
use crate::error::Result;
use crate::instance::Instance;
use crate::partition::assignment::Assignment;
use crate::partition::problem::Problem;
use crate::partition::strategy::{self, Solution, Strategy};

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
