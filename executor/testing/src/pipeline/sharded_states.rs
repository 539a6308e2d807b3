//! Optimizer state that replicas share: same bits as an update without sharing, a fraction of the memory, and
//! checkpoints that any layout can resume from.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use dflop_device::Runtime;
use dflop_executor::checkpoint::{CheckpointDirectory, RunState};
use dflop_executor::optimizer::{AdamWSettings, JobOptimizer, JobOptimizerSettings, LearningRate, Precision};
use dflop_executor::pipeline::{ModuleParallelism, PipelineStepPlan};
use dflop_models::ModuleKind;

use super::batch::{Cut, LLM_LAYERS, Sample, language_model, plan_microbatches, texts};
use super::job::{Setting, pipeline, work};
use crate::claim::claims;
use crate::device::TestBackend;
use crate::support::{Transport, run};

claims! {
    shared_states_give_the_bits_of_replicated_ones_with_a_part_of_the_memory,
    a_state_of_four_replicas_goes_on_with_one_and_three,
}

/// Number of microbatches in a step, a multiple of all DP sizes below.
const MICROBATCHES: usize = 12;

/// A training run.
#[derive(Clone)]
pub(crate) struct Run<'a> {
    pub(crate) stages: usize,
    pub(crate) dp_size: usize,
    pub(crate) precision: Precision,
    pub(crate) is_sharded: bool,
    /// Whether replicas that share the state also divide the gradients.
    pub(crate) is_divided: bool,
    pub(crate) gradient_norm_max: Option<f64>,
    pub(crate) steps: u64,
    pub(crate) transport: Transport,
    /// Directory that the run resumes from, if it has a state, and saves in.
    pub(crate) directory: Option<&'a Path>,
}

/// Results on a rank after a run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Trained {
    /// Losses and gradient norms in the steps taken.
    pub(crate) losses: Vec<f64>,
    pub(crate) norms: Vec<f64>,
    /// Weight bits, by name.
    pub(crate) weights: BTreeMap<String, Vec<u32>>,
    pub(crate) state_bytes: u64,
    pub(crate) state_elements: u64,
    /// Number of bytes that the rank has sent.
    pub(crate) sent_bytes: u64,
}

impl Run<'_> {
    pub(crate) fn ranks<B: TestBackend>(&self) -> Vec<Trained> {
        let model = language_model(true);
        let layout = ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, self.stages).dp_size(self.dp_size);
        // small buckets: every stage has several, and most do not divide by the number of replicas
        let setting = Setting { bucket_elements: 700, ..Setting::new(&model, vec![layout]) };
        let job = Arc::new(setting.job().unwrap());
        let samples = texts(MICROBATCHES);
        let cut: Cut = (0..MICROBATCHES).map(|sample| vec![sample]).collect();
        run(self.transport, job.world_size(), setting.comm, |comm| {
            let device = if self.precision == Precision::Bf16 { B::open_half(1) } else { B::open(1) };
            let mut pipeline = pipeline::<B>(&setting, &job, comm, &device).unwrap();
            let adamw = AdamWSettings { precision: self.precision, ..AdamWSettings::default() };
            let gradient_norm_max = self.gradient_norm_max;
            let settings = JobOptimizerSettings {
                adamw,
                gradient_norm_max,
                ..JobOptimizerSettings::new(LearningRate::constant(0.01))
            };
            let stages: Vec<_> = pipeline.stages().map(|(_, stage)| stage).collect();
            let mut optimizer = JobOptimizer::<B::Device>::new(settings, pipeline.comm(), stages).unwrap();
            if self.is_sharded {
                optimizer = optimizer.shard_states(pipeline.replicas());
            }
            if self.is_divided {
                pipeline = pipeline.shard_gradients();
            }
            let checkpoints = self.directory.map(CheckpointDirectory::new);
            if let Some(saved) = checkpoints.as_ref().and_then(|all| all.latest(pipeline.comm()).unwrap()) {
                optimizer.restore(pipeline.stages_mut(), &saved).unwrap();
            }
            let roles = pipeline.roles().to_vec();
            let targets = samples.iter().map(Sample::target_tokens).sum();
            let (mut losses, mut norms) = (Vec::new(), Vec::new());
            while optimizer.steps() < self.steps {
                let plan = PipelineStepPlan::new(
                    &job,
                    optimizer.steps(),
                    targets,
                    plan_microbatches(&samples, &cut),
                );
                let work = work(&job, &roles, &Arc::new(plan.unwrap()), &samples, &cut, &device);
                let reads = device.reads();
                let step = pipeline.start(&work).unwrap();
                let (outcome, update) = optimizer.update_step(&step, pipeline.stages_mut()).unwrap();
                assert_eq!(device.reads() - reads, 1, "a training step waits for the device once");
                losses.push(outcome.loss);
                norms.push(update.gradient_norm);
            }
            if let Some(checkpoints) = checkpoints {
                let stages = pipeline.stages().map(|(_, stage)| stage);
                checkpoints.save(&optimizer, stages, &RunState::default()).unwrap();
            }
            let sent_bytes = pipeline.tensors().bytes_sent();
            let mut weights = BTreeMap::new();
            let mut state_elements = 0;
            for (_, stage) in pipeline.stages() {
                for (spec, values) in stage.parameters().owned() {
                    let values = device.download(values).unwrap();
                    state_elements += values.len() as u64;
                    weights.insert(spec.name.clone(), values.into_iter().map(f32::to_bits).collect());
                }
            }
            let state_bytes = optimizer.adamw().bytes();
            Trained { losses, norms, weights, state_bytes, state_elements, sent_bytes }
        })
    }
}

