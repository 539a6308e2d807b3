//! Two ranks over NCCL, on the stand-ins: communicator cases, and a pipeline.

use std::sync::Arc;

use dflop_cuda::Cuda;
use dflop_cuda_tests::{OnCuda, OnNccl};
use dflop_device::conformance::{Case, cases};
use dflop_executor::pipeline::ModuleParallelism;
use dflop_models::ModuleKind;
use dflop_testing::TestBackend;
use dflop_testing::pipeline::batch::{LLM_LAYERS, language_model, round_robin, texts};
use dflop_testing::pipeline::job::{Setting, run_job};
use dflop_testing::support::{Transport, patient, run};

#[test]
fn two_ranks_pass_the_cases_of_communicators() {
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

/// Loss and gradients with two stages equal the host-message results bit by bit; sums over two replicas are
/// rounded in a different order.
#[test]
fn a_pipeline_over_nccl_is_one_through_the_host() {
    let (model, samples, cut) = (language_model(false), texts(5), round_robin(5, 4));
    let llm = |stages: usize| ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, stages);
    let stages = Setting::new(&model, vec![llm(2)]);
    let found = run_job::<OnNccl>(&stages, &samples, &cut).truth;
    let through_host = run_job::<OnCuda>(&stages, &samples, &cut).truth;
    assert_eq!(found, through_host);
    let replicas = Setting::new(&model, vec![llm(1).dp_size(2)]);
    through_host.assert_close(&run_job::<OnNccl>(&replicas, &samples, &cut).truth);
}
