//! Tensor part that a tensor-parallel rank holds.
//!
//! Writes weights as files that transformers reads.
//!
//! A tensor is sharded along an axis; a rank holds some axis ranges, concatenated. Ranks that hold the same
//! ranges are *replicas*, for example key and value heads if there are fewer heads than ranks. Unsharded
//! tensors are complete on every rank. Every rank knows the parts of all ranks, so that any rank can assemble
//! the tensor.

use super::{INDEX_FILE, WEIGHTS_FILE};
use crate::error::{Error, Result};
use dflop_comm::even_parts;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

/// Rank in a tensor-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TpRank {
    /// This rank, below `size`.
    pub rank: usize,
    /// Number of ranks in the group: the tensor-parallel degree.
    pub size: usize,
}

impl TpRank {
    /// A group with a single rank, which holds everything.
    pub const ALONE: Self = Self { rank: 0, size: 1 };
}

impl Default for TpRank {
    fn default() -> Self {
        Self::ALONE
    }
}

/// Axis ranges that each rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AxisPartition(Vec<Vec<Range<usize>>>);

impl AxisPartition {
    /// Divides an axis into a part per rank; the first parts are longer by one if the division has a
    /// remainder.
    #[must_use]
    pub fn even(elements: usize, ranks: usize) -> Self {
        let mut end = 0;
        let part = |len: usize| {
            end += len;
            vec![end - len..end]
        };
        Self(even_parts(elements, ranks).into_iter().map(part).collect())
    }

    /// Divides heads with `head_dim` elements: evenly, or with each head on several ranks if there are fewer
    /// heads than ranks.
    #[must_use]
    pub fn heads(heads: usize, head_dim: usize, ranks: usize) -> Self {
        let first = |rank: usize| rank * heads / ranks;
        let part = |rank: usize| {
            let end = first(rank + 1).max(first(rank) + 1);
            vec![first(rank) * head_dim..end * head_dim]
        };
        Self((0..ranks).map(part).collect())
    }

    /// Returns the partition for an axis with `factor` elements in place of each element.
    #[must_use]
    pub fn scaled(&self, factor: usize) -> Self {
        let ranges = |ranges: &Vec<Range<usize>>| {
            ranges.iter().map(|range| factor * range.start..factor * range.end).collect()
        };
        Self(self.0.iter().map(ranges).collect())
    }

    /// Concatenates axes; `parts` contains each axis partition and length.
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

    /// Returns the number of elements that a rank holds.
    #[must_use]
    pub fn len(&self, rank: usize) -> usize {
        self.0[rank].iter().map(Range::len).sum()
    }

    /// Returns the first element that a rank holds.
    #[must_use]
    pub fn first(&self, rank: usize) -> usize {
        self.0[rank].first().map_or(0, |range| range.start)
    }

    /// Returns the first rank that holds the same ranges as `rank`.
    #[must_use]
    pub fn original(&self, rank: usize) -> usize {
        self.0.iter().position(|ranges| *ranges == self.0[rank]).unwrap_or(rank)
    }
}

/// Tensor part that a rank holds: an axis part, or the complete tensor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TensorShard {
    tp_rank: TpRank,
    /// Sharded axis, with the parts of all ranks.
    cut: Option<(usize, AxisPartition)>,
}

impl TensorShard {
    /// Creates a tensor that every rank holds completely.
    #[must_use]
    pub fn whole(tp_rank: TpRank) -> Self {
        Self { tp_rank, cut: None }
    }

    /// Creates a tensor that is sharded along an axis; in a group with a single rank it is complete.
    #[must_use]
    pub fn cut(tp_rank: TpRank, axis: usize, parts: &AxisPartition) -> Self {
        Self { tp_rank, cut: (tp_rank.size > 1).then(|| (axis, parts.clone())) }
    }

    /// Returns whether every rank holds the complete tensor.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.cut.is_none()
    }

    /// Returns the rank that holds this part.
    #[must_use]
    pub fn tp_rank(&self) -> TpRank {
        self.tp_rank
    }

    /// Returns whether this rank is the first rank that holds this part. Sums over tensor elements, such as a
    /// gradient norm, count only these ranks.
    #[must_use]
    pub fn is_counted(&self) -> bool {
        self.original(self.tp_rank.rank) == self.tp_rank.rank
    }

    /// Returns the first rank that holds the same part as `rank`.
    #[must_use]
    pub fn original(&self, rank: usize) -> usize {
        self.cut.as_ref().map_or(0, |(_, parts)| parts.original(rank))
    }

    /// Returns the shape of the part on a rank for a tensor with this shape.
    #[must_use]
    pub fn rank_shape(&self, rank: usize, shape: &[usize]) -> Vec<usize> {
        let mut shape = shape.to_vec();
        if let Some((axis, parts)) = &self.cut {
            shape[*axis] = parts.len(rank);
        }
        shape
    }

    /// Returns the row-major ranges in the complete tensor that make up the part on a rank, in order.
    #[must_use]
    pub fn rank_spans(&self, rank: usize, shape: &[usize]) -> Vec<Range<usize>> {
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

/// Tensor to write.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape, row-major.
    pub shape: Vec<usize>,
    /// Values.
    pub values: Vec<f32>,
}

