//! CPU device: runs the functions of [`crate::ops`] on its own thread pool.

use std::sync::Arc;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::buffer_pool::{BufferPool, CpuFloats};
use crate::device::{Buffer, Device, SparseBuffers};
use crate::error::{Error, Result};
use crate::ops;
use crate::ops::activation::Activation;
use crate::ops::adamw::AdamW;
use crate::ops::attention::AttentionShape;
use crate::ops::bias::Columns;
use crate::ops::gather_scatter::SparseView;
use crate::ops::gemm::gemm;
use crate::ops::gemm::{GemmShape, MatrixLayout};
use crate::ops::rope::{RopeShape, Rotation};
use crate::ops::vocab_parallel_cross_entropy::PartialSoftmax;

/// Computes in `f32` on threads of this process.
///
/// Results are bit-equal for any number of threads: the order of sums depends on shapes alone. Machines with
/// other vector instructions may round matrix products differently.
#[derive(Debug, Clone)]
pub struct Cpu {
    pool: Arc<ThreadPool>,
    buffers: Arc<BufferPool>,
}

impl Cpu {
    /// Largest number of threads of a device, above that of any machine.
    pub const THREADS_MAX: usize = 1024;

    /// Makes a device with this number of threads, at least one and at most
    /// [`THREADS_MAX`](Self::THREADS_MAX).
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] above that number, [`Error::Threads`] if they cannot be started.
    pub fn new(threads: usize) -> Result<Self> {
        if threads > Self::THREADS_MAX {
            let reason = format!("expected at most {}, found {threads}", Self::THREADS_MAX);
            return Err(Error::InvalidSetting { setting: "threads", reason });
        }
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(|index| format!("dflop-compute-{index}"))
            .build()?;
        Ok(Self { pool: Arc::new(pool), buffers: Arc::default() })
    }

    /// Sets the limit on used bytes, for all clones of this device; allocations beyond it fail with
    /// [`Error::OutOfMemory`]. Default: no limit.
    #[must_use]
    pub fn memory_limit(self, bytes: u64) -> Self {
        self.buffers.limit(bytes);
        self
    }

    /// Returns the pool of the buffers, whose limit is that of the device.
    pub(crate) fn pool_of_buffers(&self) -> &Arc<BufferPool> {
        &self.buffers
    }

    /// Number of computing threads.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Runs on the thread pool; inside [`Device::run`] this is a plain call.
    fn on_pool<R: Send>(&self, body: impl FnOnce() -> R + Send) -> R {
        self.pool.install(body)
    }
}

impl Device for Cpu {
    type Floats = CpuFloats;
    type Ints = Vec<u32>;

    fn alloc(&self, len: usize) -> Result<CpuFloats> {
        self.buffers.take(len)
    }

    fn zeros_f32(&self, len: usize) -> Result<CpuFloats> {
        // gradients and optimizer state stay for the whole run: do not hold a longer buffer
        let mut buffer = self.buffers.take_exact(len)?;
        self.zero(&mut buffer)?;
        Ok(buffer)
    }

    fn upload(&self, values: &[f32]) -> Result<CpuFloats> {
        let mut buffer = self.buffers.take_exact(values.len())?;
        buffer.copy_from_slice(values);
        Ok(buffer)
    }

    fn upload_ints(&self, values: &[u32]) -> Result<Vec<u32>> {
        Ok(values.to_vec())
    }

    fn download(&self, buffer: &CpuFloats) -> Result<Vec<f32>> {
        Ok(buffer.to_vec())
    }

    fn on_host<R>(&self, buffer: &mut CpuFloats, change: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
        Ok(change(buffer))
    }

    fn memory_used_bytes(&self) -> u64 {
        self.buffers.used_bytes()
    }

    fn run<R: Send>(&self, body: impl FnOnce() -> R + Send) -> R {
        self.on_pool(body)
    }

    fn zero(&self, y: &mut CpuFloats) -> Result<()> {
        self.on_pool(|| ops::elementwise::zero(y));
        Ok(())
    }

    fn add(&self, x: &CpuFloats, y: &mut CpuFloats) -> Result<()> {
        self.on_pool(|| ops::elementwise::add(x, y));
        Ok(())
    }

