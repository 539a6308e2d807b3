//! cuDNN attention engine: plans in the background, and the choice between engines.

#![expect(unsafe_code, reason = "plans are executed with addresses")]

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use dflop_device::ops::attention::AttentionShape;
use dflop_device::{Dtype, HostSegments, Result};

use super::{Engine, EngineChoice};
use crate::cudnn::{
    self, Arguments, DeviceProperties, Executor, Gradients, Heads, Library, Lookup, Plan, PlanKey, Plans,
    SegmentTables,
};
use crate::driver::{CudaMemory, Event, MemoryPool, Staging, Stream};

/// Maximum number of shapes whose plans and times are kept.
const SHAPES_MAX: usize = 256;

/// cuDNN plans for one device, and the choices by shape.
pub(crate) struct CudnnEngine {
    plans: Plans,
    executor: Executor,
    stream: Stream,
    pool: MemoryPool,
    staging: Arc<Staging>,
    shapes: Mutex<HashMap<PlanKey, Shape>>,
}

/// State for one shape: the choice, and the data that a call needs.
#[derive(Default)]
struct Shape {
    choice: EngineChoice,
    /// Runs whose times are not known yet.
    pending: Vec<(Engine, Event, Event)>,
    /// Tables for the last segments, which all layers in a microbatch use.
    tables: Option<(Vec<u32>, CudaMemory)>,
    plan: Option<Arc<Plan>>,
    /// Reason why cuDNN cannot compute this shape.
    refusal: Option<String>,
}

impl Drop for CudnnEngine {
    fn drop(&mut self) {
        // plans must outlive their work; a device that has failed does no work
        let _ = self.stream.synchronize();
    }
}

impl CudnnEngine {
    /// Opens the library for a device, whose context is current on this thread.
    ///
    /// - `libraries`: library directory, if the system loader does not find it
    /// - `directory`: directory in which plans are kept
    pub(crate) fn new(
        libraries: Option<&Path>,
        directory: Option<&Path>,
        (stream, pool, staging): (&Stream, &MemoryPool, &Arc<Staging>),
    ) -> std::result::Result<Self, cudnn::Error> {
        let library = Library::open(libraries)?;
        let ordinal = stream.context().ordinal() as i32;
        let properties = DeviceProperties::from_device(&library, ordinal)?;
        let plans_max = NonZeroUsize::new(SHAPES_MAX).unwrap_or(NonZeroUsize::MIN);
        Ok(Self {
            plans: Plans::new(&library, properties, directory, plans_max)?,
            executor: Executor::new(&library)?,
            stream: stream.clone(),
            pool: pool.clone(),
            staging: Arc::clone(staging),
            shapes: Mutex::default(),
        })
    }

    /// Queues a pass with the chosen engine; `own` queues it with the kernels in this crate.
    pub(crate) fn run(&self, call: &Call<'_>, own: impl FnOnce() -> Result<()>) -> Result<()> {
        // no cuDNN plan supports key ranges
        if call.segments.ranges().is_some() {
            return own();
        }
        let starts = call.segments.starts();
        let key = match call.gradients {
            None => PlanKey::forward(heads(call.shape), starts),
            Some(_) => PlanKey::backward(heads(call.shape), starts, false),
        };
        if call.dtype != Dtype::Bf16 || key.check().is_err() || call.segments.rows() == 0 {
            return own();
        }
        let mut shapes = self.shapes.lock().unwrap_or_else(PoisonError::into_inner);
        if shapes.len() >= SHAPES_MAX && !shapes.contains_key(&key) {
            return own();
        }
        let shape = shapes.entry(key).or_default();
        shape.take_times();
        // until there is a plan, nothing is measured
        if shape.plan.is_none() {
            match self.plans.get(&key) {
                Lookup::Building => return own(),
                Lookup::Failed(error) => {
                    tracing::debug!("cuDNN computes no attention of {key:?}: {error}");
                    shape.refuse(error.to_string());
                }
                // a plan that reads padded sums requires another kernel before it
                Lookup::Ready(plan) if plan.padded_log_sums().is_some() => {
                    shape.refuse("its plan reads padded log sums".to_owned());
                }
                Lookup::Ready(plan) => shape.plan = Some(plan),
            }
        }
        let is_timed = shape.choice.is_open();
        let engine = shape.choice.next();
        let start = is_timed.then(|| self.stream.record()).transpose()?;
        match (engine, shape.plan.clone()) {
            (Engine::Cudnn, Some(plan)) => self.execute(call, &key, &plan, shape)?,
            _ => own()?,
        }
        if let Some(start) = start {
            shape.pending.push((engine, start, self.stream.record()?));
        }
        Ok(())
    }

