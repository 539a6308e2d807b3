//! Chooses which message lanes get a dedicated communicator and stream when a device has too few queues for
//! all lanes.
//!
//! Every lane needs two queues on each rank. If both ranks in a pair have enough queues, each lane between
//! the ranks is dedicated. Otherwise all lanes in a rank pair are merged, as long as both ranks have queues
//! for the merged lane. All remaining lanes share a single lane with a communicator over all ranks; every
//! rank reserves two queues for it.

use std::collections::{BTreeMap, BTreeSet};

use dflop_device::MessageLane;

/// Number of queues per lane: a queue for the lane stream and a queue for NCCL's internal stream.
pub(super) const QUEUES_PER_LANE: usize = 2;

/// Lane that carries messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    /// Dedicated to a single direction and flow.
    Own(MessageLane),
    /// Shared by a rank pair, lower rank first.
    Pair([usize; 2]),
    /// Shared by all ranks.
    Shared,
}

/// Chooses the places for new lanes, the same on all ranks.
///
/// - `free`: number of unused queues on each rank
/// - `open`: existing lanes, except dedicated lanes
pub(super) fn places(
    new: &BTreeSet<MessageLane>,
    free: &[usize],
    open: &BTreeSet<Place>,
) -> BTreeMap<MessageLane, Place> {
    let kept = if open.contains(&Place::Shared) { 0 } else { QUEUES_PER_LANE };
    let mut left: Vec<usize> = free.iter().map(|free| free.saturating_sub(kept)).collect();
    let mut needed = vec![0; free.len()];
    for lane in new {
        for rank in [lane.from, lane.to] {
            needed[rank] += QUEUES_PER_LANE;
        }
    }
    let is_enough: Vec<bool> = needed.iter().zip(&left).map(|(needed, left)| needed <= left).collect();
    let mut pairs = BTreeMap::<[usize; 2], Vec<MessageLane>>::new();
    for &lane in new {
        pairs.entry([lane.from.min(lane.to), lane.from.max(lane.to)]).or_default().push(lane);
    }
    // lanes of their own come first, because their ranks have counted them
    let (own, others): (Vec<_>, Vec<_>) = pairs.into_iter().partition(|(pair, _)| {
        !open.contains(&Place::Pair(*pair)) && pair.iter().all(|&rank| is_enough[rank])
    });
    let mut places = BTreeMap::new();
    for (pair, lanes) in own {
        for rank in pair {
            left[rank] -= QUEUES_PER_LANE * lanes.len();
        }
        places.extend(lanes.into_iter().map(|lane| (lane, Place::Own(lane))));
    }
    for (pair, lanes) in others {
        let is_open = open.contains(&Place::Pair(pair));
        let has_room = is_open || pair.iter().all(|&rank| left[rank] >= QUEUES_PER_LANE);
        if has_room && !is_open {
            for rank in pair {
                left[rank] -= QUEUES_PER_LANE;
            }
        }
        let place = if has_room { Place::Pair(pair) } else { Place::Shared };
        places.extend(lanes.into_iter().map(|lane| (lane, place)));
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(from: usize, to: usize, flow: u64) -> MessageLane {
        MessageLane { from, to, flow }
    }

    /// Lanes for a chain of ranks: activations forward, gradients backward.
    fn chain(ranks: usize) -> BTreeSet<MessageLane> {
        (1..ranks).flat_map(|rank| [lane(rank - 1, rank, 0), lane(rank, rank - 1, 1)]).collect()
    }

    fn count(places: &BTreeMap<MessageLane, Place>, rank: usize) -> usize {
        let own = places.iter().filter(|(lane, _)| [lane.from, lane.to].contains(&rank));
        own.map(|(_, place)| place).collect::<BTreeSet<_>>().len()
    }

    #[test]
    fn lanes_are_separate_as_long_as_there_are_queues() {
        let lanes = chain(4);
        let places = places(&lanes, &[10; 4], &BTreeSet::new());
        assert!(places.iter().all(|(lane, place)| *place == Place::Own(*lane)), "{places:?}");
    }

    #[test]
    fn pairs_share_before_all_ranks_do() {
        // the ranks in the middle have four lanes, for which 6 queues are too few
        let places_of = |queues| places(&chain(4), &[queues; 4], &BTreeSet::new());
        let found = places_of(8);
        assert!(found.values().all(|place| matches!(place, Place::Pair(_))), "{found:?}");
        let found = places_of(4);
        assert_eq!(found[&lane(0, 1, 0)], Place::Pair([0, 1]));
        assert_eq!(found[&lane(2, 1, 1)], Place::Shared);
        assert_eq!(found[&lane(2, 3, 0)], Place::Pair([2, 3]));
        let found = places_of(2);
        assert!(found.values().all(|place| *place == Place::Shared), "{found:?}");
    }

    #[test]
    fn no_rank_takes_more_queues_than_it_has() {
        for queues in 2..40 {
            let free: Vec<usize> = (0..9).map(|rank| queues + rank % 3).collect();
            let pairs = (0..9).flat_map(|from| (0..9).map(move |to| (from, to)));
            let lanes: BTreeSet<MessageLane> = pairs
                .filter(|(from, to)| from != to && (from * to) % 4 != 3)
                .map(|(from, to)| lane(from, to, u64::from(from > to)))
                .collect();
            let (first, later): (Vec<_>, Vec<_>) = lanes.iter().partition(|lane| lane.from % 2 == 0);
            let mut all = places(&first.into_iter().collect(), &free, &BTreeSet::new());
            let mut left = free.clone();
            let open: BTreeSet<Place> =
                all.values().copied().filter(|place| !matches!(place, Place::Own(_))).collect();
            for (rank, left) in left.iter_mut().enumerate() {
                let own = all.iter().filter(|(lane, _)| [lane.from, lane.to].contains(&rank));
                let own: BTreeSet<Place> = own.map(|(_, place)| *place).collect();
                let shared = usize::from(open.contains(&Place::Shared) && !own.contains(&Place::Shared));
                *left -= QUEUES_PER_LANE * (own.len() + shared);
            }
            all.extend(places(&later.into_iter().collect(), &left, &open));
            for (rank, free) in free.iter().enumerate() {
                assert!(QUEUES_PER_LANE * count(&all, rank) <= *free, "{queues}: rank {rank} of {all:?}");
            }
        }
    }
}