    fn scale(&self, factor: f32, y: &mut CpuFloats) -> Result<()> {
        self.on_pool(|| ops::elementwise::scale(factor, y));
        Ok(())
    }

    fn sum_of_squares(&self, x: &CpuFloats) -> Result<f64> {
        Ok(self.on_pool(|| ops::elementwise::sum_of_squares(x)))
    }

    fn gemm(
        &self,
        shape: GemmShape,
        (a, a_layout): (&CpuFloats, MatrixLayout),
        (b, b_layout): (&CpuFloats, MatrixLayout),
        is_added: bool,
        (c, c_layout): (&mut CpuFloats, MatrixLayout),
    ) -> Result<()> {
        // `gemm` computes `keep * c + a b`, and does not read `c` if `keep` is 0
        let keep = if is_added { 1.0 } else { 0.0 };
        let threads = self.threads();
        self.on_pool(|| gemm(threads, shape, 1.0, (a, a_layout), (b, b_layout), keep, (c, c_layout)));
        Ok(())
    }

    fn bias(&self, bias: &CpuFloats, y: &mut CpuFloats, columns: Columns) -> Result<()> {
        self.on_pool(|| ops::bias::fill(bias, y, columns));
        Ok(())
    }

    fn bias_backward(&self, dy: &CpuFloats, columns: Columns, d_bias: &mut CpuFloats) -> Result<()> {
        self.on_pool(|| ops::bias::backward(dy, columns, d_bias));
        Ok(())
    }

    fn layer_scale(&self, x: &CpuFloats, scale: &CpuFloats, y: &mut CpuFloats) -> Result<()> {
        self.on_pool(|| ops::layer_scale::forward(x, scale, y));
        Ok(())
    }

    fn layer_scale_backward(
        &self,
        dy: &CpuFloats,
        x: &CpuFloats,
        scale: &CpuFloats,
        dx: &mut CpuFloats,
        d_scale: Option<&mut CpuFloats>,
    ) -> Result<()> {
        let d_scale = d_scale.map(|d_scale| &mut **d_scale);
        self.on_pool(|| ops::layer_scale::backward(dy, x, scale, dx, d_scale));
        Ok(())
    }

    fn rms_norm(
        &self,
        x: &CpuFloats,
        weight: &CpuFloats,
        epsilon: f64,
        y: &mut CpuFloats,
        inverse: &mut CpuFloats,
    ) -> Result<()> {
        self.on_pool(|| ops::rms_norm::forward(x, weight, epsilon, y, inverse));
        Ok(())
    }

    fn rms_norm_backward(
        &self,
        dy: &CpuFloats,
        x: &CpuFloats,
        weight: &CpuFloats,
        inverse: &CpuFloats,
        dx: Option<&mut CpuFloats>,
        d_weight: Option<&mut CpuFloats>,
    ) -> Result<()> {
        let (dx, d_weight) = (dx.map(|dx| &mut **dx), d_weight.map(|d_weight| &mut **d_weight));
        self.on_pool(|| ops::rms_norm::backward(dy, x, weight, inverse, dx, d_weight));
        Ok(())
    }

    fn layer_norm(
        &self,
        x: &CpuFloats,
        (weight, bias): (&CpuFloats, &CpuFloats),
        epsilon: f64,
        y: &mut CpuFloats,
        statistics: &mut CpuFloats,
    ) -> Result<()> {
        self.on_pool(|| ops::layer_norm::forward(x, weight, bias, epsilon, y, statistics));
        Ok(())
    }

    fn layer_norm_backward(
        &self,
        dy: &CpuFloats,
        x: &CpuFloats,
        weight: &CpuFloats,
        statistics: &CpuFloats,
        dx: Option<&mut CpuFloats>,
        parameters: Option<(&mut CpuFloats, &mut CpuFloats)>,
    ) -> Result<()> {
        let dx = dx.map(|dx| &mut **dx);
        let parameters = parameters.map(|(weight, bias)| (&mut **weight, &mut **bias));
        self.on_pool(|| ops::layer_norm::backward(dy, x, weight, statistics, dx, parameters));
        Ok(())
    }

    fn rope(
        &self,
        rotation: Rotation,
        shape: RopeShape,
        (cos, sin): (&CpuFloats, &CpuFloats),
        x: &mut CpuFloats,
    ) -> Result<()> {
        self.on_pool(|| ops::rope::rotate(rotation, shape, cos, sin, x));
        Ok(())
    }