    /// Returns the choices and times for all shapes so far.
    pub(crate) fn choices(&self) -> Vec<AttentionChoice> {
        let mut shapes = self.shapes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut choices: Vec<_> = shapes.iter_mut().map(|(key, shape)| shape.describe(key)).collect();
        choices.sort_by_key(|choice| choice.key);
        choices
    }

    fn execute(&self, call: &Call<'_>, key: &PlanKey, plan: &Plan, shape: &mut Shape) -> Result<()> {
        let starts = call.segments.starts();
        if shape.tables.as_ref().is_none_or(|(known, _)| known != starts) {
            let tables = SegmentTables::new(key, starts).map_err(failed)?;
            let words = tables.bytes().len().div_ceil(Dtype::U32.bytes());
            let memory = CudaMemory::new(&self.pool, Dtype::U32, words)?;
            let fill = |bytes: &mut [u8]| bytes.copy_from_slice(tables.bytes());
            // SAFETY: the memory has this many bytes, and is freed in stream order.
            unsafe { self.staging.copy_up(&self.stream, memory.address(), tables.bytes().len(), fill) }?;
            shape.tables = Some((starts.to_vec(), memory));
        }
        let tables = shape.tables.as_ref().map_or(0, |(_, memory)| memory.address());
        let words = plan.workspace_bytes().div_ceil(Dtype::F32.bytes() as u64) as usize;
        // freed in stream order, after the plan's work
        let workspace = CudaMemory::new(&self.pool, Dtype::F32, words)?;
        let [qkv, output, log_sums] = call.addresses;
        let arguments = Arguments {
            tokens: call.segments.rows() as u32,
            qkv,
            output,
            log_sums,
            gradients: call.gradients,
            tables,
            workspace: workspace.address(),
            scale: call.shape.scale as f32,
        };
        // SAFETY: the tensors have the shapes in the key, which the operation has checked, and are freed in
        // stream order; the plan is kept until the stream is done.
        unsafe { self.executor.execute(plan, self.stream.raw().cast(), &arguments) }.map_err(failed)
    }
}

/// Engine choice for a pass over segments with one shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionChoice {
    /// Pass shape.
    pub key: PlanKey,
    /// Whether cuDNN computes the shape; `None` while its plan is built, or times are measured.
    pub is_cudnn: Option<bool>,
    /// Median time with the kernels in this crate, in nanoseconds, once measured.
    pub own_ns: Option<u64>,
    /// Median time with cuDNN, in nanoseconds, once measured.
    pub cudnn_ns: Option<u64>,
    /// Reason why cuDNN cannot compute the shape.
    pub refusal: Option<String>,
}

/// Pass over segments.
pub(crate) struct Call<'a> {
    pub(crate) shape: &'a AttentionShape,
    pub(crate) segments: &'a HostSegments,
    /// Row element type.
    pub(crate) dtype: Dtype,
    /// Queries, keys and values; output; log sums.
    pub(crate) addresses: [u64; 3],
    /// Gradients in a backward pass.
    pub(crate) gradients: Option<Gradients>,
}

impl Shape {
    fn refuse(&mut self, reason: String) {
        self.choice.exclude_cudnn();
        self.refusal = Some(reason);
    }

    fn describe(&mut self, key: &PlanKey) -> AttentionChoice {
        self.take_times();
        let [own_ns, cudnn_ns] = self.choice.medians();
        let is_cudnn = self.choice.chosen().map(|engine| engine == Engine::Cudnn);
        AttentionChoice { key: *key, is_cudnn, own_ns, cudnn_ns, refusal: self.refusal.clone() }
    }

    /// Adds the times of runs that the device has completed.
    fn take_times(&mut self) {
        let (done, pending) =
            std::mem::take(&mut self.pending).into_iter().partition(|(_, _, end)| end.is_reached());
        self.pending = pending;
        let done: Vec<(Engine, Event, Event)> = done;
        for (engine, start, end) in done {
            self.choice.add(engine, start.nanoseconds_until(&end));
        }
    }
}

fn heads(shape: &AttentionShape) -> Heads {
    Heads {
        heads: shape.heads as u32,
        kv_heads: shape.kv_heads as u32,
        head_dim: shape.head_dim as u32,
        is_causal: shape.is_causal,
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
fn failed(error: cudnn::Error) -> dflop_device::Error {
    dflop_device::Error::Failed { reason: error.to_string() }
}
