//! Two ranks over NCCL, on the stand-ins: communicator cases and a pipeline.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dflop_balancer::schedule::ScheduleKind;
use dflop_cuda::Cuda;
use dflop_cuda_tests::{OnCuda, OnNccl, OnQueues};
use dflop_device::conformance::{Case, cases};
use dflop_executor::pipeline::ModuleParallelism;
use dflop_models::ModuleKind;
use dflop_testing::TestBackend;
use dflop_testing::pipeline::batch::{LLM_LAYERS, language_model, round_robin, texts};
use dflop_testing::pipeline::job::{Setting, run_job};
use dflop_testing::support::{Transport, patient, run};

/// Serializes tests: a job through the host uses a device that a job over NCCL might need.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn two_ranks_pass_the_cases_of_communicators() {
    let _turn = turn();
    let of_two = |case: &Case<Cuda>| case.sizes.contains(&2);
    let cases: Vec<Case<Cuda>> = cases().into_iter().filter(of_two).collect();
    assert!(cases.len() > 10, "most cases are for two ranks");
    for case in cases {
        run(Transport::Threads, 2, patient(), |comm| {
            let device = OnNccl::open(1);
            let comm = OnNccl::tensors(&device, Arc::new(comm)).unwrap();
            case.run(&device, &*comm);
        });
    }
}

/// With two stages, loss and gradients are bitwise equal to a run with messages through the host; sums over
/// two replicas are rounded in a different order.
#[test]
fn a_pipeline_over_nccl_is_one_through_the_host() {
    let _turn = turn();
    let (model, samples, cut) = (language_model(false), texts(5), round_robin(5, 4));
    let llm = |stages: usize| ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, stages);
    let stages = Setting::new(&model, vec![llm(2)]);
    let found = run_job::<OnNccl>(&stages, &samples, &cut).truth;
    let through_host = run_job::<OnCuda>(&stages, &samples, &cut).truth;
    assert_eq!(found, through_host);
    let replicas = Setting::new(&model, vec![llm(1).dp_size(2)]);
    through_host.assert_close(&run_job::<OnNccl>(&replicas, &samples, &cut).truth);
}

/// Ranks that are threads in the same process leave no state that a later job in the process uses.
#[test]
fn jobs_over_nccl_follow_jobs_through_the_host() {
    let _turn = turn();
    let (model, samples, cut) = (language_model(false), texts(5), round_robin(5, 4));
    let stages = vec![ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, 2)];
    let setting = Setting::new(&model, stages);
    let through_host = run_job::<OnCuda>(&setting, &samples, &cut).truth;
    for _ in 0..3 {
        assert_eq!(run_job::<OnNccl>(&setting, &samples, &cut).truth, through_host);
        assert_eq!(run_job::<OnCuda>(&setting, &samples, &cut).truth, through_host);
    }
}

/// Four stages have up to four lanes on a rank, which need more queues than there are.
#[test]
fn messages_that_share_lanes_give_the_bits_of_separate_ones() {
    let _turn = turn();
    let (model, samples, cut) = (language_model(false), texts(7), round_robin(7, 6));
    for schedule in ScheduleKind::ALL {
        let modules = vec![ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, 4)];
        let setting = Setting { schedule, steps: 2, ..Setting::new(&model, modules) };
        if setting.job().is_err() {
            continue;
        }
        let separate = run_job::<OnNccl>(&setting, &samples, &cut).truth;
        assert_eq!(run_job::<OnCuda>(&setting, &samples, &cut).truth, separate, "{schedule}");
        // all lanes of the middle ranks are one; some are of two ranks
        assert_eq!(run_job::<OnQueues<5>>(&setting, &samples, &cut).truth, separate, "{schedule}");
        assert_eq!(run_job::<OnQueues<7>>(&setting, &samples, &cut).truth, separate, "{schedule}");
    }
}
