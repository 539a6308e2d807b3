//! Gradients that replicas divide: same bits as complete gradients for fewer bytes, and weights that are
//! gathered while the next step runs.

use std::sync::Arc;

use dflop_comm::Comm;
use dflop_device::{Device, Runtime};
use dflop_executor::Error;
use dflop_executor::optimizer::{JobOptimizer, JobOptimizerSettings, LearningRate, Precision};
use dflop_executor::pipeline::{ModuleParallelism, PipelineRank, PipelineStepPlan, RankStep, StepOutcome};
use dflop_models::ModuleKind;

use super::batch::{Cut, LLM_LAYERS, Sample, language_model, plan_microbatches, texts};
use super::job::{Setting, pipeline, work};
use super::sharded_states::{Run, run_with_precision};
use crate::claim::claims;
use crate::device::TestBackend;
use crate::support::{ALL, Transport, run};

claims! {
    divided_gradients_give_the_bits_of_whole_ones_for_fewer_bytes,
    clipped_weights_agree_to_rounding,
    a_run_with_divided_gradients_resumes_with_the_bits_of_an_uninterrupted_one,
    a_gradient_of_a_part_that_is_no_number_ends_the_job_by_tensor,
    a_rank_that_fails_while_weights_are_gathered_ends_all,
    divided_gradients_need_shared_states,
}

pub(crate) const MICROBATCHES: usize = 4;

fn divided_gradients_give_the_bits_of_whole_ones_for_fewer_bytes<B: TestBackend>() {
    for precision in [Precision::F32, Precision::Bf16] {
        for (stages, dp_size) in [(1, 3), (2, 4)] {
            // Without clipping, weights depend only on gradients.
            let whole = Run { stages, dp_size, gradient_norm_max: None, ..run_with_precision(precision) };
            let divided = Run { is_divided: true, ..whole.clone() };
            let (whole, divided) = (whole.ranks::<B>(), divided.ranks::<B>());
            for (rank, (own, whole)) in divided.iter().zip(&whole).enumerate() {
                assert_eq!(own.losses, whole.losses, "rank {rank}");
                assert_eq!(own.weights, whole.weights, "rank {rank}");
                assert_eq!(own.norms, divided[0].norms, "all ranks have the bits of rank 0");
                for (own, whole) in own.norms.iter().zip(&whole.norms) {
                    // Squares are added in `f32` up to a point, and the parts begin elsewhere.
                    assert!((own - whole).abs() < 1e-6 * whole, "rank {rank}: {own} {whole}");
                }
                assert!(own.sent_bytes < whole.sent_bytes, "{} {}", own.sent_bytes, whole.sent_bytes);
            }
        }
    }
}

fn clipped_weights_agree_to_rounding<B: TestBackend>() {
    for transport in ALL {
        let whole = Run { gradient_norm_max: Some(0.01), transport, ..run_with_precision(Precision::F32) };
        let divided = Run { is_divided: true, ..whole.clone() };
        let (whole, divided) = (whole.ranks::<B>().remove(0), divided.ranks::<B>().remove(0));
        for (own, whole) in divided.losses.iter().zip(&whole.losses) {
            assert!((own - whole).abs() < 1e-6 * whole, "{own} {whole}");
        }
    }
}

fn a_run_with_divided_gradients_resumes_with_the_bits_of_an_uninterrupted_one<B: TestBackend>() {
    let run = Run { is_divided: true, ..run_with_precision(Precision::Bf16) };
    let straight = Run { steps: 4, ..run.clone() }.ranks::<B>();
    let directory = tempfile::tempdir().unwrap();
    let saved = Run { steps: 2, directory: Some(directory.path()), ..run };
    saved.ranks::<B>();
    let resumed = Run { steps: 4, ..saved }.ranks::<B>();
    for (straight, resumed) in straight.iter().zip(&resumed) {
        assert_eq!(straight.losses[2..], resumed.losses);
        assert_eq!(straight.norms[2..], resumed.norms);
        assert_eq!(straight.weights, resumed.weights);
    }
}

/// Rank with two stages and two replicas each, and an optimizer.
pub(crate) struct TestRank<D: Device> {
    pipeline: PipelineRank<D>,
    optimizer: JobOptimizer<D>,
    samples: Vec<Sample>,
    device: D,
}

