//! Ranks whose messages would not match end the job before any is sent.

use std::sync::Arc;

use dflop_comm::Cause;
use dflop_executor::Error;
use dflop_executor::pipeline::{ModuleParallelism, PipelineStepPlan, RankStep};
use dflop_models::ModuleKind;

use super::batch::{Cut, LLM_LAYERS, Sample, language_model, plan_of, texts};
use super::device::{TestDevice, device};
use super::job::{Setting, run_failing, work};

#[test]
fn ranks_with_other_rows_are_named_before_they_send() {
    let samples = texts(4);
    let lengths: Vec<usize> = samples.iter().map(Sample::tokens).collect();
    assert!(lengths[0] != lengths[1], "the swapped microbatches differ");
    let cut: Cut = (0..4).map(|sample| vec![sample]).collect();
    let swapped: Cut = [1, 0, 2, 3].map(|sample| vec![sample]).to_vec();
    let stages = vec![ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, 2)];
    let setting = Setting { is_plan_checked: false, ..Setting::new(&language_model(false), stages) };
    let other = |rank: usize, step: &mut RankStep<TestDevice>| {
        if rank == 1 {
            let job = setting.job().unwrap();
            let targets = samples.iter().map(Sample::target_tokens).sum();
            let plan = PipelineStepPlan::new(&job, 0, targets, plan_of(&samples, &swapped)).unwrap();
            let (plan, roles) = (Arc::new(plan), job.roles(rank).unwrap());
            *step = work(&job, &roles, &plan, &samples, &swapped, &device(1));
        }
    };
    for error in run_failing(&setting, (&samples, &cut), &other) {
        let Error::Comm(error) = error else { panic!("expected the failure of the job, found {error}") };
        let failure = error.failure().expect("the job is over");
        assert_eq!(failure.cause, Cause::Mismatch, "{failure}");
        assert!(failure.message.contains("messages of step 0 differ: rank 0 sends 4 messages"), "{failure}");
        assert!(failure.message.contains("of activations to rank 1, which expects 4"), "{failure}");
    }
}
