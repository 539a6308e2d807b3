//! Tensor shards: loaded from checkpoints and seeds, assembled into complete tensors, and counted once.

use std::sync::Arc;

use dflop_comm::Communicator;
use dflop_device::Runtime;
use dflop_models::weights::{Checkpoint, Seed, Tensor, WEIGHTS_FILE, WeightSource, write};
use dflop_models::{
    BlockStage, FrozenModules, ModelConfig, ModuleKind, Stage, StageRange, StageSettings, TensorParallel,
    assemble,
};
use serde_json::json;

use super::job::{Anything, Job};
use crate::claim::claims;
use crate::device::TestBackend;
use crate::parity::fixture::Fixture;
use crate::support::{Transport, patient, run};

claims! {
    assembled_tensors_equal_the_loaded_ones,
    shards_are_written_as_whole_tensors,
    every_element_is_counted_by_one_rank,
    replicas_that_differ_are_named,
}

fn stage<B: TestBackend>(
    model: &ModelConfig,
    module: ModuleKind,
    comm: Option<Communicator>,
    source: &dyn WeightSource,
) -> BlockStage<B::Device> {
    let device = B::open(1);
    let group = comm.map(|comm| Arc::new(TensorParallel::new(device.clone(), Arc::new(comm))));
    let settings = StageSettings { tensor_parallel: group, ..StageSettings::default() };
    let range = StageRange { module, layers: 0..model.layers(module) };
    model.stage_with(&device, &range, FrozenModules::default(), settings, source).unwrap()
}

/// Returns the tensors in a module that ranks share, as the first rank assembles them.
fn assembled_tensors<B: TestBackend>(
    model: &ModelConfig,
    module: ModuleKind,
    ranks: usize,
    source: &(dyn WeightSource + Sync),
) -> Vec<Tensor> {
    let mut all = run(Transport::Threads, ranks, patient(), |comm| {
        let stage = stage::<B>(model, module, Some(comm), source);
        let bytes: usize = stage.parameters().owned().map(|(spec, _)| 4 * spec.elements()).sum();
        assert!(stage.parameters().bytes() >= bytes as u64);
        for (spec, values) in stage.parameters().owned() {
            assert_eq!(values.len(), spec.elements(), "{}", spec.name);
        }
        assemble(&stage).unwrap()
    });
    assert!(all[1..].iter().all(Option::is_none), "the first rank has them");
    all.swap_remove(0).unwrap()
}

fn assembled_tensors_equal_the_loaded_ones<B: TestBackend>() {
    for (name, module, ranks) in [
        ("llama", ModuleKind::Llm, 4),
        ("qwen2", ModuleKind::Llm, 2),
        ("qwen2_5_vl", ModuleKind::Vision, 2),
        ("internvl", ModuleKind::Vision, 3),
        ("qwen2_audio", ModuleKind::Audio, 3),
    ] {
        let fixture = Fixture::open(name);
        let model = ModelConfig::from_config(&fixture.config).unwrap();
        let sources: [&(dyn WeightSource + Sync); 3] = [&fixture.weights, &Seed(3), &Anything];
        for source in sources {
            let whole = assemble(&stage::<B>(&model, module, None, source)).unwrap().unwrap();
            assert_eq!(assembled_tensors::<B>(&model, module, ranks, source), whole, "{name}");
        }
    }
}

/// Checkpoints that several ranks write are read by a single rank.
fn shards_are_written_as_whole_tensors<B: TestBackend>() {
    let fixture = Fixture::open("llama");
    let model = ModelConfig::from_config(&fixture.config).unwrap();
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), assembled_tensors::<B>(&model, ModuleKind::Llm, 4, &fixture.weights), u64::MAX)
        .unwrap();
    let written = Checkpoint::open(&directory.path().join(WEIGHTS_FILE)).unwrap();
    model.check::<B::Device>(&written).unwrap();
    let again = assembled_tensors::<B>(&model, ModuleKind::Llm, 2, &written);
    assert_eq!(again, assemble(&stage::<B>(&model, ModuleKind::Llm, None, &written)).unwrap().unwrap());
    for name in written.names() {
        assert_eq!(written.tensor(name).unwrap(), fixture.weights.tensor(name).unwrap());
    }
}

/// Computes the norm over all gradients, from the parts that each rank counts.
fn every_element_is_counted_by_one_rank<B: TestBackend>() {
    let config = json!({"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 22, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50});
    let model = ModelConfig::from_config(&config).unwrap();
    let count = |comm: Option<Communicator>| {
        let stage = stage::<B>(&model, ModuleKind::Llm, comm, &Anything);
        let counted = stage.parameters().owned().filter(|(spec, _)| spec.is_counted());
        let square = |values| {
            let values: Vec<f32> = stage.device().download(values).unwrap();
            values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>()
        };
        let sums = counted.map(|(spec, values)| (spec.elements(), square(values)));
        sums.fold((0, 0.0), |sum, part| (sum.0 + part.0, sum.1 + part.1))
    };
    let whole = count(None);
    for ranks in [2, 4] {
        let parts = run(Transport::Threads, ranks, patient(), |comm| count(Some(comm)));
        let (elements, squares) = parts.iter().fold((0, 0.0), |sum, part| (sum.0 + part.0, sum.1 + part.1));
        assert_eq!(elements, whole.0);
        assert!((squares - whole.1).abs() < 1e-6 * whole.1, "{squares} {whole:?}");
    }
    let job = Job { ranks: 4, ..Job::new(&config, "qwen2", &Anything) }.run::<B>();
    let copies = job.held.iter().filter(|(spec, _)| spec.shard.original(1) == 0).count();
    // three norms, and weights and biases for keys and values
    assert_eq!(copies, 3 + 4);
}

/// Replicas that differ from the original, as after restoring a rank from a different state.
fn replicas_that_differ_are_named<B: TestBackend>() {
    struct Drifted(usize);
    impl WeightSource for Drifted {
        fn values(&self, spec: &dflop_models::weights::ParameterSpec) -> dflop_models::Result<Vec<f32>> {
            let mut values = Anything.values(spec)?;
            if self.0 == 1 && spec.name == "model.layers.1.input_layernorm.weight" {
                values[3] += 1e-6;
            }
            Ok(values)
        }
    }
    let model = ModelConfig::from_config(&Fixture::open("llama").config).unwrap();
    let errors = run(Transport::Threads, 2, patient(), |comm| {
        let source = Drifted(dflop_comm::Comm::rank(&comm));
        assemble(&stage::<B>(&model, ModuleKind::Llm, Some(comm), &source))
            .err()
            .map(|error| error.to_string())
    });
    let expected = "tensor `model.layers.1.input_layernorm.weight` differs between rank 0 and rank 1";
    assert_eq!(errors[0].as_deref(), Some(expected));
}