impl<D: Device> TestRank<D> {
    pub(crate) fn new<B: TestBackend<Device = D>>(setting: &Setting<D>, comm: impl Comm + 'static) -> Self {
        let (device, job) = (B::open(1), Arc::new(setting.job().unwrap()));
        let pipeline = pipeline::<B>(setting, &job, comm, &device).unwrap();
        let settings = JobOptimizerSettings::new(LearningRate::constant(0.01));
        let stages: Vec<_> = pipeline.stages().map(|(_, stage)| stage).collect();
        let optimizer = JobOptimizer::new(settings, pipeline.comm(), stages).unwrap();
        let optimizer = optimizer.shard_states(pipeline.replicas());
        Self { pipeline: pipeline.shard_gradients(), optimizer, samples: texts(MICROBATCHES), device }
    }

    fn work(&self, step: u64) -> RankStep<D> {
        let cut: Cut = (0..MICROBATCHES).map(|sample| vec![sample]).collect();
        let job = self.pipeline.job();
        let targets = self.samples.iter().map(Sample::target_tokens).sum();
        let plan = PipelineStepPlan::new(job, step, targets, plan_microbatches(&self.samples, &cut)).unwrap();
        work(job, self.pipeline.roles(), &Arc::new(plan), &self.samples, &cut, &self.device)
    }

    pub(crate) fn step(&mut self, step: u64) -> Result<StepOutcome, Error> {
        let pending = self.pipeline.start(&self.work(step))?;
        Ok(self.optimizer.update_step(&pending, self.pipeline.stages_mut())?.0)
    }
}

pub(crate) fn setting<D: Device>(is_tied: bool) -> Setting<D> {
    let layout = ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, 2).dp_size(2);
    Setting { bucket_elements: 700, ..Setting::new(&language_model(is_tied), vec![layout]) }
}

fn a_gradient_of_a_part_that_is_no_number_ends_the_job_by_tensor<B: TestBackend>() {
    const TENSOR: &str = "model.layers.3.mlp.up_proj.weight";
    let setting = setting(false);
    let errors = run(Transport::Threads, 4, setting.comm, |comm| {
        let rank = comm.rank();
        let mut own = TestRank::new::<B>(&setting, comm);
        let pending = own.pipeline.start(&own.work(0)).unwrap();
        // The last rank does not own any tensor: it is the second replica.
        if rank == 3 {
            for stage in own.pipeline.stages_mut() {
                let all = stage.parameters_mut().trained_mut();
                for (_, _, gradient) in all.filter(|(spec, ..)| spec.name == TENSOR) {
                    own.device.write(&vec![f32::INFINITY; gradient.len()], gradient).unwrap();
                }
            }
        }
        own.optimizer.update_step(&pending, own.pipeline.stages_mut()).unwrap_err()
    });
    for error in &errors {
        assert!(error.to_string().contains(TENSOR), "{error}");
    }
    assert_eq!(errors.iter().filter(|error| matches!(error, Error::Gradient { .. })).count(), 1);
}

fn a_rank_that_fails_while_weights_are_gathered_ends_all<B: TestBackend>() {
    for transport in ALL {
        let setting = setting(true);
        let errors = run(transport, 4, setting.comm, |comm| {
            let rank = comm.rank();
            let mut own = TestRank::new::<B>(&setting, comm);
            // A device that computes late gathers at the end of its step, which may then fail.
            let first = own.step(0);
            if rank == 2 {
                first.unwrap();
                let at = dflop_comm::StepContext::step(1, "test");
                return own.pipeline.comm().abort(at, "on purpose").to_string();
            }
            first.and_then(|_| own.step(1)).unwrap_err().to_string()
        });
        for error in errors {
            assert!(error.contains("rank 2 ended the job: on purpose"), "{error}");
        }
    }
}

fn divided_gradients_need_shared_states<B: TestBackend>() {
    let setting = setting(false);
    let errors = run(Transport::Threads, 4, setting.comm, |comm| {
        let mut own = TestRank::new::<B>(&setting, comm);
        own.optimizer = own.optimizer.shard_states(Vec::new());
        own.step(0).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("share its gradients but no states"), "{error}");
    }
}
