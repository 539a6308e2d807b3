//! Communicator that counts the collectives in a pass.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dflop_comm::{
    Buffer, Comm, Communicator, Error, Failure, Handle, Payload, PayloadShape, Result, Slice, StepContext,
};
use dflop_device::{Dtype, Runtime};
use dflop_models::{
    FrozenModules, ModelConfig, ModuleKind, Stage, StageRange, StageSettings, TensorParallel,
};
use serde_json::json;

use super::job::Anything;
use crate::claim::claims;
use crate::device::TestBackend;
use crate::parity::fixture::{Fixture, Text};
use crate::support::{Transport, patient, run};

claims! {
    an_attention_and_an_mlp_sum_once_each_way,
}

#[derive(Debug)]
struct Counted {
    inner: Communicator,
    sums: AtomicUsize,
    gathers: AtomicUsize,
}

impl Counted {
    /// Returns the numbers of sums and gathers since the last call.
    fn take(&self) -> [usize; 2] {
        [&self.sums, &self.gathers].map(|count| count.swap(0, Ordering::Relaxed))
    }
}

impl Comm for Counted {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn world_rank(&self, rank: usize) -> usize {
        self.inner.world_rank(rank)
    }
    fn start_send(&self, to: usize, tag: u64, at: StepContext, payload: Payload) -> Result<Handle<()>> {
        self.inner.start_send(to, tag, at, payload)
    }
    fn start_recv(
        &self,
        from: usize,
        tag: u64,
        at: StepContext,
        shape: PayloadShape,
    ) -> Result<Handle<Payload>> {
        self.inner.start_recv(from, tag, at, shape)
    }
    fn start_all_reduce(&self, at: StepContext, buffer: Buffer) -> Result<Handle<Buffer>> {
        self.sums.fetch_add(1, Ordering::Relaxed);
        self.inner.start_all_reduce(at, buffer)
    }
    fn start_reduce_scatter(
        &self,
        at: StepContext,
        buffer: Buffer,
        parts: &[usize],
    ) -> Result<Handle<Buffer>> {
        self.sums.fetch_add(1, Ordering::Relaxed);
        self.inner.start_reduce_scatter(at, buffer, parts)
    }
    fn start_all_gather(&self, at: StepContext, buffer: Buffer, parts: &[usize]) -> Result<Handle<Buffer>> {
        self.gathers.fetch_add(1, Ordering::Relaxed);
        self.inner.start_all_gather(at, buffer, parts)
    }
    fn all_reduce(&self, at: StepContext, values: Slice<'_>) -> Result<()> {
        self.sums.fetch_add(1, Ordering::Relaxed);
        self.inner.all_reduce(at, values)
    }
    fn reduce_scatter(&self, at: StepContext, values: Slice<'_>, parts: &[usize]) -> Result<()> {
        self.sums.fetch_add(1, Ordering::Relaxed);
        self.inner.reduce_scatter(at, values, parts)
    }
    fn all_gather(&self, at: StepContext, values: Slice<'_>, parts: &[usize]) -> Result<()> {
        self.gathers.fetch_add(1, Ordering::Relaxed);
        self.inner.all_gather(at, values, parts)
    }
    fn broadcast(&self, at: StepContext, root: usize, values: Slice<'_>) -> Result<()> {
        self.inner.broadcast(at, root, values)
    }
    fn barrier(&self, at: StepContext) -> Result<()> {
        self.inner.barrier(at)
    }
    fn split(&self, at: StepContext, color: Option<u64>, key: u64) -> Result<Option<Box<dyn Comm>>> {
        self.inner.split(at, color, key)
    }
    fn bytes_sent(&self) -> u64 {
        self.inner.bytes_sent()
    }
    fn note(&self, at: StepContext) {
        self.inner.note(at);
    }
    fn abort(&self, at: StepContext, reason: &str) -> Error {
        self.inner.abort(at, reason)
    }
    fn fail(&self, failure: Failure) -> Error {
        self.inner.fail(failure)
    }
}

/// Three layers. Forward: embedding, attentions and MLPs sum, the loss gathers three numbers per row.
/// Backward: LM head, MLPs and attentions sum; copied keys and values sum once more per layer.
fn an_attention_and_an_mlp_sum_once_each_way<B: TestBackend>() {
    for (kv_heads, in_backward) in [(2, 1 + 3 * 2), (1, 1 + 3 * 3)] {
        let config = json!({"model_type": "llama", "hidden_size": 16, "intermediate_size": 8,
            "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": kv_heads, "vocab_size": 48});
        let model = ModelConfig::from_config(&config).unwrap();
        let counts = run(Transport::Threads, 2, patient(), |comm| {
            let comm = Arc::new(Counted { inner: comm, sums: 0.into(), gathers: 0.into() });
            let device = B::open(1);
            let group = Arc::new(TensorParallel::new(device.clone(), Arc::<Counted>::clone(&comm)));
            let settings = StageSettings { tensor_parallel: Some(group), ..StageSettings::default() };
            let range = StageRange { module: ModuleKind::Llm, layers: 0..3 };
            let stage = model.stage_with(&device, &range, FrozenModules::default(), settings, &Anything);
            let mut stage = stage.unwrap();
            // all work is done before it is counted
            let finish = || device.read(&device.zeros_as(Dtype::F64, 1).unwrap()).unwrap();
            finish();
            let built = comm.take();
            let context = Text::of(&Fixture::open("llama"), &[]).context(&model.llm, &device);
            stage.forward(0, Arc::new(context), None).unwrap();
            finish();
            let forward = comm.take();
            stage.backward(0, None).unwrap();
            finish();
            [built, forward, comm.take()]
        });
        for counts in counts {
            assert_eq!(counts, [[0, 0], [1 + 3 * 2, 1], [in_backward, 0]], "{kv_heads} heads of keys");
        }
    }
}
