//! Which part of a tensor a rank of a tensor-parallel group holds.
//!
//! A tensor is cut along one axis; a rank holds some ranges of it, one behind the other. Ranks that hold the same ranges
//! are *replicas* of each other: key and value heads, where there are fewer of them than ranks. What is not cut is whole on
//! every rank. Every rank knows what all ranks hold, so that any of them can put the whole together.

use std::ops::Range;

use crate::comm::even_parts;

/// A rank of a tensor-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TpRank {
    /// This rank, below `size`.
    pub rank: usize,
    /// Ranks of the group: the tensor-parallel degree.
    pub size: usize,
}

impl TpRank {
    /// The rank of a group of one: it holds everything.
    pub const ALONE: Self = Self { rank: 0, size: 1 };
}

impl Default for TpRank {
    fn default() -> Self {
        Self::ALONE
    }
}

/// What each rank holds of an axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AxisPartition(Vec<Vec<Range<usize>>>);

impl AxisPartition {
    /// Cuts an axis into one part a rank, the first ones longer by one where it does not come out even.
    #[must_use]
    pub fn even(elements: usize, ranks: usize) -> Self {
        let mut end = 0;
        let part = |len: usize| {
            end += len;
            vec![end - len..end]
        };
        Self(even_parts(elements, ranks).into_iter().map(part).collect())
    }

    /// Deals out heads, `head_dim` elements each: evenly, or one to every so many ranks where there are fewer than ranks.
    #[must_use]
    pub fn heads(heads: usize, head_dim: usize, ranks: usize) -> Self {
        let first = |rank: usize| rank * heads / ranks;
        let part = |rank: usize| {
            let end = first(rank + 1).max(first(rank) + 1);
            vec![first(rank) * head_dim..end * head_dim]
        };
        Self((0..ranks).map(part).collect())
    }

    /// Puts axes behind each other; `parts` are those of each, with its elements.
    #[must_use]
    pub fn joined(parts: &[(&Self, usize)]) -> Self {
        let ranks = parts.first().map_or(0, |(parts, _)| parts.0.len());
        let of_rank = |rank: usize| {
            let mut offset = 0;
            let mut ranges = Vec::new();
            for (parts, elements) in parts {
                ranges.extend(parts.0[rank].iter().map(|range| offset + range.start..offset + range.end));
                offset += elements;
            }
            ranges
        };
        Self((0..ranks).map(of_rank).collect())
    }

    /// Returns the elements that a rank holds.
    #[must_use]
    pub fn len(&self, rank: usize) -> usize {
        self.0[rank].iter().map(Range::len).sum()
    }

    /// Returns the first element that a rank holds.
    #[must_use]
    pub fn first(&self, rank: usize) -> usize {
        self.0[rank].first().map_or(0, |range| range.start)
    }

    /// Returns the first rank that holds what a rank holds.
    #[must_use]
    pub fn original(&self, rank: usize) -> usize {
        self.0.iter().position(|ranges| *ranges == self.0[rank]).unwrap_or(rank)
    }
}

/// The part of a tensor that a rank holds: of one axis, or all of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TensorShard {
    tp_rank: TpRank,
    /// Axis, and the parts of all ranks.
    cut: Option<(usize, AxisPartition)>,
}

impl TensorShard {
    /// A tensor that every rank holds.
    #[must_use]
    pub fn whole(tp_rank: TpRank) -> Self {
        Self { tp_rank, cut: None }
    }

    /// A tensor that is cut along an axis; the only rank of a group holds all of it.
    #[must_use]
    pub fn cut(tp_rank: TpRank, axis: usize, parts: &AxisPartition) -> Self {
        Self { tp_rank, cut: (tp_rank.size > 1).then(|| (axis, parts.clone())) }
    }

