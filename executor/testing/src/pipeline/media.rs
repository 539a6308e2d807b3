//! Multimodal models: encoders with separate DP sizes, routes, missing media.

use std::sync::Arc;

use dflop_balancer::schedule::{Action, ScheduleKind};
use dflop_executor::pipeline::ModuleParallelism;
use dflop_models::encoder::FrozenEncoder;
use dflop_models::{Activations, FrozenModules, ModelConfig, ModuleKind};

use super::batch::{Cut, Item, LLM_LAYERS, Sample, omni, round_robin, sample, with_deepstack, with_encoders};
use super::job::{Setting, run_job};
use super::reference::one_by_one;
use crate::claim::claims;
use crate::device::TestBackend;
use crate::support::Transport;

claims! {
    encoders_and_llm_of_any_dp_sizes_agree,
    encoders_may_differ_in_dp_size,
    stages_of_encoders_and_llm_give_the_same_bits,
    a_job_over_tcp_has_the_bits_of_one_over_threads,
    balanced_and_data_blind_cuts_have_the_same_gradients,
    missing_media_neither_hang_nor_change_a_gradient,
    frozen_modules_get_no_gradients_and_change_no_other,
    ranks_that_share_a_stage_may_be_of_different_numbers,
    encoders_deal_their_media_out_by_cost,
    equal_dp_sizes_keep_media_in_their_rank,
}

fn image(rows: u32, columns: u32, seed: u32) -> Item {
    Item::Image { grid: [rows, columns], seed }
}

fn clip(frames: u32, seed: u32) -> Item {
    Item::Clip { frames, seed }
}

/// Creates samples with zero or more media with uneven sizes for the modules in a model; one clip has no
/// tokens.
pub(crate) fn samples(model: &ModelConfig) -> Vec<Sample> {
    let media = [
        vec![image(2, 4, 1), clip(40, 2)],
        vec![],
        vec![image(4, 8, 3)],
        vec![clip(13, 4), image(2, 2, 5), clip(1, 6), image(6, 4, 7)],
        vec![],
        vec![clip(22, 8)],
        vec![image(2, 2, 9), image(2, 2, 10)],
        vec![image(8, 8, 11)],
    ];
    let runs = |item: &Item| model.modules().contains(&item.module());
    let of = |(seed, media): (u32, Vec<Item>)| sample(seed, media.into_iter().filter(runs).collect());
    (0..).zip(media).map(of).collect()
}

/// Puts every module in a single stage, on separate ranks.
pub(crate) fn apart(model: &ModelConfig) -> Vec<ModuleParallelism> {
    let stages = |module| ModuleParallelism::even(module, model.layers(module), 1);
    model.modules().into_iter().map(stages).collect()
}

/// Sets the DP sizes of the encoders and the LLM.
fn replicated(modules: &[ModuleParallelism], encoders: usize, llm: usize) -> Vec<ModuleParallelism> {
    let size = |module: ModuleKind| if module == ModuleKind::Llm { llm } else { encoders };
    modules.iter().map(|layout| layout.clone().dp_size(size(layout.module))).collect()
}

pub(crate) fn models() -> [Arc<ModelConfig>; 5] {
    let both = with_encoders(true, true);
    [with_encoders(true, false), with_encoders(false, true), both, omni(), with_deepstack()]
}

fn encoders_and_llm_of_any_dp_sizes_agree<B: TestBackend>() {
    for model in models() {
        let samples = samples(&model);
        let truth = one_by_one::<B>(&model, FrozenModules::default(), &samples);
        for (encoders, llm, microbatches) in
            [(1, 1, 4), (1, 2, 4), (2, 2, 4), (3, 2, 4), (1, 4, 4), (3, 1, 2), (2, 3, 6)]
        {
            let modules = replicated(&apart(&model), encoders, llm);
            let setting = Setting::new(&model, modules);
            truth.assert_close(&run_job::<B>(&setting, &samples, &round_robin(8, microbatches)).truth);
        }
    }
}