    fn attention(
        &self,
        shape: &AttentionShape,
        segments: &[u32],
        qkv: &CpuFloats,
        output: &mut CpuFloats,
        log_sums: &mut CpuFloats,
    ) -> Result<()> {
        self.on_pool(|| ops::attention::forward(shape, segments, qkv, output, log_sums));
        Ok(())
    }

    fn attention_backward(
        &self,
        shape: &AttentionShape,
        segments: &[u32],
        qkv: &CpuFloats,
        (output, log_sums): (&CpuFloats, &CpuFloats),
        d_output: &CpuFloats,
    ) -> Result<CpuFloats> {
        let (mut scratch, mut d_qkv) = (self.alloc(Buffer::len(qkv))?, self.alloc(Buffer::len(qkv))?);
        self.on_pool(|| {
            let forward = (&**qkv, &**output, &**log_sums);
            let (qkv, output, log_sums) = forward;
            ops::attention::backward(
                shape,
                segments,
                qkv,
                output,
                log_sums,
                d_output,
                &mut scratch,
                &mut d_qkv,
            );
        });
        Ok(d_qkv)
    }

    fn activate(&self, activation: Activation, x: &CpuFloats, y: &mut CpuFloats) -> Result<()> {
        self.on_pool(|| ops::activation::forward(activation, x, y));
        Ok(())
    }

    fn activate_backward(&self, activation: Activation, x: &CpuFloats, d: &mut CpuFloats) -> Result<()> {
        self.on_pool(|| ops::activation::backward(activation, x, d));
        Ok(())
    }

    fn silu_gate(&self, gate_up: &CpuFloats, columns: usize, y: &mut CpuFloats) -> Result<()> {
        self.on_pool(|| ops::silu_gate::forward(gate_up, columns, y));
        Ok(())
    }

    fn silu_gate_backward(
        &self,
        dy: &CpuFloats,
        gate_up: &CpuFloats,
        columns: usize,
        d_gate_up: &mut CpuFloats,
    ) -> Result<()> {
        self.on_pool(|| ops::silu_gate::backward(dy, gate_up, columns, d_gate_up));
        Ok(())
    }

    fn gather_scatter(
        &self,
        matrix: &SparseBuffers<Self>,
        columns: usize,
        x: &CpuFloats,
        y: &mut CpuFloats,
    ) -> Result<()> {
        let SparseBuffers { targets, starts, sources, weights } = matrix;
        let matrix = SparseView { targets, starts, sources, weights };
        self.on_pool(|| ops::gather_scatter::add(matrix, columns, x, y));
        Ok(())
    }

    fn transpose(
        &self,
        x: &CpuFloats,
        rows: usize,
        columns: usize,
        is_added: bool,
        y: &mut CpuFloats,
    ) -> Result<()> {
        // on the calling thread: only small convolution kernels are transposed
        ops::transpose::transpose(x, rows, columns, is_added, y);
        Ok(())
    }

    fn cross_entropy(&self, logits: &mut CpuFloats, targets: &[u32], scale: f64) -> Result<f64> {
        Ok(self.on_pool(|| ops::cross_entropy::forward_backward(logits, targets, scale)))
    }

    fn vocab_parallel_cross_entropy(
        &self,
        logits: &mut CpuFloats,
        targets: &[Option<u32>],
    ) -> Result<Vec<PartialSoftmax<f32>>> {
        Ok(self.on_pool(|| ops::vocab_parallel_cross_entropy::forward(logits, targets)))
    }

    fn vocab_parallel_cross_entropy_backward(
        &self,
        exponentials: &mut CpuFloats,
        targets: &[Option<u32>],
        factors: &[f32],
        scale: f64,
    ) -> Result<()> {
        self.on_pool(|| ops::vocab_parallel_cross_entropy::backward(exponentials, targets, factors, scale));
        Ok(())
    }

    fn adamw(
        &self,
        adamw: &AdamW,
        weights: &mut CpuFloats,
        gradients: &CpuFloats,
        (mean, square): (&mut CpuFloats, &mut CpuFloats),
    ) -> Result<()> {
        self.on_pool(|| ops::adamw::step(adamw, weights, gradients, mean, square));
        Ok(())
    }
}
