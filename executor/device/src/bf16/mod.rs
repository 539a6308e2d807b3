//! CPU device that stores bf16 and computes in `f32`.
//!
//! Weights and activations take 2 bytes per number. An operation widens its operands, computes as [`Cpu`]
//! does, and rounds the numbers it stores to the nearest bf16, ties to even, so each operation gives the
//! rounded result of [`Cpu`]. Numbers that need more precision stay `f32`: sums of gradients and the state of
//! the optimizer ([`Device::zeros_f32`]), statistics of norms, and the log-sum-exp of attention.
//!
//! Widened operands live as long as the operation: this device saves memory, not time.

mod storage;

use half::bf16;

pub use storage::Bf16Floats;
use storage::Storage;

use crate::cpu::Cpu;
use crate::device::{Device, SparseBuffers};
use crate::error::Result;
use crate::ops;
use crate::ops::activation::Activation;
use crate::ops::adamw::AdamW;
use crate::ops::attention::AttentionShape;
use crate::ops::bias::Columns;
use crate::ops::gather_scatter::SparseView;
use crate::ops::gemm::{GemmShape, MatrixLayout};
use crate::ops::rope::{RopeShape, Rotation};
use crate::ops::vocab_parallel_cross_entropy::PartialSoftmax;

/// Stores bf16, computes in `f32` on threads of this process.
#[derive(Debug, Clone)]
pub struct CpuBf16 {
    cpu: Cpu,
}

impl CpuBf16 {
    /// Makes a device with this number of threads, at least one.
    ///
    /// # Errors
    /// [`crate::Error::Threads`] if they cannot be started.
    pub fn new(threads: usize) -> Result<Self> {
        Ok(Self::on(Cpu::new(threads)?))
    }

    /// Makes a device that computes on the threads of `cpu`, within its limit of memory.
    #[must_use]
    pub fn on(cpu: Cpu) -> Self {
        Self { cpu }
    }

    /// Number of computing threads.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.cpu.threads()
    }
}

impl Device for CpuBf16 {
    type Floats = Bf16Floats;
    type Ints = Vec<u32>;

    fn alloc(&self, len: usize) -> Result<Bf16Floats> {
        Ok(Bf16Floats(Storage::Bf16(self.halves(len)?)))
    }

    fn zeros_f32(&self, len: usize) -> Result<Bf16Floats> {
        Ok(Bf16Floats(Storage::F32(self.cpu.zeros_f32(len)?)))
    }

    fn upload_f32(&self, values: &[f32]) -> Result<Bf16Floats> {
        Ok(Bf16Floats(Storage::F32(self.cpu.upload(values)?)))
    }

    fn upload(&self, values: &[f32]) -> Result<Bf16Floats> {
        self.store(values)
    }

    fn upload_ints(&self, values: &[u32]) -> Result<Vec<u32>> {
        self.cpu.upload_ints(values)
    }

    fn download(&self, buffer: &Bf16Floats) -> Result<Vec<f32>> {
        let full = self.read(buffer)?;
        self.cpu.download(&full)
    }

    fn on_host<R>(&self, buffer: &mut Bf16Floats, change: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
        self.update(buffer, |buffer| self.cpu.on_host(buffer, change))
    }

    fn memory_used_bytes(&self) -> u64 {
        self.cpu.memory_used_bytes()
    }

    fn run<R: Send>(&self, body: impl FnOnce() -> R + Send) -> R {
        self.cpu.run(body)
    }

    fn zero(&self, y: &mut Bf16Floats) -> Result<()> {
        match &mut y.0 {
            Storage::F32(full) => self.cpu.zero(full),
            Storage::Bf16(halves) => {
                halves.values.fill(bf16::ZERO);
                Ok(())
            }
        }
    }

    fn add(&self, x: &Bf16Floats, y: &mut Bf16Floats) -> Result<()> {
        let x = self.read(x)?;
        self.update(y, |y| self.cpu.add(&x, y))
    }

    fn scale(&self, factor: f32, y: &mut Bf16Floats) -> Result<()> {
        self.update(y, |y| self.cpu.scale(factor, y))
    }

    fn sum_of_squares(&self, x: &Bf16Floats) -> Result<f64> {
        let x = self.read(x)?;
        self.cpu.sum_of_squares(&x)
    }

    fn gemm(
        &self,
        shape: GemmShape,
        (a, a_layout): (&Bf16Floats, MatrixLayout),
        (b, b_layout): (&Bf16Floats, MatrixLayout),
        is_added: bool,
        (c, c_layout): (&mut Bf16Floats, MatrixLayout),
    ) -> Result<()> {
        let (a, b) = (self.read(a)?, self.read(b)?);
        self.update(c, |c| self.cpu.gemm(shape, (&a, a_layout), (&b, b_layout), is_added, (c, c_layout)))
    }

