//! Ranks whose messages would not match end the job before any is sent.

use std::sync::Arc;

use dflop_comm::Cause;
use dflop_cuda::Cuda;
use dflop_cuda_tests::OnNccl;
use dflop_executor::Error;
use dflop_executor::pipeline::{ModuleParallelism, PipelineStepPlan, RankStep};
use dflop_models::ModuleKind;
use dflop_testing::pipeline::batch::{Cut, LLM_LAYERS, Sample, language_model, plan_microbatches, texts};
use dflop_testing::pipeline::job::{Setting, run_failing, work};
use dflop_testing::{Claim, TestBackend};

/// Lists the claims of this file.
pub(crate) fn claims() -> Vec<Claim> {
    let name = "pipeline::orders::ranks_with_other_rows_are_named_before_they_send";
    vec![Claim { name: name.to_owned(), run: Box::new(ranks_with_other_rows_are_named_before_they_send) }]
}

fn ranks_with_other_rows_are_named_before_they_send() {
    let samples = texts(4);
    let lengths: Vec<usize> = samples.iter().map(Sample::tokens).collect();
    assert!(lengths[0] != lengths[1], "the swapped microbatches differ");
    let cut: Cut = (0..4).map(|sample| vec![sample]).collect();
    let swapped: Cut = [1, 0, 2, 3].map(|sample| vec![sample]).to_vec();
    let stages = vec![ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, 2)];
    let setting = Setting { is_plan_checked: false, ..Setting::new(&language_model(false), stages) };
    let other = |rank: usize, step: &mut RankStep<Cuda>| {
        if rank == 1 {
            let job = setting.job().unwrap();
            let targets = samples.iter().map(Sample::target_tokens).sum();
            let plan =
                PipelineStepPlan::new(&job, 0, targets, plan_microbatches(&samples, &swapped)).unwrap();
            let (plan, roles) = (Arc::new(plan), job.roles(rank).unwrap());
            *step = work(&job, &roles, &plan, &samples, &swapped, &OnNccl::open(1));
        }
    };
    for error in run_failing::<OnNccl>(&setting, (&samples, &cut), &other) {
        let Error::Comm(error) = error else { panic!("expected the failure of the job, found {error}") };
        let failure = error.failure().expect("the job is over");
        assert_eq!(failure.cause, Cause::Mismatch, "{failure}");
        assert!(failure.message.contains("messages of step 0 differ: rank 0 sends 4 messages"), "{failure}");
        assert!(failure.message.contains("of activations to rank 1, which expects 4"), "{failure}");
    }
}
