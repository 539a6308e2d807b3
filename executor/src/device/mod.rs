//! Where stages compute: memory and operations of a device.
//!
//! Models are written against [`Device`] and know no other. A buffer has a type and a length, in elements; shapes live in
//! the caller. Numbers are of the device's own type behind [`Device::Floats`] (on the CPU `f32`), so that a device that
//! stores bf16 needs no other model. Operations are one method each, forward and backward; they may run later, in
//! order, and [`Device::download`] waits for what it needs. Gradients of parameters and inputs are *added* to what is
//! there unless a method says otherwise. Shapes that do not agree are errors of the model's code, and panic; what
//! comes from outside is checked before it gets here.

mod bf16;
mod buffer_pool;
mod cpu;
mod sparse_rows;

pub use bf16::{Bf16Floats, CpuBf16};
pub use buffer_pool::CpuFloats;
pub use cpu::Cpu;
pub use sparse_rows::{DeviceSparseRows, SparseBuffers};

use crate::error::Result;
use crate::ops::activation::Activation;
use crate::ops::adamw::AdamW;
use crate::ops::attention::AttentionShape;
use crate::ops::bias::Columns;
use crate::ops::gemm::{GemmShape, MatrixLayout};
use crate::ops::rope::{RopeShape, Rotation};
use crate::ops::vocab_parallel_cross_entropy::PartialSoftmax;

/// A buffer of a device.
pub trait Buffer: Send + Sync {
    /// Returns the elements.
    fn len(&self) -> usize;

    /// Returns whether there are no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Memory and operations of a device.
///
/// Cheap to clone: clones are the same device. Shapes of buffers are those of [`crate::ops`], where the operation of
/// the same name says them.
pub trait Device: Clone + Send + Sync + 'static {
    /// Numbers: activations, weights, gradients.
    type Floats: Buffer;
    /// Indices.
    type Ints: Buffer;

    /// Takes memory whose contents are not defined.
    fn alloc(&self, len: usize) -> Result<Self::Floats>;
    /// Takes memory filled with zeros.
    fn zeros(&self, len: usize) -> Result<Self::Floats> {
        let mut buffer = self.alloc(len)?;
        self.zero(&mut buffer)?;
        Ok(buffer)
    }
    /// Takes memory filled with zeros that holds `f32` even where the device stores less: sums of gradients, master
    /// weights, means of the optimizer.
    fn zeros_f32(&self, len: usize) -> Result<Self::Floats> {
        self.zeros(len)
    }
    /// Copies numbers to memory of the kind of [`zeros_f32`](Self::zeros_f32).
    fn upload_f32(&self, values: &[f32]) -> Result<Self::Floats> {
        self.upload(values)
    }
    /// Copies numbers to the device.
    fn upload(&self, values: &[f32]) -> Result<Self::Floats>;
    /// Copies indices to the device.
    fn upload_ints(&self, values: &[u32]) -> Result<Self::Ints>;
    /// Copies numbers from the device, once they are computed.
    fn download(&self, buffer: &Self::Floats) -> Result<Vec<f32>>;
    /// Changes numbers on the host, once they are computed: where ranks add them up.
    fn on_host<R>(&self, buffer: &mut Self::Floats, change: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
        let mut values = self.download(buffer)?;
        let result = change(&mut values);
        *buffer = self.upload(&values)?;
        Ok(result)
    }
    /// Bytes of all buffers that are alive.
    fn memory_used_bytes(&self) -> u64;
    /// Runs a closure where operations start without a change of threads.
    fn run<R: Send>(&self, body: impl FnOnce() -> R + Send) -> R;

    /// Fills with zeros.
    fn zero(&self, y: &mut Self::Floats) -> Result<()>;
    /// `y += x`.
    fn add(&self, x: &Self::Floats, y: &mut Self::Floats) -> Result<()>;
    /// `y *= factor`.
    fn scale(&self, factor: f32, y: &mut Self::Floats) -> Result<()>;
    /// Returns the sum of squares.
    fn sum_of_squares(&self, x: &Self::Floats) -> Result<f64>;
    /// `c = a b`, or `c += a b`.
    fn gemm(
        &self,
        shape: GemmShape,
        a: (&Self::Floats, MatrixLayout),
        b: (&Self::Floats, MatrixLayout),
        is_added: bool,
        c: (&mut Self::Floats, MatrixLayout),
    ) -> Result<()>;
    /// Writes the bias into every row of some columns.
    fn bias(&self, bias: &Self::Floats, y: &mut Self::Floats, columns: Columns) -> Result<()>;
    /// Adds the sums over rows of some columns.
    fn bias_backward(&self, dy: &Self::Floats, columns: Columns, d_bias: &mut Self::Floats) -> Result<()>;
    /// Adds `scale x`, a scale for every column.
    fn layer_scale(&self, x: &Self::Floats, scale: &Self::Floats, y: &mut Self::Floats) -> Result<()>;
    /// Writes `dx`, adds `d_scale`.
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
    /// Adds the gradients that are asked for.
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
    /// Adds the gradients that are asked for.
    fn layer_norm_backward(
        &self,
        dy: &Self::Floats,
        x: &Self::Floats,
        weight: &Self::Floats,
        statistics: &Self::Floats,
        dx: Option<&mut Self::Floats>,
        parameters: Option<(&mut Self::Floats, &mut Self::Floats)>,
    ) -> Result<()>;
    /// Turns pairs of columns by the angles of their rows.
    fn rope(
        &self,
        rotation: Rotation,
        shape: RopeShape,
        angles: (&Self::Floats, &Self::Floats),
        x: &mut Self::Floats,
    ) -> Result<()>;
    /// Attention within segments.
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
    /// Applies a function to every element.
    fn activate(&self, activation: Activation, x: &Self::Floats, y: &mut Self::Floats) -> Result<()>;
    /// Turns the gradient of the values into that of `x`.
    fn activate_backward(&self, activation: Activation, x: &Self::Floats, d: &mut Self::Floats)
    -> Result<()>;
    /// `silu(gate) up`.
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
    /// Exchanges the last two axes, `[.., rows, columns]`, and writes or adds.
    fn transpose(
        &self,
        x: &Self::Floats,
        rows: usize,
        columns: usize,
        is_added: bool,
        y: &mut Self::Floats,
    ) -> Result<()>;
    /// Replaces logits by their gradient and returns the sum of losses, once it is computed.
    fn cross_entropy(&self, logits: &mut Self::Floats, targets: &[u32], scale: f64) -> Result<f64>;
    /// Replaces logits of a part of the vocabulary by exponentials, and returns what each row adds up to, once it is
    /// computed.
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
    /// Takes one step of the optimizer; `means` are those of gradients and of their squares.
    fn adamw(
        &self,
        adamw: &AdamW,
        weights: &mut Self::Floats,
        gradients: &Self::Floats,
        means: (&mut Self::Floats, &mut Self::Floats),
    ) -> Result<()>;
}
