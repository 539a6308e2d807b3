//! Data-blind partition: item `i` goes to group `i mod groups`.

use crate::partition::groups::Partition;
use crate::partition::problem::Problem;

/// Assigns the items in their order; an item that a cap keeps out goes to the next group with room.
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
