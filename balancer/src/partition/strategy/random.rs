//! Random partition, seeded from the instance.

use super::round_robin::next_with_room;
use crate::partition::groups::Partition;
use crate::partition::problem::Problem;
use crate::rng::SplitMix64;

/// Draws a group for every item, after one random item for each group; skips full groups.
///
/// Returns `None` if an item fits no group.
pub(crate) fn assign(problem: &Problem<'_>) -> Option<Partition> {
    let mut rng = SplitMix64::new(problem.seed);
    let mut items: Vec<u32> = (0..problem.items as u32).collect();
    rng.shuffle_front(&mut items, problem.items);
    let mut partition = Partition::empty(problem);
    for (place, item) in items.into_iter().enumerate() {
        let drawn = if place < problem.groups { place } else { rng.below(problem.groups) };
        let group = next_with_room(problem, &partition, drawn, item)?;
        partition.add(problem, group, item);
    }
    Some(partition)
}
