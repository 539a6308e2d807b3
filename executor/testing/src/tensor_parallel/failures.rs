//! Configurations that a tensor-parallel group rejects, and failures that end it.

use std::num::NonZeroUsize;
use std::sync::Arc;

use dflop_comm::{Cause, Communicator};
use dflop_device::ops::elementwise::Elementwise;
use dflop_models::weights::ParameterSpec;
use dflop_models::weights::{Seed, WeightSource};
use dflop_models::{
    BlockStage, Error, FrozenModules, ModelConfig, ModuleKind, Stage, StageRange, StageSettings,
    TensorParallel,
};
use serde_json::json;

use crate::claim::claims;
use crate::device::TestBackend;
use crate::parity::fixture::{Fixture, Text};
use crate::support::{Transport, patient, run};

claims! {
    degrees_that_do_not_divide_are_refused_by_field,
    a_missing_rank_ends_the_pass_and_is_named,
    whole_values_are_not_accepted_for_a_shard,
    a_pass_that_fails_on_one_rank_fails_on_all,
    ranks_at_different_steps_do_not_sum,
}

fn stage<B: TestBackend>(
    model: &ModelConfig,
    comm: Communicator,
) -> dflop_models::Result<BlockStage<B::Device>> {
    let device = B::open(1);
    let group = Arc::new(TensorParallel::new(device.clone(), Arc::new(comm)));
    let settings = StageSettings { tensor_parallel: Some(group), ..StageSettings::default() };
    let range = StageRange { module: ModuleKind::Llm, layers: 0..model.layers(ModuleKind::Llm) };
    model.stage_with(&device, &range, FrozenModules::default(), settings, &Seed(1))
}

