//! Driver behavior while ranks wait for each other: calls in a step, and failures when the driver does not
//! answer.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dflop_comm::{Cause, Comm};
use dflop_cuda::Cuda;
use dflop_cuda_tests::OnNccl;
use dflop_cuda_tests::cuda::stand_in;
use dflop_device::{DeviceComm, Dtype, Lane, MessageLane, RowShape, Runtime, Transfer};
use dflop_executor::optimizer::{Decay, JobOptimizer, JobOptimizerSettings, LearningRate};
use dflop_executor::pipeline::{ModuleParallelism, PipelineStepPlan};
use dflop_executor::train::join_job_over;
use dflop_models::weights::Seed;
use dflop_models::{Activations, FrozenModules, ModuleKind};
use dflop_testing::TestBackend;
use dflop_testing::pipeline::batch::{Cut, LLM_LAYERS, Sample, language_model, plan_microbatches, texts};
use dflop_testing::pipeline::job::{Setting, work};
use dflop_testing::support::{Transport, patient, run};

use super::{at, brief, turn};

/// Calls that wait for nothing, or for a single event.
const ALLOWED: [&str; 13] = [
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuLaunchKernel",
    "cuMemAllocFromPoolAsync",
    "cuMemFreeAsync",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuStreamWaitEvent",
];
/// Call with which the host waits for step results, once per rank.
const WAIT: &str = "cuEventSynchronize";

#[test]
#[expect(clippy::print_stdout, reason = "`--nocapture` shows the list")]
fn a_step_calls_nothing_that_waits_for_the_whole_device() {
    const RANKS: u64 = 4;
    let _turn = turn();
    let model = language_model(false);
    let samples = texts(4);
    let cut: Cut = (0..4).map(|sample| vec![sample]).collect();
    let stages = vec![ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, 2).dp_size(2)];
    let job = Arc::new(Setting::<Cuda>::new(&model, stages).job().unwrap());
    let targets = samples.iter().map(Sample::target_tokens).sum();
    let calls = run(Transport::Threads, RANKS as usize, patient(), |comm| {
        let device = OnNccl::open_half(1);
        let host: Arc<dyn Comm> = Arc::new(comm);
        let comm = OnNccl::tensors(&device, Arc::clone(&host)).unwrap();
        let (frozen, stored) = (FrozenModules::default(), Activations::Stored);
        let mut pipeline = join_job_over(comm, &job, &device, frozen, stored, &Seed(1)).unwrap();
        let rate = LearningRate { peak: 1e-2, warmup_steps: 0, decay: Decay::Constant };
        let stages: Vec<_> = pipeline.stages().map(|(_, stage)| stage).collect();
        let mut optimizer = JobOptimizer::new(JobOptimizerSettings::new(rate), pipeline.comm(), stages)
            .unwrap()
            .exchange_over(pipeline.tensors());
        let mut calls = BTreeMap::new();
        for step in 0..3 {
            let plan = PipelineStepPlan::new(&job, step, targets, plan_microbatches(&samples, &cut)).unwrap();
            let plan = Arc::new(plan);
            let work = work(&job, pipeline.roles(), &plan, &samples, &cut, &device);
            host.barrier(at(step)).unwrap();
            let before = stand_in().calls();
            host.barrier(at(step)).unwrap();
            let unread = pipeline.start(&work).unwrap();
            optimizer.update_step(&unread, pipeline.stages_mut()).unwrap();
            host.barrier(at(step)).unwrap();
            calls = stand_in().calls();
            for (name, count) in &mut calls {
                *count -= before.get(name).unwrap_or(&0);
            }
            calls.retain(|_, count| *count > 0);
            host.barrier(at(step)).unwrap();
        }
        calls
    });
    println!("calls of a step of {RANKS} ranks: {:#?}", calls[0]);
    let allowed: BTreeSet<&str> = ALLOWED.into_iter().chain([WAIT]).collect();
    let others: Vec<&String> = calls[0].keys().filter(|name| !allowed.contains(name.as_str())).collect();
    assert!(others.is_empty(), "{others:?}");
    assert_eq!(calls[0][WAIT], RANKS, "each rank waits once");
}

/// Opens a lane between two ranks, and posts a receive on rank 0.
fn posted(device: &Cuda, comm: &dyn DeviceComm<Cuda>) -> Option<Transfer<Cuda>> {
    comm.open_lanes(at(0), &BTreeSet::from([MessageLane { from: 1, to: 0, flow: 0 }])).unwrap();
    let now = device.mark(Lane::Compute).unwrap();
    let shape = RowShape { dtype: Dtype::F32, rows: 1, cols: 4 };
    (comm.host().rank() == 0).then(|| comm.recv(1, 0, at(1), shape, &now).unwrap())
}

