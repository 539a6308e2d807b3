//! Language models without encoders: stages, schedules, replicas.

use std::sync::Arc;

use dflop_balancer::schedule::{ModuleStages, PipelineLayout, ScheduleKind};
use dflop_device::{Dtype, Runtime};
use dflop_executor::pipeline::{ModuleParallelism, PipelineStepPlan};
use dflop_executor::train::join_job;
use dflop_models::weights::Seed;
use dflop_models::{Activations, FrozenModules, ModuleKind};

use super::batch::{LLM_LAYERS, Sample, language_model, plan_microbatches, round_robin, texts};
use super::job::{Setting, pipeline, run_job, work};
use super::reference::one_by_one;
use crate::claim::claims;
use crate::device::TestBackend;
use crate::support::{Transport, run};

claims! {
    any_number_of_stages_gives_the_same_bits,
    what_runs_is_the_list_of_the_balancer,
    schedules_and_recomputation_give_the_same_bits,
    replicas_and_cuts_change_nothing_but_rounding,
    stages_of_replicas_give_the_bits_of_whole_ones,
    sums_of_gradients_in_buckets_of_any_size_have_the_same_bits,
    a_rank_without_samples_neither_hangs_nor_changes_a_gradient,
    counted_tokens_may_differ_from_planned_ones,
    ranks_that_share_a_stage_run_the_same_list,
    rows_of_bf16_take_half_the_bytes,
    tensor_parallel_ranks_may_compute_on_one_thread,
}

fn llm(stages: usize) -> ModuleParallelism {
    ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, stages)
}

fn any_number_of_stages_gives_the_same_bits<B: TestBackend>() {
    let (samples, cut) = (texts(9), round_robin(9, 4));
    for is_tied in [false, true] {
        let model = language_model(is_tied);
        let whole = run_job::<B>(&Setting::new(&model, vec![llm(1)]), &samples, &cut);
        one_by_one::<B>(&model, FrozenModules::default(), &samples).assert_close(&whole.truth);
        for transport in [Transport::Threads, Transport::Tcp] {
            for layout in [llm(2), llm(4), ModuleParallelism::new(ModuleKind::Llm, vec![0..3, 3..4])] {
                let setting = Setting { transport, steps: 2, ..Setting::new(&model, vec![layout]) };
                assert_eq!(run_job::<B>(&setting, &samples, &cut).truth, whole.truth);
            }
        }
    }
}

fn what_runs_is_the_list_of_the_balancer<B: TestBackend>() {
    let (model, samples, cut) = (language_model(false), texts(6), round_robin(6, 4));
    let setting = Setting::new(&model, vec![llm(2).dp_size(2)]);
    let ran = run_job::<B>(&setting, &samples, &cut);
    let layout = PipelineLayout::from_modules(&[ModuleStages::new(2, 2)], 2).unwrap();
    let lists = layout.schedule(ScheduleKind::OneForwardOneBackward).unwrap();
    for (timeline, list) in ran.timelines.iter().zip(&lists) {
        assert!(timeline.iter().map(|timed| timed.action).eq(list.iter().copied()));
        assert!(timeline.iter().all(|timed| timed.start_ns <= timed.end_ns));
        assert!(timeline.windows(2).all(|pair| pair[0].end_ns <= pair[1].start_ns));
        let passes = timeline.iter().filter(|timed| timed.action.pass().is_some());
        assert!(passes.map(|timed| timed.busy_ns).all(|cpu_ns| cpu_ns > 0));
    }
}

fn schedules_and_recomputation_give_the_same_bits<B: TestBackend>() {
    let (model, samples, cut) = (language_model(true), texts(7), round_robin(7, 4));
    let whole = run_job::<B>(&Setting::new(&model, vec![llm(1)]), &samples, &cut).truth;
    let interleaved = ScheduleKind::Interleaved { chunks: 2 };
    for (schedule, stages) in [
        (ScheduleKind::GPipe, 2),
        (ScheduleKind::ZeroBubble, 1),
        (ScheduleKind::ZeroBubble, 2),
        (ScheduleKind::ZeroBubble, 4),
        (interleaved, 4),
        (interleaved, 2),
        (ScheduleKind::Interleaved { chunks: 4 }, 4),
    ] {
        for activations in [Activations::Stored, Activations::Recomputed] {
            let setting = Setting { schedule, activations, ..Setting::new(&model, vec![llm(stages)]) };
            assert_eq!(run_job::<B>(&setting, &samples, &cut).truth, whole, "{schedule} {stages}");
        }
    }
}