    fn bias(&self, bias: &Bf16Floats, y: &mut Bf16Floats, columns: Columns) -> Result<()> {
        let bias = self.read(bias)?;
        self.update(y, |y| self.cpu.bias(&bias, y, columns))
    }

    fn bias_backward(&self, dy: &Bf16Floats, columns: Columns, d_bias: &mut Bf16Floats) -> Result<()> {
        let dy = self.read(dy)?;
        self.update(d_bias, |d_bias| self.cpu.bias_backward(&dy, columns, d_bias))
    }

    fn layer_scale(&self, x: &Bf16Floats, scale: &Bf16Floats, y: &mut Bf16Floats) -> Result<()> {
        let (x, scale) = (self.read(x)?, self.read(scale)?);
        self.update(y, |y| self.cpu.layer_scale(&x, &scale, y))
    }

    fn layer_scale_backward(
        &self,
        dy: &Bf16Floats,
        x: &Bf16Floats,
        scale: &Bf16Floats,
        dx: &mut Bf16Floats,
        d_scale: Option<&mut Bf16Floats>,
    ) -> Result<()> {
        let (dy, x, scale) = (self.read(dy)?, self.read(x)?, self.read(scale)?);
        self.update(dx, |dx| {
            self.update_if(d_scale, |d_scale| self.cpu.layer_scale_backward(&dy, &x, &scale, dx, d_scale))
        })
    }

    fn rms_norm(
        &self,
        x: &Bf16Floats,
        weight: &Bf16Floats,
        epsilon: f64,
        y: &mut Bf16Floats,
        inverse: &mut Bf16Floats,
    ) -> Result<()> {
        let (x, weight, inverse) = (self.read(x)?, self.read(weight)?, self.exact(inverse)?);
        self.update(y, |y| self.cpu.rms_norm(&x, &weight, epsilon, y, inverse))
    }

    fn rms_norm_backward(
        &self,
        dy: &Bf16Floats,
        x: &Bf16Floats,
        weight: &Bf16Floats,
        inverse: &Bf16Floats,
        dx: Option<&mut Bf16Floats>,
        d_weight: Option<&mut Bf16Floats>,
    ) -> Result<()> {
        let (dy, x) = (self.read(dy)?, self.read(x)?);
        let (weight, inverse) = (self.read(weight)?, self.read(inverse)?);
        self.update_if(dx, |dx| {
            self.update_if(d_weight, |d_weight| {
                self.cpu.rms_norm_backward(&dy, &x, &weight, &inverse, dx, d_weight)
            })
        })
    }

    fn layer_norm(
        &self,
        x: &Bf16Floats,
        (weight, bias): (&Bf16Floats, &Bf16Floats),
        epsilon: f64,
        y: &mut Bf16Floats,
        statistics: &mut Bf16Floats,
    ) -> Result<()> {
        let (x, weight, bias) = (self.read(x)?, self.read(weight)?, self.read(bias)?);
        let statistics = self.exact(statistics)?;
        self.update(y, |y| self.cpu.layer_norm(&x, (&weight, &bias), epsilon, y, statistics))
    }

    fn layer_norm_backward(
        &self,
        dy: &Bf16Floats,
        x: &Bf16Floats,
        weight: &Bf16Floats,
        statistics: &Bf16Floats,
        dx: Option<&mut Bf16Floats>,
        parameters: Option<(&mut Bf16Floats, &mut Bf16Floats)>,
    ) -> Result<()> {
        let (dy, x) = (self.read(dy)?, self.read(x)?);
        let (weight, statistics) = (self.read(weight)?, self.read(statistics)?);
        let (d_weight, d_bias) = parameters.unzip();
        self.update_if(dx, |dx| {
            self.update_if(d_weight, |d_weight| {
                self.update_if(d_bias, |d_bias| {
                    let parameters = d_weight.zip(d_bias);
                    self.cpu.layer_norm_backward(&dy, &x, &weight, &statistics, dx, parameters)
                })
            })
        })
    }

    fn rope(
        &self,
        rotation: Rotation,
        shape: RopeShape,
        (cos, sin): (&Bf16Floats, &Bf16Floats),
        x: &mut Bf16Floats,
    ) -> Result<()> {
        let (cos, sin) = (self.read(cos)?, self.read(sin)?);
        self.update(x, |x| self.cpu.rope(rotation, shape, (&cos, &sin), x))
    }

