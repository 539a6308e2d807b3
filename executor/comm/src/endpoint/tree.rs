//! Tree of job ranks, over which small facts travel: job end, farewells, digests.
//!
//! Rank 0 is the root. A rank has one parent and at most [`FANOUT`] children, for any job size.

use std::collections::BTreeSet;

/// Maximum number of children per rank: two levels reach 20 ranks, four levels 340.
pub(crate) const FANOUT: usize = 4;

/// Returns the parent of a rank; `None` for the root.
pub(crate) fn parent(rank: usize) -> Option<usize> {
    Some(rank.checked_sub(1)? / FANOUT)
}

/// Returns the children of a rank.
pub(crate) fn children(rank: usize, size: usize) -> impl Iterator<Item = usize> {
    (FANOUT * rank + 1..=FANOUT * rank + FANOUT).take_while(move |&child| child < size)
}

/// Returns parent and children of a rank.
pub(crate) fn neighbors(rank: usize, size: usize) -> impl Iterator<Item = usize> {
    parent(rank).into_iter().chain(children(rank, size))
}

/// Returns a rank and all ranks below it, in a fixed order.
pub(crate) fn subtree(rank: usize, size: usize) -> Vec<usize> {
    let mut ranks = vec![rank];
    let mut next = 0;
    while let Some(&rank) = ranks.get(next) {
        ranks.extend(children(rank, size));
        next += 1;
    }
    ranks
}

/// Returns the nearest ranks beyond a neighbor that is gone, skipping further ranks that are gone.
///
/// - `rank`: the calling rank; ranks on the side of this rank are left out
pub(crate) fn beyond(
    rank: usize,
    neighbor: usize,
    size: usize,
    is_gone: impl Fn(usize) -> bool,
) -> Vec<usize> {
    let (mut seen, mut open, mut found) = (BTreeSet::from([rank, neighbor]), vec![neighbor], Vec::new());
    while let Some(gone) = open.pop() {
        for next in neighbors(gone, size).filter(|&next| seen.insert(next)).collect::<Vec<_>>() {
            if is_gone(next) { open.push(next) } else { found.push(next) }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_reached_once_with_few_neighbors() {
        for size in [1, 2, 5, 6, 64, 1000] {
            let mut all = subtree(0, size);
            all.sort_unstable();
            assert_eq!(all, (0..size).collect::<Vec<_>>());
            for rank in 1..size {
                assert!(children(parent(rank).unwrap(), size).any(|child| child == rank));
            }
            assert!((0..size).all(|rank| neighbors(rank, size).count() <= FANOUT + 1));
        }
    }

    #[test]
    fn ranks_beyond_gone_ones_are_found() {
        // 0 has 1 to 4, 1 has 5 to 8, 2 has 9 to 12
        assert_eq!(beyond(5, 1, 13, |rank| rank == 1), [0, 6, 7, 8]);
        let mut found = beyond(5, 1, 13, |rank| [0, 1, 2].contains(&rank));
        found.sort_unstable();
        assert_eq!(found, [3, 4, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!(beyond(3, 0, 13, |_| true), [0; 0]);
    }
}
