//! Sparse matrices that select and weight rows, for [`crate::ops::gather_scatter`].
//!
//! Created on the host from microbatch properties that every rank knows: token ids, grids, lengths. Row
//! entries have a fixed order, and therefore a fixed summation order.

use std::ops::Range;

use super::argument::{Argument, Operands, Places, Queues};
use crate::error::Result;
use crate::runtime::{Dtype, Runtime, Tensor};

/// Sparse matrix `[targets, sources]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SparseRows {
    pub(crate) targets: Vec<u32>,
    pub(crate) starts: Vec<u32>,
    pub(crate) sources: Vec<u32>,
    /// Entry weights; all 1 if empty.
    pub(crate) weights: Vec<f32>,
    pub(crate) rows: usize,
}

impl SparseRows {
    /// Creates a matrix in which every target is a copy of a source, or zeros for `None`.
    #[must_use]
    pub fn gather(sources: impl IntoIterator<Item = Option<u32>>) -> Self {
        let mut matrix = Self { starts: vec![0], ..Self::default() };
        for (target, source) in (0..).zip(sources) {
            if let Some(source) = source {
                matrix.targets.push(target);
                matrix.sources.push(source);
                matrix.starts.push(matrix.sources.len() as u32);
            }
            matrix.rows += 1;
        }
        matrix
    }

    /// Creates a matrix in which every target is a weighted sum of sources.
    #[must_use]
    pub fn weighted<R: IntoIterator<Item = (u32, f32)>>(targets: impl IntoIterator<Item = R>) -> Self {
        let mut matrix = Self { starts: vec![0], ..Self::default() };
        for (target, sources) in (0..).zip(targets) {
            let before = matrix.sources.len();
            for (source, weight) in sources {
                matrix.sources.push(source);
                matrix.weights.push(weight);
            }
            if matrix.sources.len() > before {
                matrix.targets.push(target);
                matrix.starts.push(matrix.sources.len() as u32);
            }
            matrix.rows += 1;
        }
        matrix
    }

    /// Returns the number of targets, including zero rows.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Restricts the matrix to a source range, renumbered from the range start; targets stay unchanged.
    #[must_use]
    pub fn within(&self, sources: &Range<usize>) -> Self {
        let mut matrix = Self { starts: vec![0], rows: self.rows, ..Self::default() };
        for (index, &target) in self.targets.iter().enumerate() {
            for entry in self.starts[index] as usize..self.starts[index + 1] as usize {
                if sources.contains(&(self.sources[entry] as usize)) {
                    matrix.sources.push(self.sources[entry] - sources.start as u32);
                    matrix.weights.extend(self.weights.get(entry));
                }
            }
            if matrix.sources.len() > matrix.starts.last().map_or(0, |&start| start as usize) {
                matrix.targets.push(target);
                matrix.starts.push(matrix.sources.len() as u32);
            }
        }
        matrix
    }

    /// Transposes the matrix: sources become targets, with entries in target order.
    #[must_use]
    pub fn transposed(&self) -> Self {
        let mut entries: Vec<(u32, u32, f32)> = Vec::with_capacity(self.sources.len());
        for (index, &target) in self.targets.iter().enumerate() {
            for entry in self.starts[index] as usize..self.starts[index + 1] as usize {
                entries.push((self.sources[entry], target, self.weights.get(entry).copied().unwrap_or(1.0)));
            }
        }
        // a fixed order within each row, so that gradients have one summation order
        entries.sort_by_key(|&(source, target, _)| (source, target));
        let mut matrix = Self { starts: vec![0], ..Self::default() };
        for (source, target, weight) in entries {
            // the row continues: its end moves
            if matrix.targets.last() == Some(&source) {
                matrix.starts.pop();
            } else {
                matrix.targets.push(source);
            }
            matrix.sources.push(target);
            if !self.weights.is_empty() {
                matrix.weights.push(weight);
            }
            matrix.starts.push(matrix.sources.len() as u32);
        }
        matrix.rows = matrix.targets.last().map_or(0, |&last| last as usize + 1);
        matrix
    }
}

/// Sparse matrix on a device, with its transpose.
pub struct DeviceSparseRows<D: Runtime> {
    /// Number of targets.
    pub rows: usize,
    /// Matrix for the forward pass.
    pub forward: SparseBuffers<D>,
    /// Transpose, for the backward pass.
    pub backward: SparseBuffers<D>,
}