/// An encoder with the LLM's DP size keeps media on the same rank, next to an encoder whose ranks share all
/// media.
fn encoders_may_differ_in_dp_size<B: TestBackend>() {
    let model = with_encoders(true, true);
    let samples = samples(&model);
    let truth = one_by_one::<B>(&model, FrozenModules::default(), &samples);
    for (vision, audio, llm, microbatches) in [(2, 3, 2, 4), (1, 2, 2, 4), (3, 2, 4, 4), (4, 1, 4, 8)] {
        let size = |module: ModuleKind| match module {
            ModuleKind::Vision => vision,
            ModuleKind::Audio => audio,
            ModuleKind::Llm => llm,
        };
        let modules = apart(&model).into_iter().map(|layout| {
            let dp_size = size(layout.module);
            layout.dp_size(dp_size)
        });
        let setting = Setting::new(&model, modules.collect());
        truth.assert_close(&run_job::<B>(&setting, &samples, &round_robin(8, microbatches)).truth);
    }
}

fn stages_of_encoders_and_llm_give_the_same_bits<B: TestBackend>() {
    for model in models() {
        let (samples, cut) = (samples(&model), round_robin(8, 4));
        let whole = run_job::<B>(&Setting::new(&model, apart(&model)), &samples, &cut).truth;
        let cut_up: Vec<ModuleParallelism> = apart(&model)
            .into_iter()
            .map(|layout| ModuleParallelism::even(layout.module, model.layers(layout.module), 2))
            .collect();
        for transport in [Transport::Threads, Transport::Tcp] {
            for (schedule, activations) in [
                (ScheduleKind::OneForwardOneBackward, Activations::Stored),
                (ScheduleKind::GPipe, Activations::Recomputed),
                (ScheduleKind::ZeroBubble, Activations::Stored),
                (ScheduleKind::EncoderAhead { rounds: 1 }, Activations::Stored),
            ] {
                let setting = Setting::new(&model, cut_up.clone());
                let setting = Setting { schedule, activations, transport, ..setting };
                assert_eq!(run_job::<B>(&setting, &samples, &cut).truth, whole);
            }
        }
    }
}

fn a_job_over_tcp_has_the_bits_of_one_over_threads<B: TestBackend>() {
    let model = with_encoders(true, true);
    let (samples, cut) = (samples(&model), round_robin(8, 4));
    let setting = Setting { steps: 2, ..Setting::new(&model, replicated(&apart(&model), 2, 2)) };
    let over_threads = run_job::<B>(&setting, &samples, &cut).truth;
    // One byte for messages that no receive was posted for: sends complete late.
    let narrow = Setting { comm: setting.comm.buffered_bytes_max(1), ..setting.clone() };
    for other in [setting, narrow.clone()] {
        let over_tcp = Setting { transport: Transport::Tcp, ..other };
        assert_eq!(run_job::<B>(&over_tcp, &samples, &cut).truth, over_threads);
    }
    assert_eq!(run_job::<B>(&narrow, &samples, &cut).truth, over_threads);
}

fn balanced_and_data_blind_cuts_have_the_same_gradients<B: TestBackend>() {
    for model in models() {
        let samples = samples(&model);
        let truth = one_by_one::<B>(&model, FrozenModules::default(), &samples);
        let balanced: Cut = vec![vec![7], vec![3, 1], vec![2, 4], vec![0, 5, 6]];
        let reversed: Cut = vec![vec![6, 5, 4, 3, 2, 1, 0], vec![7]];
        for cut in [balanced, reversed, round_robin(8, 8), round_robin(8, 2)] {
            let setting = Setting::new(&model, replicated(&apart(&model), 2, 2));
            truth.assert_close(&run_job::<B>(&setting, &samples, &cut).truth);
        }
    }
}

/// Microbatches, rounds, ranks and complete steps without images or audio, and ranks without any sample.
fn missing_media_neither_hang_nor_change_a_gradient<B: TestBackend>() {
    for model in models() {
        let all = samples(&model);
        let cuts: [Cut; 5] = [
            vec![vec![1], vec![4], vec![0, 2], vec![3]],
            vec![vec![2, 0], vec![], vec![1], vec![4]],
            vec![vec![1, 4], vec![], vec![], vec![]],
            vec![vec![5], vec![1], vec![], vec![7]],
            vec![vec![], vec![3], vec![], vec![6]],
        ];
        for cut in cuts {
            let mut used: Vec<usize> = cut.concat();
            used.sort_unstable();
            let samples: Vec<Sample> = used.iter().map(|&index| all[index].clone()).collect();
            let renumbered =
                |of: &Vec<usize>| of.iter().map(|index| used.binary_search(index).unwrap()).collect();
            let cut: Cut = cut.iter().map(renumbered).collect();
            let truth = one_by_one::<B>(&model, FrozenModules::default(), &samples);
            for encoders in [1, 3] {
                let setting = Setting::new(&model, replicated(&apart(&model), encoders, 2));
                truth.assert_close(&run_job::<B>(&setting, &samples, &cut).truth);
            }
        }
    }
}

