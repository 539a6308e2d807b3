//! Invalid jobs and plans are rejected before anything runs.

use dflop_balancer::schedule::ScheduleKind;
use dflop_comm::{Settings, threads};
use dflop_device::Cpu;
use dflop_executor::pipeline::{
    Job, MediumPlan, MicrobatchPlan, ModuleParallelism, PipelineRank, PipelineStepPlan,
};
use dflop_models::ModuleKind;

use super::batch::{LLM_LAYERS, language_model, with_deepstack, with_encoders};
use super::job;
use crate::claim::claims;

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