impl Tensor {
    fn bytes(&self) -> u64 {
        4 * self.values.len() as u64
    }
}

/// Writes tensors as `f32` into a directory: one file, or several files with at most `piece_bytes_max` (or
/// one tensor) and an index.
///
/// Each file is written under a temporary name, synced and renamed; the index is written last. Existing files
/// with the same names are replaced, and files from the alternative form are removed, so that the directory
/// has one set of weights.
///
/// # Errors
/// [`Error::File`] if a file cannot be written.
pub fn write(directory: &Path, mut tensors: Vec<Tensor>, piece_bytes_max: u64) -> Result<()> {
    // the same files for any order in which stages return tensors
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let mut pieces: Vec<Vec<Tensor>> = vec![Vec::new()];
    let mut bytes = 0;
    for tensor in tensors {
        bytes += tensor.bytes();
        match pieces.last_mut() {
            Some(piece) if piece.is_empty() || bytes <= piece_bytes_max => piece.push(tensor),
            _ => {
                bytes = tensor.bytes();
                pieces.push(vec![tensor]);
            }
        }
    }
    if let [only] = &pieces[..] {
        write_piece(directory, WEIGHTS_FILE, only)?;
        return remove(&directory.join(INDEX_FILE));
    }
    let count = pieces.len();
    let mut map = serde_json::Map::new();
    for (index, piece) in pieces.iter().enumerate() {
        let file = format!("model-{:05}-of-{count:05}.safetensors", index + 1);
        write_piece(directory, &file, piece)?;
        map.extend(piece.iter().map(|tensor| (tensor.name.clone(), file.clone().into())));
    }
    let total: u64 = pieces.iter().flatten().map(Tensor::bytes).sum();
    let index = serde_json::json!({"metadata": {"total_size": total}, "weight_map": map});
    replace(directory, INDEX_FILE, |part| std::fs::write(part, format!("{index:#}\n")))?;
    remove(&directory.join(WEIGHTS_FILE))
}

fn write_piece(directory: &Path, name: &str, tensors: &[Tensor]) -> Result<()> {
    let mut views = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let bytes = bytemuck::cast_slice(&tensor.values);
        let view =
            TensorView::new(Dtype::F32, tensor.shape.clone(), bytes).map_err(|_| Error::TensorShape {
                tensor: tensor.name.clone(),
                expected: vec![tensor.values.len()],
                found: tensor.shape.clone(),
            })?;
        views.push((&tensor.name, view));
    }
    // transformers rejects files without this entry
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    replace(directory, name, |part| {
        safetensors::serialize_to_file(views, Some(metadata), part).map_err(std::io::Error::other)
    })
}

/// Writes a file in a temporary directory that only this user can access, so that no link is followed; syncs
/// and renames it.
fn replace(directory: &Path, name: &str, write: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
    let path = directory.join(name);
    let all = || {
        let own = tempfile::Builder::new().prefix(".weights-").suffix(".partial").tempdir_in(directory)?;
        let part = own.path().join(name);
        write(&part)?;
        // before the rename, so that a crash leaves the old file or the complete new one
        File::open(&part)?.sync_all()?;
        std::fs::rename(&part, &path)?;
        // the rename itself is durable only once the directory is synced
        File::open(directory)?.sync_all()
    };
    all().map_err(|source| Error::File { action: "write", path: path.clone(), source })
}

fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::File { action: "remove", path: path.to_owned(), source: error })
        }
        _ => Ok(()),
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
    fn heads_are_divided_evenly_or_replicated() {
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
    fn spans_cover_rows_or_columns() {
        let (queries, keys) = (AxisPartition::heads(4, 2, 4), AxisPartition::heads(4, 1, 4));
        let fused = AxisPartition::joined(&[(&queries, 8), (&keys, 4)]);
        let rows = TensorShard::cut(SIZE_4, 0, &fused);
        assert_eq!(rows.rank_spans(2, &[12, 10]), [40..60, 100..110]);
        assert_eq!(rows.rank_shape(2, &[12, 10]), [3, 10]);
        let columns = TensorShard::cut(SIZE_4, 1, &AxisPartition::even(10, 4));
        assert_eq!(columns.rank_spans(0, &[2, 10]), [0..3, 10..13]);
        assert_eq!(columns.rank_spans(3, &[2, 10]), [8..10, 18..20]);
        assert_eq!(TensorShard::whole(SIZE_4).rank_spans(2, &[2, 10]), vec![0..20]);
        assert!(TensorShard::cut(TpRank::ALONE, 1, &AxisPartition::even(10, 1)).is_whole());
    }
}
