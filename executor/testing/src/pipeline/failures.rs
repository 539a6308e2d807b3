//! A failure on one rank ends the job on all ranks, with the rank named.

use std::sync::Arc;

use dflop_comm::Cause;
use dflop_executor::Error;
use dflop_executor::pipeline::{ModuleParallelism, PipelineStepPlan, RankStep};
use dflop_models::ModuleKind;
use dflop_models::weights::ParameterSpec;
use dflop_models::weights::{Seed, WeightSource};

use super::batch::{
    Cut, Item, LLM_LAYERS, Sample, language_model, plan_microbatches, sample, texts, with_encoders,
};
use super::job::{Setting, Tamper, run_failing};
use crate::claim::claims;
use crate::device::TestBackend;
use crate::support::ALL;

claims! {
    a_loss_that_is_no_number_ends_all_ranks_with_stage_and_microbatch,
    a_missing_or_foreign_context_ends_all_ranks_by_microbatch,
    media_that_are_not_those_of_the_plan_end_all_ranks,
    ranks_with_different_plans_are_told_apart,
    a_context_with_the_loss_scale_of_another_step_ends_all_ranks,
}

/// Weights with NaN in the embedding of a single token.
struct Poisoned(usize);

impl WeightSource for Poisoned {
    fn values(&self, spec: &ParameterSpec) -> dflop_models::Result<Vec<f32>> {
        let mut values = Seed(1).values(spec)?;
        if spec.name == "model.embed_tokens.weight" {
            values[self.0 * spec.shape[1]] = f32::NAN;
        }
        Ok(values)
    }
}

fn two_stages() -> Vec<ModuleParallelism> {
    vec![ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, 2).dp_size(2)]
}

/// Returns errors from the ranks that did not fail themselves.
fn errors_of_others(errors: &[Error], culprit: usize) -> Vec<String> {
    let others = errors.iter().enumerate().filter(|(rank, _)| *rank != culprit);
    others
        .map(|(rank, error)| {
            let Error::Comm(error) = error else { panic!("rank {rank}: {error}") };
            let failure = error.failure().expect("the job is over");
            assert_eq!(
                (failure.cause, failure.culprit),
                (Cause::Caller, Some(culprit)),
                "rank {rank}: {error}"
            );
            error.to_string()
        })
        .collect()
}

/// Token 45 is only in microbatch 3, which the second replica runs; the second stage has the loss.
fn a_loss_that_is_no_number_ends_all_ranks_with_stage_and_microbatch<B: TestBackend>() {
    let mut samples = texts(4);
    samples[3].text[0][1] = 45;
    let cut: Cut = (0..4).map(|sample| vec![sample]).collect();
    let model = language_model(false);
    for transport in ALL {
        let setting =
            Setting { transport, weights: Arc::new(Poisoned(45)), ..Setting::new(&model, two_stages()) };
        let errors = run_failing::<B>(&setting, (&samples, &cut), &|_, _| {});
        let expected = "stage Llm 2..4, microbatch 3: the loss is NaN";
        assert!(
            matches!(errors[3], Error::Model(dflop_models::Error::Loss { microbatch: 3, .. })),
            "{}",
            errors[3]
        );
        assert_eq!(errors[3].to_string(), expected);
        for error in errors_of_others(&errors, 3) {
            assert!(error.contains(expected) && error.contains("add up losses"), "{error}");
        }
    }
}

