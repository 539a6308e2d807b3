//! Partitions an instance's items into balanced groups, with a lower bound as certificate.
//!
//! [`balance`] is the entry point: a [`Strategy`] creates the groups, a [`LowerBound`] limits the best
//! makespan over all partitions. Inside, `problem` joins an instance with caps, `groups` holds a partition
//! under construction, `bound` proves lower bounds and `strategy` has one algorithm per file.

mod assignment;
mod balance;
mod bound;
mod groups;
mod problem;
mod strategy;

pub use assignment::Assignment;
pub(crate) use assignment::gap;
pub use balance::balance;
pub(crate) use bound::lower_bound_for;
pub use bound::{BoundKind, LowerBound, lower_bound};
pub(crate) use groups::Partition;
pub use problem::Problem;
pub(crate) use strategy::assign;
pub use strategy::{Partitioner, Solution, Strategy};
