//! Sparse matrices in the memory of a device.

use super::Device;
use crate::error::Result;
use crate::ops::sparse_rows::SparseRows;

/// A [`SparseRows`] on a device, with its transpose.
pub struct DeviceSparseRows<D: Device> {
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
    pub fn new(device: &D, matrix: &SparseRows) -> Result<Self> {
        Ok(Self {
            targets: device.upload_ints(&matrix.targets)?,
            starts: device.upload_ints(&matrix.starts)?,
            sources: device.upload_ints(&matrix.sources)?,
            weights: device.upload(&matrix.weights)?,
        })
    }
}

impl SparseRows {
    /// Copies the matrix and its transpose to a device.
    pub fn upload<D: Device>(&self, device: &D) -> Result<DeviceSparseRows<D>> {
        Ok(DeviceSparseRows {
            rows: self.rows,
            forward: SparseBuffers::new(device, self)?,
            backward: SparseBuffers::new(device, &self.transposed())?,
        })
    }
}
