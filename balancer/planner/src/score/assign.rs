//! Assigns samples in a batch to groups, and groups to slots on the LLM ranks.
//!
//! Groups are filled greedily, the longest samples first, and assigned to ranks evenly; all ranks use the
//! same order by size, so that slot `k` has about the same size on all ranks.

use dflop_balancer::peak_order;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Order by size for a rank's microbatches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// The largest in the middle: fill and drain are short.
    Peak,
    /// Large and small microbatches alternate: microbatches in flight together use about the same memory
    /// everywhere.
    Even,
}

/// Assigns each item, in sequence, to the group with the smallest sum; returns each item's group.
///
/// This is LPT if the items are sorted by size. There are at least as many items as groups; the first items
/// seed the groups, so none is empty. Ties go to the lower index.
pub(super) fn greedy_groups(sizes_ns: &[u64], groups: usize) -> Vec<u32> {
    let seeds = sizes_ns.iter().take(groups).enumerate();
    let seeds: Vec<Reverse<(u64, u32)>> = seeds.map(|(group, size)| Reverse((*size, group as u32))).collect();
    let mut group_of: Vec<u32> = (0..groups as u32).collect();
    let mut heap = BinaryHeap::from(seeds);
    for size in &sizes_ns[groups.min(sizes_ns.len())..] {
        if let Some(mut least) = heap.peek_mut() {
            group_of.push(least.0.1);
            least.0.0 += size;
        }
    }
    group_of
}

/// Assigns groups to ranks and slots; returns each group's cell, `slot * ranks + rank`.
pub(super) fn cells_of_groups(group_ns: &[u64], ranks: usize, order_of_slots: Order) -> Vec<u32> {
    let slots = group_ns.len() / ranks;
    let mut order: Vec<u32> = (0..group_ns.len() as u32).collect();
    order.sort_unstable_by_key(|&group| (Reverse(group_ns[group as usize]), group));
    let mut by_rank: Vec<Vec<u32>> = vec![Vec::with_capacity(slots); ranks];
    let mut heap: BinaryHeap<Reverse<(u64, u32)>> =
        (0..ranks as u32).map(|rank| Reverse((0, rank))).collect();
    for group in order {
        // A full rank leaves the heap, so the heap is not empty while groups are left.
        let Some(Reverse((load, rank))) = heap.pop() else { break };
        let own = &mut by_rank[rank as usize];
        own.push(group);
        if own.len() < slots {
            heap.push(Reverse((load + group_ns[group as usize], rank)));
        }
    }
    let mut cells = vec![0; group_ns.len()];
    for (rank, own) in by_rank.iter().enumerate() {
        let own_ns: Vec<u64> = own.iter().map(|&group| group_ns[group as usize]).collect();
        let slots = match order_of_slots {
            Order::Peak => peak_order(&own_ns),
            Order::Even => even_order(&own_ns),
        };
        for (slot, at) in slots.into_iter().enumerate() {
            cells[own[at as usize] as usize] = (slot * ranks + rank) as u32;
        }
    }
    cells
}

/// Lists sizes so that each run of neighbors has about the same sum: the largest, the smallest, the second
/// largest, the second smallest, and so on.
fn even_order(sizes: &[u64]) -> Vec<u32> {
    let mut falling: Vec<u32> = (0..sizes.len() as u32).collect();
    falling.sort_unstable_by_key(|&at| (Reverse(sizes[at as usize]), at));
    let half = falling.len().div_ceil(2);
    let (large, small) = falling.split_at(half);
    let mut order = Vec::with_capacity(falling.len());
    for (at, large) in large.iter().enumerate() {
        order.push(*large);
        order.extend(small.len().checked_sub(at + 1).map(|at| small[at]));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn large_and_small_sizes_take_turns() {
        assert_eq!(even_order(&[1, 9, 5, 7, 3]), [1, 0, 3, 4, 2]);
        assert_eq!(even_order(&[4, 2]), [0, 1]);
        assert_eq!(even_order(&[4]), [0]);
        assert!(even_order(&[]).is_empty());
    }

    proptest! {
        #[test]
        fn every_group_gets_an_item_and_every_cell_a_group(
            sizes in prop::collection::vec(0u64..50, 24..60), ranks in 1usize..5, slots in 1usize..6,
        ) {
            let groups = ranks * slots;
            let group_of = greedy_groups(&sizes, groups);
            let mut loads = vec![0; groups];
            let mut counts = vec![0; groups];
            for (item, &group) in group_of.iter().enumerate() {
                loads[group as usize] += sizes[item];
                counts[group as usize] += 1;
            }
            prop_assert!(counts.iter().all(|count| *count > 0));
            for order in [Order::Peak, Order::Even] {
                let mut cells = cells_of_groups(&loads, ranks, order);
                cells.sort_unstable();
                prop_assert_eq!(cells, (0..groups as u32).collect::<Vec<_>>());
            }
        }
    }
}