pub(crate) fn run_with_precision(precision: Precision) -> Run<'static> {
    Run {
        stages: 2,
        dp_size: 4,
        precision,
        is_sharded: true,
        is_divided: false,
        gradient_norm_max: Some(1.0),
        steps: 3,
        transport: Transport::Threads,
        directory: None,
    }
}

fn shared_states_give_the_bits_of_replicated_ones_with_a_part_of_the_memory<B: TestBackend>() {
    for (precision, bytes_each) in [(Precision::F32, 8), (Precision::Bf16, 12)] {
        for stages in [1, 2] {
            let sharded = Run { stages, ..run_with_precision(precision) };
            let replicated = Run { is_sharded: false, ..sharded.clone() };
            let (sharded, replicated) = (sharded.ranks::<B>(), replicated.ranks::<B>());
            for (rank, (own, whole)) in sharded.iter().zip(&replicated).enumerate() {
                assert_eq!((&own.losses, &own.norms), (&whole.losses, &whole.norms), "rank {rank}");
                assert_eq!(own.weights, whole.weights, "rank {rank}");
                assert_eq!(whole.state_bytes, bytes_each * whole.state_elements);
                // a bucket that does not divide by 4 has parts that differ by one element
                let quarter = whole.state_bytes as f64 / 4.0;
                assert!(
                    (own.state_bytes as f64 - quarter).abs() < 0.02 * quarter,
                    "{} of {quarter}",
                    own.state_bytes
                );
            }
            let of_replicas: u64 = sharded.iter().map(|own| own.state_bytes).sum();
            let once: u64 = replicated.iter().map(|whole| whole.state_bytes).sum::<u64>() / 4;
            assert_eq!(of_replicas, once, "every element has its state on one replica");
        }
    }
}

fn a_state_of_four_replicas_goes_on_with_one_and_three<B: TestBackend>() {
    let straight =
        Run { steps: 5, is_sharded: false, ..run_with_precision(Precision::F32) }.ranks::<B>().remove(0);
    for (dp_size, stages, is_sharded) in
        [(4, 2, true), (4, 2, false), (1, 1, false), (3, 2, true), (3, 1, true)]
    {
        let directory = tempfile::tempdir().unwrap();
        let saved = Run { steps: 2, directory: Some(directory.path()), ..run_with_precision(Precision::F32) };
        saved.ranks::<B>();
        let resumed = Run { dp_size, stages, is_sharded, steps: 5, ..saved }.ranks::<B>().remove(0);
        let pairs = straight.losses[2..].iter().zip(&resumed.losses);
        for (straight, resumed) in pairs.chain(straight.norms[2..].iter().zip(&resumed.norms)) {
            let relative = (straight - resumed).abs() / straight;
            assert!(relative < 1e-5, "{dp_size} replicas: {straight} {resumed}");
            assert!(
                dp_size != 4 || straight.to_bits() == resumed.to_bits(),
                "the same layout goes on with the same bits"
            );
        }
    }
}
