//! Messages that are late or differ end the job on all ranks, naming step, microbatch and action.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dflop_comm::{Cause, Settings};
use dflop_device::Cpu;
use dflop_executor::Error;
use dflop_executor::pipeline::{ModuleParallelism, RankStep};
use dflop_models::ModuleKind;

use super::batch::{Cut, LLM_LAYERS, language_model, texts};
use super::job::{Setting, run_failing};
use crate::claim::claims;

claims! {
    cpu:
    a_rank_that_hangs_ends_all_ranks_within_the_time_limit,
    stages_with_different_texts_are_told_apart,
}

/// The waiting ranks name the rank that is late, and the message that they wait for.
fn a_rank_that_hangs_ends_all_ranks_within_the_time_limit() {
    let (samples, cut): (_, Cut) = (texts(4), (0..4).map(|sample| vec![sample]).collect());
    let limit = Duration::from_millis(300);
    let setting = Setting {
        is_plan_checked: false,
        comm: Settings::default().wait(limit).slow(limit),
        ..Setting::new(&language_model(false), vec![ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, 2)])
    };
    let start = Instant::now();
    let late = |rank: usize, _: &mut RankStep<_>| {
        if rank == 1 {
            std::thread::sleep(4 * limit);
        }
    };
    let errors = run_failing::<Cpu>(&setting, (&samples, &cut), &late);
    assert!(start.elapsed() < 20 * limit);
    for error in &errors {
        let Error::Comm(error) = error else { panic!("{error}") };
        let failure = error.failure().expect("the job is over");
        assert_eq!((failure.cause, failure.culprit), (Cause::TimedOut, Some(1)), "{error}");
        assert!(error.to_string().contains("step 0, microbatch 0, `recv gradient, stage 0`"), "{error}");
    }
}

/// Two stages in a replica with different lengths for the same text.
fn stages_with_different_texts_are_told_apart() {
    let (samples, cut): (_, Cut) = (texts(4), (0..4).map(|sample| vec![sample]).collect());
    let exchanged = |rank: usize, work: &mut RankStep<_>| {
        if rank == 2 {
            let (first, last) = (
                Arc::clone(&work.contexts[&(ModuleKind::Llm, 1)]),
                Arc::clone(&work.contexts[&(ModuleKind::Llm, 3)]),
            );
            work.contexts.extend([((ModuleKind::Llm, 1), last), ((ModuleKind::Llm, 3), first)]);
        }
    };
    let stages = vec![ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, 2).dp_size(2)];
    let setting = Setting::new(&language_model(false), stages);
    for error in run_failing::<Cpu>(&setting, (&samples, &cut), &exchanged) {
        let Error::Comm(error) = &error else { panic!("{error}") };
        let failure = error.failure().expect("the job is over");
        assert_eq!((failure.cause, failure.culprit), (Cause::Mismatch, Some(2)), "{error}");
        assert!(error.to_string().contains("[4 x 16] at step 0, microbatch 1, `send, stage 0`"), "{error}");
    }
}
