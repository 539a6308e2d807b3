//! Assigns items to slots so that every rank comes close to the cut in the [`Relaxation`].
//!
//! Longest processing time first, with targets for each slot: each item goes to the slot with the smallest
//! resulting maximum excess.

use super::relaxation::Relaxation;
use crate::budget::Budget;
use crate::partition::Partition;
use crate::partition::Problem;
use std::cmp::Reverse;

/// Fills the slots on all ranks, rank by rank; `None` if that would take most of the budget, if a cap forbids
/// it or if there are too few items.
pub(crate) fn assign(
    problem: &Problem<'_>,
    relaxation: &Relaxation,
    budget: &mut Budget,
) -> Option<Partition> {
    let steps = problem.items as u64 * problem.groups as u64;
    if steps > budget.steps_left() / 8 * 7 || problem.items < problem.groups {
        return None;
    }
    budget.spend(steps);
    let mut order: Vec<u32> = (0..problem.items as u32).collect();
    order.sort_by_key(|&item| Reverse(problem.value(problem.row(item))));
    let mut slots = Partition::empty(problem);
    for item in order {
        let with_room = (0..problem.groups).filter(|&slot| slots.has_room(problem, slot, item));
        let slot = with_room.min_by_key(|&slot| excess(problem, relaxation, &slots, slot, item))?;
        slots.add(problem, slot, item);
    }
    fill_empty(problem, &mut slots);
    Some(slots)
}

/// Returns a slot's excess over the targets with an item added, in the worst module.
fn excess(problem: &Problem<'_>, relaxation: &Relaxation, slots: &Partition, slot: usize, item: u32) -> i64 {
    let modules = problem.modules;
    let start = slot * modules % relaxation.profile_ns.len();
    let loads = slots.load(problem, slot)[..modules].iter().zip(problem.row(item));
    let excesses = loads.zip(&relaxation.profile_ns[start..start + modules]);
    excesses.map(|((load, time), target)| (load + time) as i64 - *target as i64).max().unwrap_or(0)
}

/// Moves the shortest item from the slot with the most items to every empty slot.
fn fill_empty(problem: &Problem<'_>, slots: &mut Partition) {
    for empty in 0..problem.groups {
        if !slots.groups[empty].is_empty() {
            continue;
        }
        let Some(fullest) = (0..problem.groups).min_by_key(|&slot| Reverse(slots.groups[slot].len())) else {
            return;
        };
        let items = &slots.groups[fullest];
        let value = |&position: &usize| problem.value(problem.row(items[position]));
        let Some(position) = (0..items.len()).min_by_key(value) else { return };
        let item = slots.take(problem, fullest, position);
        slots.add(problem, empty, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};

    fn assigned(instance: &Instance, caps: Caps, profile_ns: &[u64]) -> Option<Vec<Vec<u32>>> {
        let problem = Problem::new(instance, &caps).unwrap();
        let relaxation = Relaxation { bound_ns: 0, profile_ns: profile_ns.to_vec() };
        Some(assign(&problem, &relaxation, &mut Budget::work(100))?.into_groups())
    }

    #[test]
    fn slots_of_every_rank_follow_the_profile() {
        let instance = Instance::new(4, 1, vec![10, 10, 30, 30]).unwrap();
        assert_eq!(assigned(&instance, Caps::default(), &[10, 30]).unwrap(), [[0], [2], [1], [3]]);
    }

    #[test]
    fn no_slot_stays_empty() {
        let instance = Instance::new(2, 1, vec![4, 5, 6]).unwrap();
        assert_eq!(assigned(&instance, Caps::default(), &[0, 100]).unwrap(), [vec![0], vec![1, 2]]);
    }

    #[test]
    fn a_cap_is_kept_or_nothing_is_assigned() {
        let instance = Instance::new(2, 1, vec![4, 5, 6, 7]).unwrap().tokens(vec![2, 2, 3, 3]).unwrap();
        let caps = |max| Caps { tokens_max: Some(max), bytes_max: None };
        assert_eq!(assigned(&instance, caps(6), &[0, 100]).unwrap(), [[0, 1], [2, 3]]);
        assert_eq!(assigned(&instance, caps(5), &[0, 100]).unwrap(), [[0, 2], [1, 3]]);
        let three = Instance::new(2, 1, vec![4, 5, 6]).unwrap().tokens(vec![2, 2, 2]).unwrap();
        assert_eq!(assigned(&three, caps(3), &[0, 100]), None);
    }
}