    fn attention(
        &self,
        shape: &AttentionShape,
        segments: &[u32],
        qkv: &Bf16Floats,
        output: &mut Bf16Floats,
        log_sums: &mut Bf16Floats,
    ) -> Result<()> {
        let (qkv, log_sums) = (self.read(qkv)?, self.exact(log_sums)?);
        self.update(output, |output| self.cpu.attention(shape, segments, &qkv, output, log_sums))
    }

    fn attention_backward(
        &self,
        shape: &AttentionShape,
        segments: &[u32],
        qkv: &Bf16Floats,
        (output, log_sums): (&Bf16Floats, &Bf16Floats),
        d_output: &Bf16Floats,
    ) -> Result<Bf16Floats> {
        let (qkv, output) = (self.read(qkv)?, self.read(output)?);
        let (log_sums, d_output) = (self.read(log_sums)?, self.read(d_output)?);
        let forward = (&*output, &*log_sums);
        self.store(&self.cpu.attention_backward(shape, segments, &qkv, forward, &d_output)?)
    }

    fn activate(&self, activation: Activation, x: &Bf16Floats, y: &mut Bf16Floats) -> Result<()> {
        let x = self.read(x)?;
        self.update(y, |y| self.cpu.activate(activation, &x, y))
    }

    fn activate_backward(&self, activation: Activation, x: &Bf16Floats, d: &mut Bf16Floats) -> Result<()> {
        let x = self.read(x)?;
        self.update(d, |d| self.cpu.activate_backward(activation, &x, d))
    }

    fn silu_gate(&self, gate_up: &Bf16Floats, columns: usize, y: &mut Bf16Floats) -> Result<()> {
        let gate_up = self.read(gate_up)?;
        self.update(y, |y| self.cpu.silu_gate(&gate_up, columns, y))
    }

    fn silu_gate_backward(
        &self,
        dy: &Bf16Floats,
        gate_up: &Bf16Floats,
        columns: usize,
        d_gate_up: &mut Bf16Floats,
    ) -> Result<()> {
        let (dy, gate_up) = (self.read(dy)?, self.read(gate_up)?);
        self.update(d_gate_up, |d_gate_up| self.cpu.silu_gate_backward(&dy, &gate_up, columns, d_gate_up))
    }

    fn gather_scatter(
        &self,
        matrix: &SparseBuffers<Self>,
        columns: usize,
        x: &Bf16Floats,
        y: &mut Bf16Floats,
    ) -> Result<()> {
        let SparseBuffers { targets, starts, sources, weights } = matrix;
        let (weights, x) = (self.read(weights)?, self.read(x)?);
        let matrix = SparseView { targets, starts, sources, weights: &weights };
        self.update(y, |y| {
            self.cpu.run(|| ops::gather_scatter::add(matrix, columns, &x, y));
            Ok(())
        })
    }

    fn transpose(
        &self,
        x: &Bf16Floats,
        rows: usize,
        columns: usize,
        is_added: bool,
        y: &mut Bf16Floats,
    ) -> Result<()> {
        let x = self.read(x)?;
        self.update(y, |y| self.cpu.transpose(&x, rows, columns, is_added, y))
    }

    fn cross_entropy(&self, logits: &mut Bf16Floats, targets: &[u32], scale: f64) -> Result<f64> {
        self.update(logits, |logits| self.cpu.cross_entropy(logits, targets, scale))
    }

    fn vocab_parallel_cross_entropy(
        &self,
        logits: &mut Bf16Floats,
        targets: &[Option<u32>],
    ) -> Result<Vec<PartialSoftmax<f32>>> {
        self.update(logits, |logits| self.cpu.vocab_parallel_cross_entropy(logits, targets))
    }

    fn vocab_parallel_cross_entropy_backward(
        &self,
        exponentials: &mut Bf16Floats,
        targets: &[Option<u32>],
        factors: &[f32],
        scale: f64,
    ) -> Result<()> {
        self.update(exponentials, |exponentials| {
            self.cpu.vocab_parallel_cross_entropy_backward(exponentials, targets, factors, scale)
        })
    }

    fn adamw(
        &self,
        adamw: &AdamW,
        weights: &mut Bf16Floats,
        gradients: &Bf16Floats,
        (mean, square): (&mut Bf16Floats, &mut Bf16Floats),
    ) -> Result<()> {
        // moments and master weights are `f32` already: `update` converts only what is stored as bf16
        let gradients = self.read(gradients)?;
        self.update(weights, |weights| {
            self.update(mean, |mean| {
                self.update(square, |square| self.cpu.adamw(adamw, weights, &gradients, (mean, square)))
            })
        })
    }
}

#[cfg(test)]
mod tests;
