//! A failure on one rank ends the job on all ranks, with the rank named.
//!
//! Messages that are late or differ end the job on all ranks, naming step, microbatch and action.
//!
//! Invalid jobs and plans are rejected before anything runs.

use super::batch::{
    Cut, Item, LLM_LAYERS, Sample, language_model, plan_microbatches, sample, texts, with_deepstack,
    with_encoders,
};
use super::job;
use super::job::{Setting, Tamper, run_failing};
use crate::claim::claims;
use crate::device::TestBackend;
use crate::support::ALL;
use dflop_balancer::schedule::ScheduleKind;
use dflop_comm::{Cause, Settings, threads};
use dflop_device::Cpu;
use dflop_executor::Error;
use dflop_executor::pipeline::{
    Job, MediumPlan, MicrobatchPlan, ModuleParallelism, PipelineRank, PipelineStepPlan, RankStep,
};
use dflop_models::ModuleKind;
use dflop_models::weights::{ParameterSpec, Seed, WeightSource};
use std::sync::Arc;
use std::time::{Duration, Instant};

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

claims! {
    cpu:
    jobs_that_cannot_run_are_refused_by_setting,
    plans_that_do_not_fit_the_job_are_refused_by_microbatch,
    layers_that_add_rows_of_the_encoder_must_be_in_the_first_stage,
    a_world_or_stages_of_another_job_are_refused,
    ranks_hold_what_the_layout_of_the_balancer_says,
}

type Setting = job::Setting<Cpu>;

fn llm(stages: usize) -> ModuleParallelism {
    ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, stages)
}

