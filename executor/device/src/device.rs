//! Trait of devices: memory and operations.

use crate::error::Result;
use crate::ops::activation::Activation;
use crate::ops::adamw::AdamW;
use crate::ops::attention::AttentionShape;
use crate::ops::bias::Columns;
use crate::ops::gemm::{GemmShape, MatrixLayout};
use crate::ops::rope::{RopeShape, Rotation};
use crate::ops::sparse_rows::SparseRows;
use crate::ops::vocab_parallel_cross_entropy::PartialSoftmax;

/// Buffer of a device.
pub trait Buffer: Send + Sync {
    /// Number of elements.
    fn len(&self) -> usize;

    /// Returns whether the buffer has no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Memory and operations of a device.
///
/// Cheap to clone: clones are the same device. Shapes of buffers are documented at the functions of the same
/// name in [`crate::ops`].
pub trait Device: Clone + Send + Sync + 'static {
    /// Buffers of numbers: activations, weights, gradients.
    type Floats: Buffer;
    /// Buffers of indices.
    type Ints: Buffer;

    /// Allocates memory of unspecified contents.
    fn alloc(&self, len: usize) -> Result<Self::Floats>;
    /// Allocates memory filled with zeros.
    fn zeros(&self, len: usize) -> Result<Self::Floats> {
        let mut buffer = self.alloc(len)?;
        self.zero(&mut buffer)?;
        Ok(buffer)
    }
    /// Allocates zeros stored as `f32` even if the device stores less precise numbers: sums of gradients,
    /// master weights, moments of the optimizer.
    fn zeros_f32(&self, len: usize) -> Result<Self::Floats> {
        self.zeros(len)
    }
    /// Copies numbers to the device, stored as `f32` like [`zeros_f32`](Self::zeros_f32).
    fn upload_f32(&self, values: &[f32]) -> Result<Self::Floats> {
        self.upload(values)
    }
    /// Copies numbers to the device.
    fn upload(&self, values: &[f32]) -> Result<Self::Floats>;
    /// Copies indices to the device.
    fn upload_ints(&self, values: &[u32]) -> Result<Self::Ints>;
    /// Copies numbers from the device, after pending operations on them.
    fn download(&self, buffer: &Self::Floats) -> Result<Vec<f32>>;
    /// Changes numbers on the host, after pending operations on them, for example to sum them over ranks.
    fn on_host<R>(&self, buffer: &mut Self::Floats, change: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
        let mut values = self.download(buffer)?;
        let result = change(&mut values);
        *buffer = self.upload(&values)?;
        Ok(result)
    }
    /// Bytes of all live buffers.
    fn memory_used_bytes(&self) -> u64;
    /// Runs a closure in which operations start without a change of threads.
    fn run<R: Send>(&self, body: impl FnOnce() -> R + Send) -> R;

