//! Finds groups within tight caps if a single pass finds none.
//!
//! The caps without times form a partition problem: the modules are the capped columns. The local search for
//! a small makespan solves it, and ends once all caps are met.

use super::{multi_lpt, search};
use crate::budget::Budget;
use crate::error::{Error, Result};
use crate::partition::groups::Partition;
use crate::partition::problem::Problem;

/// Work-unit limit before it fails, about 10 ms.
const WORK_MAX: u64 = 200_000;

/// Finds groups within all caps.
///
/// # Errors
/// [`Error::CapUnmet`] if no groups were found, although a solution may exist.
pub(crate) fn assign(problem: &Problem<'_>) -> Result<Partition> {
    let unmet = || Error::CapUnmet { items: problem.items, groups: problem.groups };
    let of_caps = problem.caps_only();
    let mut partition = multi_lpt::assign(&of_caps).ok_or_else(unmet)?;
    search::improve(&of_caps, &mut partition, &mut Budget::work(WORK_MAX));
    let partition = Partition::from_groups(problem, partition.groups);
    if partition.is_within(problem) { Ok(partition) } else { Err(unmet()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};

    #[test]
    fn a_cap_that_only_one_partition_meets_is_met() {
        let tokens = vec![8, 7, 6, 5, 4];
        let instance = Instance::new(2, 1, vec![1; 5]).unwrap().tokens(tokens).unwrap();
        let problem = Problem::new(&instance, &Caps { tokens_max: Some(15), bytes_max: None }).unwrap();
        assert_eq!(assign(&problem).unwrap().into_groups(), [vec![2, 3, 4], vec![0, 1]]);
    }

    #[test]
    fn two_caps_are_met_at_once() {
        let instance = Instance::new(2, 1, vec![1; 4]).unwrap();
        let instance = instance.tokens(vec![9, 9, 1, 1]).unwrap().bytes(vec![1, 90, 90, 1]).unwrap();
        let problem = Problem::new(&instance, &Caps { tokens_max: Some(10), bytes_max: Some(91) }).unwrap();
        assert_eq!(assign(&problem).unwrap().into_groups(), [[1, 3], [0, 2]]);
    }

    #[test]
    fn a_cap_that_nothing_meets_is_an_error() {
        let instance = Instance::new(2, 1, vec![1; 3]).unwrap().tokens(vec![5, 5, 5]).unwrap();
        let problem = Problem::new(&instance, &Caps { tokens_max: Some(8), bytes_max: None }).unwrap();
        assert!(matches!(assign(&problem), Err(Error::CapUnmet { items: 3, groups: 2 })));
    }
}
