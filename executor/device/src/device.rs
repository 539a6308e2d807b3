//! Trait of devices: memory and all operations.

use crate::dtype::Dtype;
use crate::error::Result;
use crate::ops::activation::Activate;
use crate::ops::adamw::Update;
use crate::ops::attention::Attend;
use crate::ops::bias::Biases;
use crate::ops::cross_entropy::CrossEntropy;
use crate::ops::elementwise::Elementwise;
use crate::ops::gather_scatter::GatherScatter;
use crate::ops::gemm::Gemm;
use crate::ops::layer_norm::LayerNorm;
use crate::ops::layer_scale::LayerScale;
use crate::ops::rms_norm::RmsNorm;
use crate::ops::rope::Rotate;
use crate::ops::silu_gate::SiluGate;
use crate::ops::sparse_rows::SparseRows;
use crate::ops::transpose::Transpose;
use crate::ops::vocab_parallel_cross_entropy::VocabParallelCrossEntropy;
use crate::runtime::Runtime;
use crate::tensor::Tensor;

/// Memory and operations of a device.
///
/// Operations are one trait each, next to the functions that compute them on a CPU ([`crate::ops`]); a device
/// implements all of them. Shapes of tensors are documented at the functions of the same name.
pub trait Device:
    Runtime
    + Activate
    + Attend
    + Biases
    + CrossEntropy
    + Elementwise
    + GatherScatter
    + Gemm
    + LayerNorm
    + LayerScale
    + RmsNorm
    + Rotate
    + SiluGate
    + Transpose
    + Update
    + VocabParallelCrossEntropy
{
}

impl<D> Device for D where
    D: Runtime
        + Activate
        + Attend
        + Biases
        + CrossEntropy
        + Elementwise
        + GatherScatter
        + Gemm
        + LayerNorm
        + LayerScale
        + RmsNorm
        + Rotate
        + SiluGate
        + Transpose
        + Update
        + VocabParallelCrossEntropy
{
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
    /// First entry of every written row, then the number of entries.
    pub starts: Tensor<D>,
    /// Read rows.
    pub sources: Tensor<D>,
    /// Weights in `f32`; all 1 if empty.
    pub weights: Tensor<D>,
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
