//! Stages from outside the crate: same bits under every schedule, checkpoints, and rejections by name.

use std::path::Path;
use std::sync::Arc;

use dflop_balancer::schedule::ScheduleKind;
use dflop_device::{Device, Dtype, Runtime, Tensor};
use dflop_executor::checkpoint::{CheckpointDirectory, RunState};
use dflop_executor::optimizer::{JobOptimizer, JobOptimizerSettings, LearningRate};
use dflop_executor::pipeline::{ModuleParallelism, PipelineStepPlan};
use dflop_models::{
    BlockOutput, BlockStage, MicrobatchContext, ModelConfig, ModuleKind, Parameters, Result, Stage,
};

use super::adapter::Adapter;
use super::batch::{
    Cut, Item, LLM_LAYERS, Sample, language_model, plan_microbatches, round_robin, sample, texts,
    with_encoders,
};
use super::job::{Setting, pipeline, run_failing, run_job, work};
use crate::claim::claims;
use crate::device::TestBackend;
use crate::support::{Transport, run};

claims! {
    own_stages_in_the_middle_and_at_the_end_give_the_same_bits_under_every_schedule,
    own_stages_share_ranks_with_built_in_ones,
    checkpoints_of_own_stages_resume_with_the_bits_of_an_uninterrupted_run,
    outputs_of_another_size_or_type_end_all_ranks_by_stage_and_microbatch,
    tokens_and_their_gradients_of_another_size_end_all_ranks_by_stage_and_microbatch,
    stages_that_do_not_fit_the_job_are_refused_before_the_first_step,
}

const ADAPTER_RANK: usize = 3;

/// Returns a job with an adapter on every stage but the first.
fn adapted<D: Device>(model: &Arc<ModelConfig>, llm: ModuleParallelism) -> Setting<D> {
    Setting {
        stages: Arc::new(|setting, range, stage| {
            if range.layers.start == 0 {
                return Ok(stage.boxed());
            }
            let (device, weights) = (stage.device(), setting.weights.as_ref());
            Ok(Adapter::new(device, &setting.model, range, ADAPTER_RANK, weights)?.boxed())
        }),
        ..Setting::new(model, vec![llm])
    }
}

/// One layer, then adapters before two layers and before the last layer with the LM head.
fn three() -> ModuleParallelism {
    ModuleParallelism::new(ModuleKind::Llm, vec![0..1, 1..3, 3..LLM_LAYERS])
}

fn own_stages_in_the_middle_and_at_the_end_give_the_same_bits_under_every_schedule<B: TestBackend>() {
    let (model, samples) = (language_model(false), texts(7));
    for (layout, dp_size) in [(three(), 1), (three(), 2)] {
        let setting = Setting { steps: 2, ..adapted(&model, layout.dp_size(dp_size)) };
        let cut = round_robin(7, 4);
        let truth = run_job::<B>(&setting, &samples, &cut).truth;
        for name in ["adapter.1.down", "adapter.1.up", "adapter.3.down", "adapter.3.up"] {
            let gradient = &truth.gradients[&format!("{name}.weight")];
            assert!(gradient.iter().all(|value| *value != 0.0), "{name}: {gradient:?}");
        }
        assert!(truth.gradients.contains_key("model.layers.0.mlp.up_proj.weight"));
        assert!(!truth.gradients.contains_key("model.layers.1.mlp.up_proj.weight"), "it is frozen");
        for schedule in [ScheduleKind::GPipe, ScheduleKind::ZeroBubble] {
            for transport in [Transport::Threads, Transport::Tcp] {
                let setting = Setting { schedule, transport, ..setting.clone() };
                assert_eq!(run_job::<B>(&setting, &samples, &cut).truth, truth, "{schedule}");
            }
        }
    }
}

fn own_stages_share_ranks_with_built_in_ones<B: TestBackend>() {
    let (model, samples, cut) = (language_model(false), texts(7), round_robin(7, 4));
    let apart = adapted(&model, ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, 4));
    let schedule = ScheduleKind::Interleaved { chunks: 2 };
    let truth = run_job::<B>(&apart, &samples, &cut).truth;
    assert_eq!(run_job::<B>(&Setting { schedule, ..apart }, &samples, &cut).truth, truth);
}

