//! Strategy result, checked if it comes from outside.

use crate::error::{Error, Result};
use crate::partition::bound::LowerBound;
use crate::partition::groups::Partition;
use crate::partition::problem::Problem;

/// Partition that a strategy found, with the best known bound.
#[derive(Debug, Clone)]
pub struct Solution {
    pub(crate) partition: Partition,
    pub(crate) bound: LowerBound,
}

impl Solution {
    /// Creates a solution with the problem's bound.
    pub(crate) fn new(problem: &Problem<'_>, partition: Partition) -> Self {
        Self { partition, bound: problem.bound }
    }

    /// Creates a solution from every item's group.
    ///
    /// # Errors
    /// [`Error::Config`] if there is not exactly one valid group per item, or a group stays empty although
    /// there are enough items; [`Error::CapUnmet`] if a group exceeds a cap.
    pub fn from_groups(problem: &Problem<'_>, group_of: &[u32]) -> Result<Self> {
        let invalid = |reason: String| Err(Error::Config { setting: "strategy", reason });
        if group_of.len() != problem.items {
            return invalid(format!(
                "expected a group for each of {} items, got {}",
                problem.items,
                group_of.len()
            ));
        }
        let mut groups = vec![Vec::new(); problem.groups];
        for (item, group) in group_of.iter().enumerate() {
            let Some(items) = groups.get_mut(*group as usize) else {
                return invalid(format!("item {item} is in group {group} of {}", problem.groups));
            };
            items.push(item as u32);
        }
        if problem.items >= problem.groups && groups.iter().any(Vec::is_empty) {
            return invalid("a group has no item, although there are enough".to_owned());
        }
        let partition = Partition::from_groups(problem, groups);
        if !partition.is_within(problem) {
            return Err(Error::CapUnmet { items: problem.items, groups: problem.groups });
        }
        Ok(Self::new(problem, partition))
    }
}