fn replicas_and_cuts_change_nothing_but_rounding<B: TestBackend>() {
    let samples = texts(12);
    for is_tied in [false, true] {
        let model = language_model(is_tied);
        let truth = one_by_one::<B>(&model, FrozenModules::default(), &samples);
        for (dp_size, microbatches, stages) in [(1, 6, 1), (2, 6, 2), (3, 6, 1), (3, 3, 2), (2, 12, 1)] {
            let setting = Setting::new(&model, vec![llm(stages).dp_size(dp_size)]);
            truth.assert_close(&run_job::<B>(&setting, &samples, &round_robin(12, microbatches)).truth);
        }
        let interleaved = Setting {
            schedule: ScheduleKind::Interleaved { chunks: 2 },
            ..Setting::new(&model, vec![llm(4).dp_size(2)])
        };
        truth.assert_close(&run_job::<B>(&interleaved, &samples, &round_robin(12, 4)).truth);
        let split = Setting {
            schedule: ScheduleKind::ZeroBubble,
            bucket_elements: 500,
            ..Setting::new(&model, vec![llm(2).dp_size(3)])
        };
        truth.assert_close(&run_job::<B>(&split, &samples, &round_robin(12, 6)).truth);
    }
}

fn stages_of_replicas_give_the_bits_of_whole_ones<B: TestBackend>() {
    let (model, samples, cut) = (language_model(true), texts(8), round_robin(8, 4));
    let whole = run_job::<B>(&Setting::new(&model, vec![llm(1).dp_size(2)]), &samples, &cut).truth;
    for transport in [Transport::Threads, Transport::Tcp] {
        let setting = Setting { transport, ..Setting::new(&model, vec![llm(2).dp_size(2)]) };
        assert_eq!(run_job::<B>(&setting, &samples, &cut).truth, whole);
    }
}

/// Sums start layer by layer in the last backward pass, also on ranks with an empty last microbatch or
/// without work.
fn sums_of_gradients_in_buckets_of_any_size_have_the_same_bits<B: TestBackend>() {
    let samples = texts(4);
    for is_tied in [false, true] {
        let model = language_model(is_tied);
        for cut in [vec![vec![0], vec![1], vec![2, 3], vec![]], vec![vec![0, 1], vec![], vec![2, 3], vec![]]]
        {
            let setting = Setting::new(&model, vec![llm(2).dp_size(2)]);
            let whole = run_job::<B>(&setting, &samples, &cut).truth;
            for bucket_elements in [1, 500, 5000] {
                let setting = Setting { bucket_elements, steps: 2, ..setting.clone() };
                assert_eq!(run_job::<B>(&setting, &samples, &cut).truth, whole);
            }
        }
    }
}

fn a_rank_without_samples_neither_hangs_nor_changes_a_gradient<B: TestBackend>() {
    let (model, samples) = (language_model(true), texts(3));
    let truth = one_by_one::<B>(&model, FrozenModules::default(), &samples);
    for cut in [vec![vec![0, 1], vec![], vec![2], vec![]], vec![vec![], vec![1], vec![], vec![2, 0]]] {
        let setting = Setting::new(&model, vec![llm(2).dp_size(2)]);
        truth.assert_close(&run_job::<B>(&setting, &samples, &cut).truth);
    }
}