/// Trains up to a step, from the newest checkpoint if there is one, and saves; returns losses and trained
/// weights in bits.
fn train<B: TestBackend>(directory: &Path, until: u64) -> Vec<(Vec<f64>, Vec<u32>)> {
    let (samples, cut) = (texts(4), round_robin(4, 4));
    let setting = adapted(&language_model(false), three());
    let job = Arc::new(setting.job().unwrap());
    run(setting.transport, job.world_size(), setting.comm, |comm| {
        let device = B::open(1);
        let mut pipeline = pipeline::<B>(&setting, &job, comm, &device).unwrap();
        let settings = JobOptimizerSettings::new(LearningRate::constant(0.01));
        let stages = pipeline.stages().map(|(_, stage)| stage);
        let mut optimizer = JobOptimizer::<B::Device>::new(settings, pipeline.comm(), stages).unwrap();
        let checkpoints = CheckpointDirectory::new(directory);
        if let Some(saved) = checkpoints.latest(pipeline.comm()).unwrap() {
            optimizer.restore(pipeline.stages_mut(), &saved).unwrap();
        }
        let roles = pipeline.roles().to_vec();
        let targets = samples.iter().map(Sample::target_tokens).sum();
        let mut losses = Vec::new();
        while optimizer.steps() < until {
            let plan =
                PipelineStepPlan::new(&job, optimizer.steps(), targets, plan_microbatches(&samples, &cut));
            let work = work(&job, &roles, &Arc::new(plan.unwrap()), &samples, &cut, &device);
            let step = pipeline.start(&work).unwrap();
            losses.push(optimizer.update_step(&step, pipeline.stages_mut()).unwrap().0.loss);
        }
        let stages = pipeline.stages().map(|(_, stage)| stage);
        checkpoints.save(&optimizer, stages, &RunState::default()).unwrap();
        let mut weights = Vec::new();
        for (_, stage) in pipeline.stages() {
            for (_, values) in stage.parameters().owned() {
                weights.extend(device.download(values).unwrap().into_iter().map(f32::to_bits));
            }
        }
        (losses, weights)
    })
}

fn checkpoints_of_own_stages_resume_with_the_bits_of_an_uninterrupted_run<B: TestBackend>() {
    let [whole, parts] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let straight = train::<B>(whole.path(), 4);
    let before = train::<B>(parts.path(), 2);
    let after = train::<B>(parts.path(), 4);
    for (rank, (losses, weights)) in straight.into_iter().enumerate() {
        assert_eq!([&before[rank].0[..], &after[rank].0[..]].concat(), losses, "rank {rank}");
        assert_eq!(after[rank].1, weights, "rank {rank}");
        assert!(losses[3] < losses[0], "{losses:?}");
    }
}

/// Wrong stage output for microbatch 2.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    /// Rows with a missing element.
    Rows,
    /// `f64` rows.
    RowType,
    LossForRows,
    RowsForLoss,
    /// Loss with two elements.
    Loss,
    /// Input gradient with an additional element.
    Gradient,
    NoGradient,
    /// Stage that reports no backward.
    NoBackward,
}

/// Built-in stage with a fault.
struct Faulty<D: Device>(BlockStage<D>, Fault);

impl<D: Device> Stage<D> for Faulty<D> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn device(&self) -> &D {
        self.0.device()
    }

    fn parameters(&self) -> &Parameters<D> {
        self.0.parameters()
    }

    fn parameters_mut(&mut self) -> &mut Parameters<D> {
        self.0.parameters_mut()
    }

    fn has_backward(&self) -> bool {
        self.1 != Fault::NoBackward && self.0.has_backward()
    }

    fn forward(
        &mut self,
        microbatch: usize,
        context: Arc<MicrobatchContext<D>>,
        input: Option<Tensor<D>>,
    ) -> Result<BlockOutput<D>> {
        let output = self.0.forward(microbatch, context, input)?;
        let (BlockOutput::Rows(found) | BlockOutput::Loss(found)) = &output;
        let zeros = |dtype, len| Ok::<_, dflop_models::Error>(self.0.device().zeros_as(dtype, len)?);
        Ok(match self.1 {
            _ if microbatch != 2 => output,
            Fault::Rows => BlockOutput::Rows(zeros(Dtype::F32, found.len() - 1)?),
            Fault::RowType => BlockOutput::Rows(zeros(Dtype::F64, found.len())?),
            Fault::LossForRows => BlockOutput::Loss(zeros(Dtype::F64, 1)?),
            Fault::RowsForLoss => BlockOutput::Rows(zeros(Dtype::F32, 16)?),
            Fault::Loss => BlockOutput::Loss(zeros(Dtype::F64, 2)?),
            _ => output,
        })
    }

    fn backward_input(
        &mut self,
        microbatch: usize,
        gradient: Option<Tensor<D>>,
    ) -> Result<Option<Tensor<D>>> {
        let input = self.0.backward_input(microbatch, gradient)?;
        Ok(match self.1 {
            Fault::Gradient if microbatch == 2 => {
                let len = input.map_or(0, |input| input.len());
                Some(self.0.device().zeros_as(Dtype::F32, len + 1)?)
            }
            Fault::NoGradient if microbatch == 2 => None,
            _ => input,
        })
    }

    fn backward_weight(&mut self, microbatch: usize) -> Result<()> {
        self.0.backward_weight(microbatch)
    }

    fn forget(&mut self) {
        self.0.forget();
    }
}

