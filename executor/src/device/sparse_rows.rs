//! Sparse matrices in the memory of a device.

use super::Device;
use crate::error::Result;
use crate::ops::sparse_rows::SparseRows;

/// Sparse matrix on a device, with its transpose.
pub struct DeviceSparseRows<D: Device> {
    /// Number of targets.
    pub rows: usize,
    /// Matrix for the forward pass.
    pub forward: SparseBuffers<D>,
    /// Transpose, for the backward pass.
    pub backward: SparseBuffers<D>,
}

/// Arrays of a sparse matrix on a device.
pub struct SparseBuffers<D: Device> {
    /// Written rows, ascending.
    pub targets: D::Ints,
    /// First entry of every written row, then the number of entries.
    pub starts: D::Ints,
    /// Read rows.
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
