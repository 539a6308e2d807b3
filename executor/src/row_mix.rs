//! Sparse matrices that turn rows into other rows: what [`crate::ops::mix_rows`] multiplies with.
//!
//! Made on the host from what every rank knows of a microbatch: token ids, grids, lengths. The transposed matrix, for the
//! gradient, is made with it; entries of a row stand in a fixed order, so sums do.

use std::ops::Range;

use crate::device::Device;
use crate::error::Result;

/// A sparse matrix `[targets, sources]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RowMix {
    targets: Vec<u32>,
    starts: Vec<u32>,
    sources: Vec<u32>,
    /// All 1 if empty.
    weights: Vec<f32>,
    rows: usize,
}

impl RowMix {
    /// Makes every target a copy of a source; `None` is a row of zeros.
    #[must_use]
    pub fn gather(sources: impl IntoIterator<Item = Option<u32>>) -> Self {
        let mut mix = Self { starts: vec![0], ..Self::default() };
        for (target, source) in (0..).zip(sources) {
            if let Some(source) = source {
                mix.targets.push(target);
                mix.sources.push(source);
                mix.starts.push(mix.sources.len() as u32);
            }
            mix.rows += 1;
        }
        mix
    }

    /// Makes every target a weighted sum of sources.
    #[must_use]
    pub fn weighted<R: IntoIterator<Item = (u32, f32)>>(targets: impl IntoIterator<Item = R>) -> Self {
        let mut mix = Self { starts: vec![0], ..Self::default() };
        for (target, sources) in (0..).zip(targets) {
            let before = mix.sources.len();
            for (source, weight) in sources {
                mix.sources.push(source);
                mix.weights.push(weight);
            }
            if mix.sources.len() > before {
                mix.targets.push(target);
                mix.starts.push(mix.sources.len() as u32);
            }
            mix.rows += 1;
        }
        mix
    }

    /// Returns the number of targets, rows of zeros among them.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the matrix on some of the sources alone, counted from the first of them; targets stay what they are.
    #[must_use]
    pub fn within(&self, sources: &Range<usize>) -> Self {
        let mut mix = Self { starts: vec![0], rows: self.rows, ..Self::default() };
        for (index, &target) in self.targets.iter().enumerate() {
            for entry in self.starts[index] as usize..self.starts[index + 1] as usize {
                if sources.contains(&(self.sources[entry] as usize)) {
                    mix.sources.push(self.sources[entry] - sources.start as u32);
                    mix.weights.extend(self.weights.get(entry));
                }
            }
            if mix.sources.len() > mix.starts.last().map_or(0, |&start| start as usize) {
                mix.targets.push(target);
                mix.starts.push(mix.sources.len() as u32);
            }
        }
        mix
    }

    /// Returns the transposed matrix: sources become targets, entries of each in the order of their targets.
    #[must_use]
    pub fn transposed(&self) -> Self {
        let mut entries: Vec<(u32, u32, f32)> = Vec::with_capacity(self.sources.len());
        for (index, &target) in self.targets.iter().enumerate() {
            for entry in self.starts[index] as usize..self.starts[index + 1] as usize {
                entries.push((self.sources[entry], target, self.weights.get(entry).copied().unwrap_or(1.0)));
            }
        }
        entries.sort_by_key(|&(source, target, _)| (source, target));
        let mut mix = Self { starts: vec![0], ..Self::default() };
        for (source, target, weight) in entries {
            if mix.targets.last() == Some(&source) {
                mix.starts.pop();
            } else {
                mix.targets.push(source);
            }
            mix.sources.push(target);
            if !self.weights.is_empty() {
                mix.weights.push(weight);
            }
            mix.starts.push(mix.sources.len() as u32);
        }
        mix.rows = mix.targets.last().map_or(0, |&last| last as usize + 1);
        mix
    }

    /// Copies the matrix and its transpose to a device.
    pub fn upload<D: Device>(&self, device: &D) -> Result<DeviceMix<D>> {
        Ok(DeviceMix {
            rows: self.rows,
            forward: SparseBuffers::new(device, self)?,
            backward: SparseBuffers::new(device, &self.transposed())?,
        })
    }
}

/// A [`RowMix`] on a device, with its transpose.
pub struct DeviceMix<D: Device> {
    /// Targets.
    pub rows: usize,
    /// The matrix.
    pub forward: SparseBuffers<D>,
    /// Its transpose.
    pub backward: SparseBuffers<D>,
}

/// The arrays of a sparse matrix on a device.
pub struct SparseBuffers<D: Device> {
    /// Rows that are written, ascending.
    pub targets: D::Ints,
    /// First entry of every written row, then the number of entries.
    pub starts: D::Ints,
    /// Rows that are read.
    pub sources: D::Ints,
    /// Weights; all 1 if empty.
    pub weights: D::Floats,
}

impl<D: Device> SparseBuffers<D> {
    /// Copies a matrix to a device.
    pub fn new(device: &D, mix: &RowMix) -> Result<Self> {
        Ok(Self {
            targets: device.upload_ints(&mix.targets)?,
            starts: device.upload_ints(&mix.starts)?,
            sources: device.upload_ints(&mix.sources)?,
            weights: device.upload(&mix.weights)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_the_sources_are_the_matrix_cut_by_columns() {
        let mix = RowMix::weighted([vec![(3, 0.5), (4, 0.25)], vec![], vec![(0, 2.0), (3, 1.0)]]);
        assert_eq!(mix.within(&(0..5)), mix);
        let truth = RowMix::weighted([vec![(0, 0.5), (1, 0.25)], vec![], vec![(0, 1.0)]]);
        assert_eq!(mix.within(&(3..5)), truth);
        let truth = RowMix { rows: 3, ..RowMix::weighted([vec![], vec![], vec![(0, 2.0)]]) };
        assert_eq!(mix.within(&(0..3)), truth);
        let gather = RowMix::gather([Some(2), None, Some(2), Some(0)]);
        assert_eq!(gather.within(&(1..3)), RowMix::gather([Some(1), None, Some(1), None]));
    }

    #[test]
    fn the_transpose_of_the_transpose_is_the_matrix() {
        let mix = RowMix::weighted([vec![(3, 0.5), (4, 0.25)], vec![], vec![(0, 2.0), (3, 1.0)]]);
        assert_eq!(mix.rows(), 3);
        let transposed = mix.transposed();
        assert_eq!((&transposed.targets[..], &transposed.starts[..]), (&[0, 3, 4][..], &[0, 1, 3, 4][..]));
        assert_eq!(
            (&transposed.sources[..], &transposed.weights[..]),
            (&[2, 0, 2, 0][..], &[2.0, 0.5, 1.0, 0.25][..])
        );
        assert_eq!(transposed.transposed(), mix);
        let gather = RowMix::gather([Some(2), None, Some(2)]);
        assert_eq!((&gather.targets[..], gather.rows()), (&[0, 2][..], 3));
        assert_eq!(gather.transposed().transposed(), gather);
    }
}