fn jobs_that_cannot_run_are_refused_by_setting() {
    let model = with_encoders(true, false);
    let (llm_alone, vision) = (llm(1), ModuleParallelism::even(ModuleKind::Vision, 2, 1));
    let one = ScheduleKind::OneForwardOneBackward;
    let cut = |ranges: Vec<std::ops::Range<usize>>| vec![ModuleParallelism::new(ModuleKind::Llm, ranges)];
    for (modules, schedule, expected) in [
        (vec![], one, "invalid `modules`: must be encoders in the order vision, audio, then the LLM"),
        (vec![vision.clone()], one, "then the LLM; found [Vision]"),
        (vec![llm_alone.clone(), vision.clone()], one, "invalid `modules`: must be"),
        (
            vec![ModuleParallelism::even(ModuleKind::Audio, 2, 1), llm_alone.clone()],
            one,
            "2 layers, the model has 0",
        ),
        (cut(vec![0..2, 3..4]), one, "invalid `stages`: Llm must continue with layer 2, found 3..4"),
        (cut(vec![0..2, 2..2, 2..4]), one, "found 2..2"),
        (cut(vec![0..3]), one, "invalid `stages`: the stages of Llm have 3 layers, the model has 4"),
        (cut(vec![]), one, "have 0 layers"),
        (vec![llm(1).dp_size(0)], one, "`dp_size` and `tp_size` above 0"),
        (vec![llm(1).tp_size(0)], one, "`dp_size` and `tp_size` above 0"),
        (
            vec![vision, llm(2)],
            ScheduleKind::Interleaved { chunks: 2 },
            "interleaved:2 is for a language model",
        ),
        (vec![llm(3)], ScheduleKind::Interleaved { chunks: 2 }, "needs a multiple of 2 stages, found 3"),
        (vec![llm(2)], ScheduleKind::Interleaved { chunks: 0 }, "needs a multiple of 0 stages"),
    ] {
        let error = Setting { schedule, ..Setting::new(&model, modules) }.job().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

fn plans_that_do_not_fit_the_job_are_refused_by_microbatch() {
    let model = with_encoders(true, false);
    let modules = vec![ModuleParallelism::even(ModuleKind::Vision, 2, 1), llm(1).dp_size(2)];
    let job = Setting::new(&model, modules).job().unwrap();
    let with =
        |module, tokens| MicrobatchPlan { tokens: 8, media: vec![MediumPlan { module, tokens, cost_ns: 1 }] };
    let text = || MicrobatchPlan { tokens: 8, media: Vec::new() };
    for (microbatches, expected) in [
        (vec![], "microbatch 0 of the LLM: 0 microbatches for 2 DP ranks"),
        (vec![text(); 3], "3 microbatches for 2 DP ranks"),
        (vec![text(), with(ModuleKind::Audio, 2)], "microbatch 1 of the LLM: has medium 0 for audio"),
        (vec![with(ModuleKind::Llm, 2), text()], "microbatch 0 of the LLM: has medium 0 for the LLM"),
        (vec![text(), with(ModuleKind::Vision, 9)], "microbatch 1 of the LLM: has 8 tokens, its media 9"),
    ] {
        let error = PipelineStepPlan::new(&job, 5, 7, microbatches).unwrap_err().to_string();
        assert!(error.starts_with("plan of step 5") && error.contains(expected), "{error}");
    }
}

fn layers_that_add_rows_of_the_encoder_must_be_in_the_first_stage() {
    let mut model = (*with_deepstack()).clone();
    model.llm.deepstack = 2;
    let model = std::sync::Arc::new(model);
    let refused = |stages| {
        let modules = vec![ModuleParallelism::even(ModuleKind::Vision, 2, 1), llm(stages)];
        Setting::new(&model, modules).job().err().map(|error| error.to_string())
    };
    assert_eq!(refused(2), None);
    let error = refused(4).unwrap();
    assert!(error.contains("`deepstack_visual_indexes`") && error.contains("found 1 of them"), "{error}");
}

fn a_world_or_stages_of_another_job_are_refused() {
    let model = language_model(false);
    let setting = Setting::new(&model, vec![llm(2)]);
    let job = std::sync::Arc::new(setting.job().unwrap());
    let join = |stages| {
        let comm = threads::world(1, Settings::default()).unwrap().remove(0);
        PipelineRank::<Cpu>::new(Box::new(comm), std::sync::Arc::clone(&job), stages)
            .err()
            .unwrap()
            .to_string()
    };
    assert_eq!(join(Vec::new()), "invalid `world size`: expected 2 ranks, found 1");
    let one = std::sync::Arc::new(Setting::new(&model, vec![llm(1)]).job().unwrap());
    let comm = threads::world(1, Settings::default()).unwrap().remove(0);
    let error = PipelineRank::<Cpu>::new(Box::new(comm), one, Vec::new()).err().unwrap().to_string();
    assert_eq!(error, "invalid `stages`: expected [0] on rank 0, found 0 stages");
    assert_eq!(
        job.roles(2).unwrap_err().to_string(),
        "invalid `world size`: expected a rank below 2, found 2"
    );
}

/// Ranks are numbered module by module, replica by replica, stage by stage, and by TP rank last.
fn ranks_hold_what_the_layout_of_the_balancer_says() {
    let model = with_encoders(true, false);
    let modules =
        vec![ModuleParallelism::even(ModuleKind::Vision, 2, 1).dp_size(2), llm(2).dp_size(2).tp_size(2)];
    let job = Setting::new(&model, modules).job().unwrap();
    assert_eq!(job.world_size(), 2 + 2 * 2 * 2);
    let places: Vec<_> = (0..job.world_size()).map(|rank| job.roles(rank).unwrap().remove(0)).collect();
    let of = |rank: usize| (places[rank].pipeline_rank, places[rank].tp_rank, places[rank].replica);
    assert_eq!(
        [0, 1, 2, 3, 4, 9].map(of),
        [(0, 0, 0), (1, 0, 1), (2, 0, 0), (2, 1, 0), (3, 0, 0), (5, 1, 1)]
    );
    assert_eq!(
        [1, 3, 4, 9].map(|rank: usize| places[rank].stages.clone()),
        [vec![0], vec![1], vec![2], vec![2]]
    );
    let chunks = ScheduleKind::Interleaved { chunks: 2 };
    let chunked: Job =
        Setting { schedule: chunks, ..Setting::new(&model, vec![llm(4).dp_size(2)]) }.job().unwrap();
    let role = chunked.roles(3).unwrap().remove(0);
    assert_eq!((role.replica, &role.stages[..]), (1, &[1, 3][..]));
    assert_eq!(
        chunked.ranges(&role).iter().map(|range| range.layers.clone()).collect::<Vec<_>>(),
        [1..2, 3..4]
    );
}
