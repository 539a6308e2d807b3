//! Data-blind partition: item `i` goes to group `i mod groups`.

use super::{Partitioner, Solution, within};
use crate::budget::Budget;
use crate::error::Result;
use crate::partition::problem::{Partition, Problem};

/// Deals items to the groups in turn.
#[derive(Debug)]
pub(super) struct RoundRobin;

impl Partitioner for RoundRobin {
    fn name(&self) -> &'static str {
        "round_robin"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["data-blind", "data_blind"]
    }

    fn is_blind(&self) -> bool {
        true
    }

    fn solve(&self, problem: &Problem<'_>, _budget: &mut Budget) -> Result<Solution> {
        Ok(Solution::new(problem, within(problem, assign(problem))?))
    }
}

/// Assigns the items in order; an item rejected by a cap goes to the next group with room.
///
/// Returns `None` if an item fits no group.
pub(crate) fn assign(problem: &Problem<'_>) -> Option<Partition> {
    let mut partition = Partition::empty(problem);
    for item in 0..problem.items as u32 {
        let preferred = item as usize % problem.groups;
        let group = next_with_room(problem, &partition, preferred, item)?;
        partition.add(problem, group, item);
    }
    Some(partition)
}

/// Finds the first group from `start` on, wrapping around, that has room for an item.
pub(super) fn next_with_room(
    problem: &Problem<'_>,
    partition: &Partition,
    start: usize,
    item: u32,
) -> Option<usize> {
    (start..problem.groups).chain(0..start).find(|&group| partition.has_room(problem, group, item))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};

    #[test]
    fn items_are_dealt_in_order() {
        let instance = Instance::new(2, 1, vec![9, 1, 9, 1, 9]).unwrap();
        let problem = Problem::new(&instance, &Caps::default()).unwrap();
        assert_eq!(assign(&problem).unwrap().into_groups(), [vec![0, 2, 4], vec![1, 3]]);
    }

    #[test]
    fn an_item_without_room_goes_on_to_the_next_group() {
        let instance = Instance::new(2, 1, vec![1; 4]).unwrap().tokens(vec![3, 1, 3, 1]).unwrap();
        let problem = Problem::new(&instance, &Caps { tokens_max: Some(5), bytes_max: None }).unwrap();
        assert_eq!(assign(&problem).unwrap().into_groups(), [vec![0], vec![1, 2, 3]]);
    }
}