fn degrees_that_do_not_divide_are_refused_by_field<B: TestBackend>() {
    let decoder = json!({"model_type": "llama", "hidden_size": 24, "intermediate_size": 5, "num_hidden_layers": 1,
        "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 48});
    let few_words = json!({"model_type": "llama", "hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 5});
    let recorded = |name| Fixture::open(name).config;
    for (config, module, degree, expected) in [
        (
            &decoder,
            ModuleKind::Llm,
            4,
            "`num_attention_heads` = 6 is not a multiple of the tensor-parallel degree 4",
        ),
        (
            &decoder,
            ModuleKind::Llm,
            3,
            "`num_key_value_heads` = 2 is neither a multiple nor a divisor of the tensor-parallel degree 3",
        ),
        (&decoder, ModuleKind::Llm, 6, "`intermediate_size` = 5 is less than the tensor-parallel degree 6"),
        (&few_words, ModuleKind::Llm, 6, "`vocab_size` = 5 is less than the tensor-parallel degree 6"),
        (
            &recorded("internvl"),
            ModuleKind::Llm,
            3,
            "`text_config.num_attention_heads` = 4 is not a multiple",
        ),
        (
            &recorded("internvl"),
            ModuleKind::Vision,
            2,
            "`vision_config.num_attention_heads` = 3 is not a multiple",
        ),
        (&recorded("qwen2_5_vl"), ModuleKind::Vision, 4, "`vision_config.num_heads` = 2 is not a multiple"),
        (
            &recorded("qwen2_audio"),
            ModuleKind::Audio,
            2,
            "`audio_config.encoder_attention_heads` = 3 is not a multiple",
        ),
    ] {
        let model = ModelConfig::from_config(config).unwrap();
        let degree = NonZeroUsize::new(degree).unwrap();
        let error = model.check_tensor_parallel(module, degree).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
    let model = ModelConfig::from_config(&decoder).unwrap();
    assert!([1, 2].into_iter().all(|degree| {
        model.check_tensor_parallel(ModuleKind::Llm, NonZeroUsize::new(degree).unwrap()).is_ok()
    }));
    let errors = run(Transport::Threads, 4, patient(), |comm| stage::<B>(&model, comm).err());
    let problem = "= 6 is not a multiple of the tensor-parallel degree 4";
    let is_refused = |error: &Option<Error>| matches!(error, Some(Error::ModelConfig { problem: found, .. }) if found == problem);
    assert!(errors.iter().all(is_refused));
}

/// Returns the forward error on each rank, when ranks are at these steps; a rank without a step does nothing.
fn forward<B: TestBackend>(steps: [Option<u64>; 2]) -> Vec<Option<Error>> {
    let config = json!({"model_type": "llama", "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 48});
    let model = ModelConfig::from_config(&config).unwrap();
    run(Transport::Threads, 2, patient(), |comm| {
        let step = steps[dflop_comm::Comm::rank(&comm)]?;
        let mut stage = stage::<B>(&model, comm).unwrap();
        stage.start_step(step);
        let context = Text::of(&Fixture::open("llama"), &[]).context(&model.llm, stage.device());
        stage.forward(5, Arc::new(context), None).err()
    })
}

fn a_missing_rank_ends_the_pass_and_is_named<B: TestBackend>() {
    let errors = forward::<B>([Some(3), None]);
    let Some(Error::Comm(error)) = &errors[0] else { panic!("{errors:?}") };
    let failure = error.failure().unwrap();
    assert_eq!((failure.cause, failure.culprit), (Cause::Left, Some(1)));
    assert!(error.to_string().contains("step 3, microbatch 5, `tensor-parallel forward`"), "{error}");
}

/// Source that ignores shards.
fn whole_values_are_not_accepted_for_a_shard<B: TestBackend>() {
    struct Whole;
    impl WeightSource for Whole {
        fn values(&self, spec: &ParameterSpec) -> dflop_models::Result<Vec<f32>> {
            Ok(vec![0.5; spec.shape.iter().product()])
        }
    }
    let model = ModelConfig::from_config(&Fixture::open("llama").config).unwrap();
    let errors = run(Transport::Threads, 2, patient(), |comm| {
        let device = B::open(1);
        let group = Arc::new(TensorParallel::new(device.clone(), Arc::new(comm)));
        let settings = StageSettings { tensor_parallel: Some(group), ..StageSettings::default() };
        let range = StageRange { module: ModuleKind::Llm, layers: 0..2 };
        model.stage_with(&device, &range, FrozenModules::default(), settings, &Whole).err()
    });
    for error in errors {
        let message = error.unwrap().to_string();
        assert_eq!(
            message,
            "expected tensor `model.embed_tokens.weight` to have shape [24, 24], found [1152]"
        );
    }
}

/// One rank gets rows with a different size: it returns an error, and the other rank does not wait for it.
fn a_pass_that_fails_on_one_rank_fails_on_all<B: TestBackend>() {
    let config = Fixture::open("llama").config;
    let model = ModelConfig::from_config(&config).unwrap();
    let errors = run(Transport::Threads, 2, patient(), |comm| {
        let rank = dflop_comm::Comm::rank(&comm);
        let device = B::open(1);
        let group = Arc::new(TensorParallel::new(device.clone(), Arc::new(comm)));
        let settings = StageSettings { tensor_parallel: Some(group), ..StageSettings::default() };
        let range = StageRange { module: ModuleKind::Llm, layers: 1..2 };
        let stage = model.stage_with(&device, &range, FrozenModules::default(), settings, &Seed(1));
        let context = Text::of(&Fixture::open("llama"), &[]).context(&model.llm, &device);
        let rows = device.zeros(context.layers.rows * 24 - rank).unwrap();
        stage.unwrap().forward(2, Arc::new(context), Some(rows)).err()
    });
    assert!(matches!(&errors[1], Some(Error::Input { input: "rows of the stage before", .. })), "{errors:?}");
    let Some(Error::Comm(error)) = &errors[0] else { panic!("{errors:?}") };
    assert_eq!((error.failure().unwrap().cause, error.failure().unwrap().culprit), (Cause::Caller, Some(1)));
    assert!(error.to_string().contains("stage Llm 1..2: input `rows of the stage before`"), "{error}");
}

fn ranks_at_different_steps_do_not_sum<B: TestBackend>() {
    let errors = forward::<B>([Some(3), Some(4)]);
    for error in errors {
        let Some(Error::Comm(error)) = error else { panic!("{error:?}") };
        assert_eq!(error.failure().unwrap().cause, Cause::Mismatch, "{error}");
    }
}