    /// Returns whether every rank holds the whole tensor.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.cut.is_none()
    }

    /// Returns whose part this is.
    #[must_use]
    pub fn tp_rank(&self) -> TpRank {
        self.tp_rank
    }

    /// Returns whether this rank is the first of those that hold this part: sums over the elements of a tensor, such as the
    /// norm of its gradient, count the parts of these ranks alone.
    #[must_use]
    pub fn is_counted(&self) -> bool {
        self.original(self.tp_rank.rank) == self.tp_rank.rank
    }

    /// Returns the first rank that holds what a rank holds.
    #[must_use]
    pub fn original(&self, rank: usize) -> usize {
        self.cut.as_ref().map_or(0, |(_, parts)| parts.original(rank))
    }

    /// Returns the shape of a rank's part of a tensor of this shape.
    #[must_use]
    pub fn shape_of(&self, rank: usize, shape: &[usize]) -> Vec<usize> {
        let mut shape = shape.to_vec();
        if let Some((axis, parts)) = &self.cut {
            shape[*axis] = parts.len(rank);
        }
        shape
    }

    /// Returns where the elements of a rank's part lie in the tensor, row-major, in order.
    #[must_use]
    pub fn spans_of(&self, rank: usize, shape: &[usize]) -> Vec<Range<usize>> {
        let Some((axis, parts)) = &self.cut else { return vec![0..shape.iter().product()] };
        let outer: usize = shape[..*axis].iter().product();
        let inner: usize = shape[*axis + 1..].iter().product();
        let row = shape[*axis] * inner;
        let ranges = &parts.0[rank];
        let of_row = |index: usize| {
            ranges.iter().map(move |range| index * row + range.start * inner..index * row + range.end * inner)
        };
        (0..outer).flat_map(of_row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE_4: TpRank = TpRank { rank: 2, size: 4 };

    #[test]
    fn parts_of_all_ranks_are_the_whole_in_order() {
        for (elements, ranks) in [(7, 1), (7, 3), (8, 4), (152_064, 8)] {
            let parts = AxisPartition::even(elements, ranks);
            let all: Vec<Range<usize>> = parts.0.concat();
            assert_eq!((all[0].start, all[ranks - 1].end), (0, elements));
            assert!(
                all.windows(2).all(|pair| pair[0].end == pair[1].start && pair[0].len() >= pair[1].len())
            );
        }
    }

    #[test]
    fn heads_are_dealt_out_evenly_or_replicated() {
        assert_eq!(AxisPartition::heads(4, 3, 2).0, [vec![0..6], vec![6..12]]);
        let replicated = AxisPartition::heads(2, 3, 4);
        assert_eq!(replicated.0, [vec![0..3], vec![0..3], vec![3..6], vec![3..6]]);
        assert_eq!([0, 1, 2, 3].map(|rank| replicated.original(rank)), [0, 0, 2, 2]);
        let counted = |rank| TensorShard::cut(TpRank { rank, size: 4 }, 0, &replicated).is_counted();
        assert_eq!([0, 1, 2, 3].map(counted), [true, false, true, false]);
        let whole = |rank| TensorShard::whole(TpRank { rank, size: 2 }).is_counted();
        assert_eq!([0, 1].map(whole), [true, false]);
    }

    #[test]
    fn spans_are_those_of_rows_or_of_columns() {
        let (queries, keys) = (AxisPartition::heads(4, 2, 4), AxisPartition::heads(4, 1, 4));
        let fused = AxisPartition::joined(&[(&queries, 8), (&keys, 4)]);
        let rows = TensorShard::cut(SIZE_4, 0, &fused);
        assert_eq!(rows.spans_of(2, &[12, 10]), [40..60, 100..110]);
        assert_eq!(rows.shape_of(2, &[12, 10]), [3, 10]);
        let columns = TensorShard::cut(SIZE_4, 1, &AxisPartition::even(10, 4));
        assert_eq!(columns.spans_of(0, &[2, 10]), [0..3, 10..13]);
        assert_eq!(columns.spans_of(3, &[2, 10]), [8..10, 18..20]);
        assert_eq!(TensorShard::whole(SIZE_4).spans_of(2, &[2, 10]), vec![0..20]);
        assert!(TensorShard::cut(TpRank::ALONE, 1, &AxisPartition::even(10, 1)).is_whole());
    }
}