/// Arrays of a sparse matrix on a device.
pub struct SparseBuffers<D: Runtime> {
    /// Written rows, ascending.
    pub targets: Tensor<D>,
    /// First entry for every written row, then the number of entries.
    pub starts: Tensor<D>,
    /// Read rows.
    pub sources: Tensor<D>,
    /// Weights in `f32`; all 1 if empty.
    pub weights: Tensor<D>,
}

/// The queued work receives copies of the arrays.
impl<Q: Queues> Argument<Q> for &SparseBuffers<Q> {
    type Kept = ();
    type Opened<'a> = SparseBuffers<Q::Inner>;
    type Inner<'a> = &'a SparseBuffers<Q::Inner>;

    fn keep(self, places: &mut Places<Q>) {
        let SparseBuffers { targets, starts, sources, weights } = self;
        for array in [targets, starts, sources, weights] {
            places.read(array);
        }
    }

    fn open<'a>((): (), operands: &mut Operands<'a, Q::Inner>) -> Result<Self::Opened<'a>> {
        let mut copy = || {
            let array = operands.read();
            let mut copy = operands.inner.alloc_as(array.dtype(), array.len())?;
            Q::overwrite(operands.inner, array, &mut copy).map(|()| copy)
        };
        Ok(SparseBuffers { targets: copy()?, starts: copy()?, sources: copy()?, weights: copy()? })
    }

    fn lend<'b, 'a: 'b>(opened: &'b mut Self::Opened<'a>) -> Self::Inner<'b> {
        opened
    }
}

impl<D: Runtime> SparseBuffers<D> {
    /// Copies a matrix to a device.
    pub fn new(device: &D, matrix: &SparseRows) -> Result<Self> {
        Ok(Self {
            targets: device.upload_indices(&matrix.targets)?,
            starts: device.upload_indices(&matrix.starts)?,
            sources: device.upload_indices(&matrix.sources)?,
            weights: device.upload_as(Dtype::F32, &matrix.weights)?,
        })
    }
}

impl SparseRows {
    /// Copies the matrix and its transpose to a device.
    pub fn upload<D: Runtime>(&self, device: &D) -> Result<DeviceSparseRows<D>> {
        Ok(DeviceSparseRows {
            rows: self.rows,
            forward: SparseBuffers::new(device, self)?,
            backward: SparseBuffers::new(device, &self.transposed())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_sources_are_columns_of_the_matrix() {
        let matrix = SparseRows::weighted([vec![(3, 0.5), (4, 0.25)], vec![], vec![(0, 2.0), (3, 1.0)]]);
        assert_eq!(matrix.within(&(0..5)), matrix);
        let truth = SparseRows::weighted([vec![(0, 0.5), (1, 0.25)], vec![], vec![(0, 1.0)]]);
        assert_eq!(matrix.within(&(3..5)), truth);
        let truth = SparseRows { rows: 3, ..SparseRows::weighted([vec![], vec![], vec![(0, 2.0)]]) };
        assert_eq!(matrix.within(&(0..3)), truth);
        let gather = SparseRows::gather([Some(2), None, Some(2), Some(0)]);
        assert_eq!(gather.within(&(1..3)), SparseRows::gather([Some(1), None, Some(1), None]));
    }

    #[test]
    fn the_transpose_of_the_transpose_is_the_matrix() {
        let matrix = SparseRows::weighted([vec![(3, 0.5), (4, 0.25)], vec![], vec![(0, 2.0), (3, 1.0)]]);
        assert_eq!(matrix.rows(), 3);
        let transposed = matrix.transposed();
        assert_eq!((&transposed.targets[..], &transposed.starts[..]), (&[0, 3, 4][..], &[0, 1, 3, 4][..]));
        assert_eq!(
            (&transposed.sources[..], &transposed.weights[..]),
            (&[2, 0, 2, 0][..], &[2.0, 0.5, 1.0, 0.25][..])
        );
        assert_eq!(transposed.transposed(), matrix);
        let gather = SparseRows::gather([Some(2), None, Some(2)]);
        assert_eq!((&gather.targets[..], gather.rows()), (&[0, 2][..], 3));
        assert_eq!(gather.transposed().transposed(), gather);
    }
}