    /// Fills with zeros.
    fn zero(&self, y: &mut Self::Floats) -> Result<()>;
    /// Adds: `y += x`.
    fn add(&self, x: &Self::Floats, y: &mut Self::Floats) -> Result<()>;
    /// Scales: `y *= factor`.
    fn scale(&self, factor: f32, y: &mut Self::Floats) -> Result<()>;
    /// Returns the sum of squares.
    fn sum_of_squares(&self, x: &Self::Floats) -> Result<f64>;
    /// Multiplies matrices: `c = a b`, or `c += a b`.
    fn gemm(
        &self,
        shape: GemmShape,
        a: (&Self::Floats, MatrixLayout),
        b: (&Self::Floats, MatrixLayout),
        is_added: bool,
        c: (&mut Self::Floats, MatrixLayout),
    ) -> Result<()>;
    /// Writes the bias into every row of a range of columns.
    fn bias(&self, bias: &Self::Floats, y: &mut Self::Floats, columns: Columns) -> Result<()>;
    /// Accumulates the sums over rows of a range of columns.
    fn bias_backward(&self, dy: &Self::Floats, columns: Columns, d_bias: &mut Self::Floats) -> Result<()>;
    /// Adds `scale x`, with one scale per column.
    fn layer_scale(&self, x: &Self::Floats, scale: &Self::Floats, y: &mut Self::Floats) -> Result<()>;
    /// Writes `dx` and accumulates `d_scale`.
    fn layer_scale_backward(
        &self,
        dy: &Self::Floats,
        x: &Self::Floats,
        scale: &Self::Floats,
        dx: &mut Self::Floats,
        d_scale: Option<&mut Self::Floats>,
    ) -> Result<()>;
    /// Normalizes rows by their root mean square.
    fn rms_norm(
        &self,
        x: &Self::Floats,
        weight: &Self::Floats,
        epsilon: f64,
        y: &mut Self::Floats,
        inverse: &mut Self::Floats,
    ) -> Result<()>;
    /// Accumulates the requested gradients.
    fn rms_norm_backward(
        &self,
        dy: &Self::Floats,
        x: &Self::Floats,
        weight: &Self::Floats,
        inverse: &Self::Floats,
        dx: Option<&mut Self::Floats>,
        d_weight: Option<&mut Self::Floats>,
    ) -> Result<()>;
    /// Normalizes rows to mean 0 and variance 1; `parameters` are weight and bias.
    fn layer_norm(
        &self,
        x: &Self::Floats,
        parameters: (&Self::Floats, &Self::Floats),
        epsilon: f64,
        y: &mut Self::Floats,
        statistics: &mut Self::Floats,
    ) -> Result<()>;
    /// Accumulates the requested gradients.
    fn layer_norm_backward(
        &self,
        dy: &Self::Floats,
        x: &Self::Floats,
        weight: &Self::Floats,
        statistics: &Self::Floats,
        dx: Option<&mut Self::Floats>,
        parameters: Option<(&mut Self::Floats, &mut Self::Floats)>,
    ) -> Result<()>;
    /// Rotates pairs of columns by the angles of their rows.
    fn rope(
        &self,
        rotation: Rotation,
        shape: RopeShape,
        angles: (&Self::Floats, &Self::Floats),
        x: &mut Self::Floats,
    ) -> Result<()>;
    /// Computes attention within segments.
    fn attention(
        &self,
        shape: &AttentionShape,
        segments: &[u32],
        qkv: &Self::Floats,
        output: &mut Self::Floats,
        log_sums: &mut Self::Floats,
    ) -> Result<()>;
    /// Returns the gradient of queries, keys and values.
    fn attention_backward(
        &self,
        shape: &AttentionShape,
        segments: &[u32],
        qkv: &Self::Floats,
        output: (&Self::Floats, &Self::Floats),
        d_output: &Self::Floats,
    ) -> Result<Self::Floats>;
    /// Applies an activation function to every element.
    fn activate(&self, activation: Activation, x: &Self::Floats, y: &mut Self::Floats) -> Result<()>;
    /// Turns the gradient of the activations into the gradient of `x`.
    fn activate_backward(&self, activation: Activation, x: &Self::Floats, d: &mut Self::Floats)
    -> Result<()>;
    /// Computes `silu(gate) up`.
    fn silu_gate(&self, gate_up: &Self::Floats, columns: usize, y: &mut Self::Floats) -> Result<()>;
    /// Writes the gradients of gate and up.
    fn silu_gate_backward(
        &self,
        dy: &Self::Floats,
        gate_up: &Self::Floats,
        columns: usize,
        d_gate_up: &mut Self::Floats,
    ) -> Result<()>;
    /// Adds weighted rows of `x` to rows of `y`.
    fn gather_scatter(
        &self,
        matrix: &SparseBuffers<Self>,
        columns: usize,
        x: &Self::Floats,
        y: &mut Self::Floats,
    ) -> Result<()>;
    /// Exchanges the last two axes, `[.., rows, columns]`, and writes or accumulates.
    fn transpose(
        &self,
        x: &Self::Floats,
        rows: usize,
        columns: usize,
        is_added: bool,
        y: &mut Self::Floats,
    ) -> Result<()>;
    /// Replaces logits by their gradient and returns the sum of losses.
    fn cross_entropy(&self, logits: &mut Self::Floats, targets: &[u32], scale: f64) -> Result<f64>;
    /// Replaces the logits of a part of the vocabulary by exponentials, and returns the partial softmax of
    /// each row.
    fn vocab_parallel_cross_entropy(
        &self,
        logits: &mut Self::Floats,
        targets: &[Option<u32>],
    ) -> Result<Vec<PartialSoftmax<f32>>>;
    /// Turns these exponentials into the gradient of the logits.
    fn vocab_parallel_cross_entropy_backward(
        &self,
        exponentials: &mut Self::Floats,
        targets: &[Option<u32>],
        factors: &[f32],
        scale: f64,
    ) -> Result<()>;
    /// Takes one optimizer step; `means` are the first and second moments of the gradients.
    fn adamw(
        &self,
        adamw: &AdamW,
        weights: &mut Self::Floats,
        gradients: &Self::Floats,
        means: (&mut Self::Floats, &mut Self::Floats),
    ) -> Result<()>;
}

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