/// Microbatch 2 has 8 tokens; rows have 16 columns.
fn outputs_of_another_size_or_type_end_all_ranks_by_stage_and_microbatch<B: TestBackend>() {
    let (model, samples, cut): (_, _, Cut) = (language_model(false), texts(4), round_robin(4, 4));
    let gradient = "microbatch 2: backward gives, as gradient of the input,";
    let rows = "expected 8 rows of 16 elements of F32";
    for (rank, fault, expected) in [
        (0, Fault::Rows, format!("microbatch 2: forward gives 127 elements of F32, {rows}")),
        (0, Fault::RowType, format!("microbatch 2: forward gives 128 elements of F64, {rows}")),
        (0, Fault::LossForRows, "microbatch 2: forward gives a loss, expected rows".to_owned()),
        (1, Fault::RowsForLoss, "microbatch 2: forward gives rows, expected a loss".to_owned()),
        (1, Fault::Loss, "microbatch 2: forward gives 2 elements of F64 as loss".to_owned()),
        (1, Fault::Gradient, format!("{gradient} 129 elements of F32, {rows}")),
        (1, Fault::NoGradient, format!("{gradient} nothing, {rows}")),
    ] {
        for schedule in [ScheduleKind::OneForwardOneBackward, ScheduleKind::ZeroBubble] {
            let layout = ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, 2);
            let setting = Setting {
                schedule,
                stages: Arc::new(move |_, range, stage| {
                    let is_faulty = range.layers.start == 2 * rank;
                    Ok(if is_faulty { Faulty(stage, fault).boxed() } else { stage.boxed() })
                }),
                ..Setting::new(&model, vec![layout])
            };
            let expected = format!("stage Llm {}..{}, {expected}", 2 * rank, 2 * rank + 2);
            for (of, error) in run_failing::<B>(&setting, (&samples, &cut), &|_, _| {}).iter().enumerate() {
                let error = error.to_string();
                assert!(error.contains(&expected), "{fault:?}, rank {of}: {error}");
                assert!(of != rank || error.starts_with(&expected), "{fault:?}: {error}");
            }
        }
    }
}

/// Rows between an encoder and the LLM: microbatch 2 has one image of 4 tokens.
fn tokens_and_their_gradients_of_another_size_end_all_ranks_by_stage_and_microbatch<B: TestBackend>() {
    let model = with_encoders(true, false);
    let samples: Vec<Sample> =
        (0..4).map(|seed| sample(seed, vec![Item::Image { grid: [4, 4], seed }])).collect();
    let rows = "expected 4 rows of 16 elements of F32";
    let vision = format!("stage Vision 0..2, microbatch 2: forward gives 63 elements of F32, {rows}");
    let gradient = "backward gives, as gradient of the input, 65 elements of F32";
    let llm = format!("stage Llm 0..4, microbatch 2: {gradient}, {rows}");
    for (module, fault, expected) in
        [(ModuleKind::Vision, Fault::Rows, vision), (ModuleKind::Llm, Fault::Gradient, llm)]
    {
        let layout = |of: ModuleKind| ModuleParallelism::even(of, model.layers(of), 1);
        let setting = Setting {
            stages: Arc::new(move |_, range, stage| {
                Ok(if range.module == module { Faulty(stage, fault).boxed() } else { stage.boxed() })
            }),
            modules: model.modules().into_iter().map(layout).collect(),
            ..Setting::new(&model, Vec::new())
        };
        for error in run_failing::<B>(&setting, (&samples, &round_robin(4, 4)), &|_, _| {}) {
            assert!(error.to_string().contains(&expected), "{error}");
        }
    }
}

fn stages_that_do_not_fit_the_job_are_refused_before_the_first_step<B: TestBackend>() {
    let (samples, cut) = (texts(4), round_robin(4, 4));
    let layout = || ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, 2);
    let untrained = Setting {
        stages: Arc::new(|_, _, stage| Ok(Faulty(stage, Fault::NoBackward).boxed())),
        ..Setting::new(&language_model(false), vec![layout()])
    };
    let errors = run_failing::<B>(&untrained, (&samples, &cut), &|_, _| {});
    // Both ranks reject; the first rank may end the job before the second has checked.
    let refused = |expected: &str| errors.iter().any(|error| error.to_string().contains(expected));
    let found = ["Llm 0..2 and stage 0", "Llm 2..4 and stage 1"]
        .map(|stage| format!("{stage} differ in what is trained"));
    assert!(found.iter().any(|expected| refused(expected)), "{errors:?}");

    // the first rank would wait for the gradient of an embedding that the adapter does not train
    let errors = run_failing::<B>(&adapted(&language_model(true), layout()), (&samples, &cut), &|_, _| {});
    let expected = "invalid `stages`: on rank 1, adapter of layers 2..4 lacks `model.embed_tokens.weight`";
    assert!(errors[1].to_string().starts_with(expected), "{}", errors[1]);
    assert!(errors[0].to_string().contains(expected), "{}", errors[0]);
}