#[test]
fn a_kernel_that_would_load_behind_a_receive_is_an_error() {
    use dflop_device::ops::elementwise::Elementwise;
    let _turn = turn();
    run(Transport::Threads, 2, patient(), |comm| {
        let device = OnNccl::open(1);
        let comm = OnNccl::tensors(&device, Arc::new(comm)).unwrap();
        let mut values = device.zeros_as(Dtype::F32, 4).unwrap();
        let receive = posted(&device, &*comm);
        if receive.is_some() {
            let refused = device.scale(2.0, &mut values).unwrap_err().to_string();
            assert!(
                refused.contains("scale is loaded while a message of another rank is awaited"),
                "{refused}"
            );
            // as large as no earlier copy, and not page-locked
            let long = vec![1.0; 1 << 16];
            assert_eq!(device.download(&device.upload(&long).unwrap()).unwrap(), long);
        }
        comm.host().barrier(at(2)).unwrap();
        if let Some(receive) = receive {
            drop(receive.wait(Lane::Compute).unwrap());
        } else {
            let now = device.mark(Lane::Compute).unwrap();
            let send = comm.send(0, 0, at(1), device.zeros_as(Dtype::F32, 4).unwrap(), 4, &now).unwrap();
            drop(send.wait(Lane::Compute).unwrap());
        }
        // with no message on its way, the kernel loads
        device.download(&values).unwrap();
        device.scale(2.0, &mut values).unwrap();
        comm.host().barrier(at(3)).unwrap();
    });
}

#[test]
fn a_late_load_of_a_release_build_waits_for_the_messages() {
    use dflop_device::ops::elementwise::Elementwise;
    const PAUSE: Duration = Duration::from_millis(400);
    let _turn = turn();
    run(Transport::Threads, 2, patient(), |comm| {
        let device = OnNccl::open_with_late_loads();
        let comm = OnNccl::tensors(&device, Arc::new(comm)).unwrap();
        let mut values = device.upload(&[3.0; 4]).unwrap();
        let receive = posted(&device, &*comm);
        comm.host().barrier(at(2)).unwrap();
        if let Some(receive) = receive {
            let begin = Instant::now();
            device.scale(2.0, &mut values).unwrap();
            let waited = begin.elapsed();
            assert!(waited >= PAUSE / 2 && waited < Duration::from_secs(5), "{waited:?}");
            assert_eq!(device.download(&values).unwrap(), [6.0; 4]);
            drop(receive.wait(Lane::Compute).unwrap());
        } else {
            std::thread::sleep(PAUSE);
            let now = device.mark(Lane::Compute).unwrap();
            let send = comm.send(0, 0, at(1), device.zeros_as(Dtype::F32, 4).unwrap(), 4, &now).unwrap();
            drop(send.wait(Lane::Compute).unwrap());
        }
        comm.host().barrier(at(3)).unwrap();
    });
}

/// Several ranks need all kernels loaded when the process first uses the driver; a single-rank job waits for
/// no messages.
#[test]
fn kernels_that_load_at_their_first_launch_are_refused() {
    let _turn = turn();
    for ranks in [1, 2] {
        let refused = run(Transport::Threads, ranks, patient(), |comm| {
            let device = OnNccl::open(1);
            let host: Arc<dyn Comm> = Arc::new(comm);
            host.barrier(at(0)).unwrap();
            stand_in().set_eager_loading(false);
            host.barrier(at(0)).unwrap();
            let joined = OnNccl::tensors(&device, Arc::clone(&host));
            (joined.err().map(|error| error.to_string()), host)
        });
        for (text, _) in refused {
            let is_refused = text.is_some_and(|text| {
                text.contains("`CUDA_MODULE_LOADING`: expected EAGER") && text.contains("found LAZY")
            });
            assert_eq!(is_refused, ranks > 1);
        }
    }
    stand_in().set_eager_loading(true);
}

#[test]
fn a_driver_that_does_not_answer_ends_the_job_in_time() {
    let _turn = turn();
    let begin = Instant::now();
    let failures = run(Transport::Threads, 2, brief(), |comm| {
        let device = OnNccl::open(1);
        let comm = OnNccl::tensors(&device, Arc::new(comm)).unwrap();
        let receive = posted(&device, &*comm);
        if receive.is_some() {
            // once the lane's thread has queued the receive, other code of the process waits for the device
            std::thread::sleep(Duration::from_millis(300));
            stand_in().synchronize_contexts();
        }
        let host = comm.shared_host();
        while host.failure().is_none() {
            std::thread::sleep(Duration::from_millis(20));
        }
        (host.failure().unwrap(), host)
    });
    for (failure, _) in &failures {
        assert_eq!(failure.cause, Cause::TimedOut, "{failure}");
        assert!(
            failure.message.contains("rank 0: the driver of its device has not answered for"),
            "{failure}"
        );
    }
    assert!(begin.elapsed() < Duration::from_secs(8), "{:?}", begin.elapsed());
}