fn frozen_modules_get_no_gradients_and_change_no_other<B: TestBackend>() {
    let parts = |encoder, projector| FrozenEncoder { encoder, projector };
    for model in models() {
        let samples = samples(&model);
        let layouts: Vec<ModuleParallelism> = apart(&model)
            .into_iter()
            .map(|layout| ModuleParallelism::even(layout.module, model.layers(layout.module), 2))
            .collect();
        for (vision, audio, is_llm_frozen) in [
            (parts(true, true), parts(true, true), false),
            (parts(true, false), parts(true, false), true),
            (parts(true, true), parts(false, false), true),
            (parts(false, true), parts(true, true), false),
        ] {
            let frozen = FrozenModules { vision, audio, is_llm_frozen };
            let truth = one_by_one::<B>(&model, frozen, &samples);
            let setting = Setting { frozen, ..Setting::new(&model, replicated(&layouts, 2, 2)) };
            truth.assert_close(&run_job::<B>(&setting, &samples, &round_robin(8, 4)).truth);
        }
    }
}

fn ranks_that_share_a_stage_may_be_of_different_numbers<B: TestBackend>() {
    let model = with_encoders(true, true);
    let (samples, cut) = (samples(&model), round_robin(8, 4));
    let whole = run_job::<B>(&Setting::new(&model, replicated(&apart(&model), 2, 2)), &samples, &cut).truth;
    for [vision, audio, llm] in [[1, 1, 2], [3, 1, 2], [2, 1, 1]] {
        let mut modules = replicated(&apart(&model), 2, 2);
        modules.iter_mut().zip([vision, audio, llm]).for_each(|(module, size)| module.tp_size = size);
        let setting = Setting { is_sharded: false, ..Setting::new(&model, modules) };
        assert_eq!(run_job::<B>(&setting, &samples, &cut).truth, whole);
    }
}

/// One replica encodes the large image, the other replica everything else in the round.
fn encoders_deal_their_media_out_by_cost<B: TestBackend>() {
    let model = with_encoders(true, false);
    let samples = samples(&model);
    let cut: Cut = vec![vec![0, 2, 3], vec![6, 7]];
    let used: Vec<Sample> = cut.concat().iter().map(|&index| samples[index].clone()).collect();
    let setting = Setting::new(&model, replicated(&apart(&model), 2, 1));
    let job = setting.job().unwrap();
    let one = vec![vec![0, 1, 2, 3, 4]];
    let plan = super::batch::plan_microbatches(&used, &one);
    let plan = dflop_executor::pipeline::PipelineStepPlan::new(&job, 0, 1, plan).unwrap();
    let route = plan.route(&job, ModuleKind::Vision).unwrap();
    let mut of_replicas: Vec<Vec<usize>> =
        (0..2).map(|source| route.source_media(source).map(|row| row.tokens).collect()).collect();
    of_replicas.sort();
    assert_eq!(of_replicas, [vec![2, 8, 1, 6, 1, 1], vec![16]]);
    let ran = run_job::<B>(&setting, &used, &one);
    let forwards = |timeline: &[dflop_executor::pipeline::TimedAction]| {
        timeline
            .iter()
            .filter(|timed| matches!(timed.action, Action::Forward(_)) && timed.busy_ns > 0)
            .count()
    };
    assert!(ran.timelines.iter().all(|timeline| forwards(timeline) == 1));
    assert_eq!(model.layers(ModuleKind::Llm), LLM_LAYERS);
}

/// With as many encoder replicas as LLM replicas, no media leave the DP rank.
fn equal_dp_sizes_keep_media_in_their_rank<B: TestBackend>() {
    let model = with_encoders(true, false);
    let samples = samples(&model);
    let setting = Setting::<B::Device>::new(&model, replicated(&apart(&model), 2, 2));
    let (job, cut) = (setting.job().unwrap(), round_robin(8, 4));
    let plan = super::batch::plan_microbatches(&samples, &cut);
    let plan = dflop_executor::pipeline::PipelineStepPlan::new(&job, 0, 1, plan).unwrap();
    let route = plan.route(&job, ModuleKind::Vision).unwrap();
    assert!(!route.rows().is_empty());
    assert!(route.rows().iter().all(|row| row.source == row.destination));
}