/// Texts planned from an estimate; a microbatch planned with tokens turns out to have none.
fn counted_tokens_may_differ_from_planned_ones<B: TestBackend>() {
    let (model, samples) = (language_model(true), texts(4));
    let cut = vec![vec![0, 1], vec![2], vec![3], vec![]];
    let setting = Setting::new(&model, vec![llm(2).dp_size(2)]);
    let whole = run_job::<B>(&setting, &samples, &cut).truth;
    let estimated = Setting { surplus_tokens: 3, ..setting };
    assert_eq!(run_job::<B>(&estimated, &samples, &cut).truth, whole);
}

/// TP ranks that share a pipeline rank and each compute the complete stage, so that all must have the same
/// values.
fn ranks_that_share_a_stage_run_the_same_list<B: TestBackend>() {
    let (model, samples, cut) = (language_model(true), texts(6), round_robin(6, 4));
    let whole = run_job::<B>(&Setting::new(&model, vec![llm(1).dp_size(2)]), &samples, &cut).truth;
    let setting = Setting::new(&model, vec![llm(2).dp_size(2).tp_size(2)]);
    let setting = Setting { is_sharded: false, ..setting };
    assert_eq!(run_job::<B>(&setting, &samples, &cut).truth, whole);
}

/// Two stages exchange rows and gradients in the storage type of the device.
fn rows_of_bf16_take_half_the_bytes<B: TestBackend>() {
    let (model, samples, cut) = (language_model(false), texts(4), round_robin(4, 4));
    let setting = Setting::new(&model, vec![llm(2)]);
    let job = Arc::new(setting.job().unwrap());
    let targets = samples.iter().map(Sample::target_tokens).sum();
    let plan = Arc::new(PipelineStepPlan::new(&job, 0, targets, plan_microbatches(&samples, &cut)).unwrap());
    let bytes = |is_half: bool| -> Vec<u64> {
        run(setting.transport, job.world_size(), setting.comm, |comm| {
            let device = if is_half { B::open_half(1) } else { B::open(1) };
            let mut pipeline = pipeline::<B>(&setting, &job, comm, &device).unwrap().check_plans(false);
            let work = work(&job, pipeline.roles(), &plan, &samples, &cut, &device);
            let before = pipeline.tensors().bytes_sent();
            // Nothing but rows is sent before the losses are read.
            let step = pipeline.start(&work).unwrap();
            let rows = device.zeros_as(Dtype::F64, 1).unwrap();
            device.read(&rows).unwrap();
            let sent = pipeline.tensors().bytes_sent() - before;
            step.read().unwrap();
            sent
        })
    };
    let (full, half) = (bytes(false), bytes(true));
    let rows: usize = samples.iter().map(Sample::tokens).sum();
    assert_eq!(full, [(4 * rows * model.llm.hidden()) as u64; 2], "forward, and the same back");
    assert!(full.iter().zip(&half).all(|(full, half)| *half == full / 2), "{full:?} {half:?}");
}

/// A rank that waits for the sum in a layer holds no thread of a device that the other rank computes on.
fn tensor_parallel_ranks_may_compute_on_one_thread<B: TestBackend>() {
    let (model, samples, cut) = (language_model(false), texts(4), round_robin(4, 4));
    let setting = Setting::<B::Device>::new(&model, vec![llm(2).tp_size(2)]);
    let job = Arc::new(setting.job().unwrap());
    let targets = samples.iter().map(Sample::target_tokens).sum();
    let plan = Arc::new(PipelineStepPlan::new(&job, 0, targets, plan_microbatches(&samples, &cut)).unwrap());
    let shared = B::open(1);
    let losses = run(setting.transport, job.world_size(), setting.comm, |comm| {
        let device = B::on_same_threads(&shared);
        let (frozen, stored) = (FrozenModules::default(), Activations::Stored);
        let pipeline = join_job(Box::new(comm), &job, &device, frozen, stored, &Seed(1));
        let mut pipeline = pipeline.unwrap();
        let work = work(&job, pipeline.roles(), &plan, &samples, &cut, &device);
        pipeline.step(&work).unwrap().loss
    });
    let truth = one_by_one::<B>(&model, FrozenModules::default(), &samples).loss;
    assert!(losses.iter().all(|loss| (loss - truth).abs() < 1e-6 * truth), "{losses:?} {truth}");
}