fn a_missing_or_foreign_context_ends_all_ranks_by_microbatch<B: TestBackend>() {
    let (samples, cut): (_, Cut) = (texts(4), (0..4).map(|sample| vec![sample]).collect());
    let model = language_model(false);
    let missing = |rank: usize, work: &mut RankStep<_>| {
        if rank == 2 {
            work.contexts.remove(&(ModuleKind::Llm, 3));
        }
    };
    let foreign = |rank: usize, work: &mut RankStep<_>| {
        if rank == 2 {
            let own = Arc::clone(&work.contexts[&(ModuleKind::Llm, 1)]);
            work.contexts.insert((ModuleKind::Llm, 0), own);
        }
    };
    let tampers: [(Tamper<'_, B::Device>, &str); 2] = [
        (&missing, "plan of step 0, microbatch 3 of the LLM: has no context"),
        (&foreign, "plan of step 0, microbatch 0 of the LLM: does not belong to replica 1"),
    ];
    for (tamper, expected) in tampers {
        let errors = run_failing::<B>(&Setting::new(&model, two_stages()), (&samples, &cut), tamper);
        assert_eq!(errors[2].to_string(), expected);
        assert!(errors_of_others(&errors, 2).iter().all(|error| error.contains(expected)));
    }
}

/// An audio context on the vision rank, and images with a different size than planned.
fn media_that_are_not_those_of_the_plan_end_all_ranks<B: TestBackend>() {
    let model = with_encoders(true, true);
    let image = |side| Item::Image { grid: [side, side], seed: 3 };
    let samples: Vec<Sample> = vec![sample(1, vec![image(4), Item::Clip { frames: 40, seed: 2 }])];
    let stage = |module| ModuleParallelism::even(module, model.layers(module), 1);
    let setting = Setting::new(&model, model.modules().into_iter().map(stage).collect());
    let replaced = |item: Item| {
        let model = Arc::clone(&model);
        move |rank: usize, work: &mut RankStep<_>| {
            if rank == 0 {
                let device = B::open(1);
                let context = super::batch::media_context(&model, item.module(), &[item], &device);
                work.contexts.insert((ModuleKind::Vision, 0), Arc::new(context));
            }
        }
    };
    let errors = run_failing::<B>(&setting, (&samples, &vec![vec![0]]), &replaced(image(6)));
    let expected = "plan of step 0, microbatch 0 of vision: has 9 tokens of media, the plan has 4";
    assert_eq!(errors[0].to_string(), expected);
    assert!(errors_of_others(&errors, 0).iter().all(|error| error.contains(expected)));
}

fn ranks_with_different_plans_are_told_apart<B: TestBackend>() {
    let (samples, cut): (_, Cut) = (texts(4), (0..4).map(|sample| vec![sample]).collect());
    let setting = Setting::new(&language_model(false), two_stages());
    let job = setting.job().unwrap();
    let other = move |rank: usize, work: &mut RankStep<_>| {
        if rank == 1 {
            let mut microbatches = work.plan.microbatches().to_vec();
            microbatches[3].tokens += 1;
            work.plan =
                Arc::new(PipelineStepPlan::new(&job, 0, work.plan.target_tokens(), microbatches).unwrap());
        }
    };
    for error in run_failing::<B>(&setting, (&samples, &cut), &other) {
        let Error::Comm(error) = &error else { panic!("{error}") };
        let failure = error.failure().expect("the job is over");
        assert_eq!((failure.cause, failure.culprit), (Cause::Digest, Some(1)), "{error}");
    }
    assert_eq!(plan_microbatches(&samples, &cut).len(), 4);
}

fn a_context_with_the_loss_scale_of_another_step_ends_all_ranks<B: TestBackend>() {
    let (samples, cut): (_, Cut) = (texts(4), (0..4).map(|sample| vec![sample]).collect());
    let model = language_model(false);
    let scaled = |rank: usize, work: &mut RankStep<_>| {
        if rank == 1 {
            let device = B::open(1);
            let context = super::batch::text_context(&model, &[&samples[2]], 0.5, &device);
            work.contexts.insert((ModuleKind::Llm, 2), Arc::new(context));
        }
    };
    let errors = run_failing::<B>(&Setting::new(&model, two_stages()), (&samples, &cut), &scaled);
    let expected = "plan of step 0, microbatch 2 of the LLM: has the loss scale 0.5, expected ";
    assert!(errors[1].to_string().starts_with(expected), "{}", errors[1]);
    assert!(errors_of_others(&errors, 1).iter().all(|error| error.contains(expected)));
}
