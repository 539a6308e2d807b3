//! Counts the collectives of a pass.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dflop_device::{Dtype, Runtime};
use dflop_models::{
    FrozenModules, ModelConfig, ModuleKind, Stage, StageRange, StageSettings, TensorParallel,
};
use serde_json::json;

use super::job::Anything;
use crate::claim::claims;
use crate::device::TestBackend;
use crate::hooked::{Call, CallKind, Collective, Hooked};
use crate::parity::fixture::{Fixture, Text};
use crate::support::{Transport, patient, run};

claims! {
    an_attention_and_an_mlp_sum_once_each_way,
}

/// Sums and gathers of a communicator.
#[derive(Debug, Default)]
struct Counts([AtomicUsize; 2]);

impl Counts {
    fn add(&self, call: &Call<'_>) {
        if let CallKind::Started(kind, _) | CallKind::Waited(kind) = call.kind {
            let [sums, gathers] = &self.0;
            let count = if kind == Collective::AllGather { gathers } else { sums };
            count.fetch_add(usize::from(!call.is_split), Ordering::Relaxed);
        }
    }

    /// Returns the sums and gathers since the last call.
    fn take(&self) -> [usize; 2] {
        self.0.each_ref().map(|count| count.swap(0, Ordering::Relaxed))
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
            let counts = Arc::new(Counts::default());
            let counted = Arc::clone(&counts);
            let comm = Arc::new(Hooked::new(comm, move |call| counted.add(call)));
            let device = B::open(1);
            let group = Arc::new(TensorParallel::new(device.clone(), comm));
            let settings = StageSettings { tensor_parallel: Some(group), ..StageSettings::default() };
            let range = StageRange { module: ModuleKind::Llm, layers: 0..3 };
            let stage = model.stage_with(&device, &range, FrozenModules::default(), settings, &Anything);
            let mut stage = stage.unwrap();
            // all work is done before it is counted
            let finish = || device.read(&device.zeros_as(Dtype::F64, 1).unwrap()).unwrap();
            finish();
            let built = counts.take();
            let context = Text::of(&Fixture::open("llama"), &[]).context(&model.llm, &device);
            stage.forward(0, Arc::new(context), None).unwrap();
            finish();
            let forward = counts.take();
            stage.backward(0, None).unwrap();
            finish();
            [built, forward, counts.take()]
        });
        for counts in counts {
            assert_eq!(counts, [[0, 0], [1 + 3 * 2, 1], [in_backward, 0]], "{kv_heads} heads of keys");
        }
    }
}
