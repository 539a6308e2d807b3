//! Jobs whose modules share ranks: joint and colocated placement.

use std::sync::Arc;

use dflop_balancer::schedule::{Action, ScheduleKind};
use dflop_device::Device;
use dflop_executor::pipeline::{Job, ModuleParallelism, Placement};
use dflop_models::encoder::FrozenEncoder;
use dflop_models::{Activations, FrozenModules, ModelConfig, ModuleKind};

use super::batch::{LLM_LAYERS, round_robin, with_encoders};
use super::job::{Setting, run_job};
use super::media::{apart, models, samples};
use super::reference::one_by_one;
use crate::claim::claims;
use crate::device::TestBackend;
use crate::support::Transport;

claims! {
    a_joint_chain_may_be_cut_anywhere,
    joint_ranks_of_a_group_share_the_media_of_their_microbatch,
    encoders_may_run_on_the_ranks_of_the_llm_before_and_after_it,
    a_colocated_encoder_may_have_another_tensor_parallel_size,
    ranks_with_colocated_encoders_may_hold_several_llm_stages,
    frozen_parts_and_recomputed_layers_run_on_shared_ranks,
    ranks_send_only_what_others_take,
    modules_that_cannot_share_ranks_are_refused,
}

const SCHEDULES: [ScheduleKind; 3] =
    [ScheduleKind::GPipe, ScheduleKind::OneForwardOneBackward, ScheduleKind::ZeroBubble];

/// Creates a module from the numbers of layers in chain stages.
fn cut(module: ModuleKind, lengths: &[usize]) -> ModuleParallelism {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end - length..*end)
    });
    ModuleParallelism::new(module, ends.collect())
}

/// Cuts the layer chain of a model: each encoder as the first row, the LLM as the second.
fn chain(model: &ModelConfig, [encoder, llm]: [&[usize]; 2]) -> Vec<ModuleParallelism> {
    let lengths = |module| if module == ModuleKind::Llm { llm } else { encoder };
    model.modules().into_iter().map(|module| cut(module, lengths(module))).collect()
}

fn joint<D: Device>(
    model: &Arc<ModelConfig>,
    rows: [&[usize]; 2],
    [dp_size, tp_size]: [usize; 2],
) -> Setting<D> {
    let mut modules = chain(model, rows);
    if let Some(llm) = modules.last_mut() {
        (llm.dp_size, llm.tp_size) = (dp_size, tp_size);
    }
    Setting { placement: Placement::Joint, ..Setting::new(model, modules) }
}

/// Cuts for two encoder layers and four LLM layers.
const CUTS: [[&[usize]; 2]; 6] = [
    [&[2], &[4]],
    [&[2, 0], &[1, 3]],
    [&[2, 0], &[0, 4]],
    [&[1, 1], &[0, 4]],
    [&[1, 1, 0], &[0, 1, 3]],
    [&[1, 1, 0, 0], &[0, 0, 3, 1]],
];

fn a_joint_chain_may_be_cut_anywhere<B: TestBackend>() {
    for model in models() {
        let (samples, batch) = (samples(&model), round_robin(8, 4));
        let whole = run_job::<B>(&Setting::new(&model, apart(&model)), &samples, &batch).truth;
        for rows in CUTS {
            for schedule in SCHEDULES {
                let setting = Setting { schedule, ..joint(&model, rows, [1, 1]) };
                assert_eq!(run_job::<B>(&setting, &samples, &batch).truth, whole, "{rows:?} {schedule}");
            }
        }
    }
}

fn joint_ranks_of_a_group_share_the_media_of_their_microbatch<B: TestBackend>() {
    for model in models() {
        let samples = samples(&model);
        let truth = one_by_one::<B>(&model, FrozenModules::default(), &samples);
        for (rows, [dp_size, tp_size], schedule, transport) in [
            (CUTS[0], [1, 2], ScheduleKind::OneForwardOneBackward, Transport::Threads),
            (CUTS[0], [4, 1], ScheduleKind::OneForwardOneBackward, Transport::Threads),
            (CUTS[1], [2, 2], ScheduleKind::ZeroBubble, Transport::Tcp),
            (CUTS[3], [1, 2], ScheduleKind::GPipe, Transport::Threads),
            (CUTS[4], [2, 2], ScheduleKind::OneForwardOneBackward, Transport::Threads),
            (CUTS[5], [2, 1], ScheduleKind::ZeroBubble, Transport::Threads),
        ] {
            let setting = Setting { schedule, transport, ..joint(&model, rows, [dp_size, tp_size]) };
            let ran = run_job::<B>(&setting, &samples, &round_robin(8, 4));
            truth.assert_close(&ran.truth);
            assert_eq!(ran.truth, run_job::<B>(&setting, &samples, &round_robin(8, 4)).truth, "{rows:?}");
        }
    }
}

fn encoders_may_run_on_the_ranks_of_the_llm_before_and_after_it<B: TestBackend>() {
    for model in models() {
        let samples = samples(&model);
        let truth = one_by_one::<B>(&model, FrozenModules::default(), &samples);
        for ([stages, dp_size, tp_size], [llm_stages, llm_dp, llm_tp]) in [
            ([1, 1, 1], [1, 1, 1]),
            ([1, 2, 1], [2, 1, 1]),
            ([2, 1, 1], [1, 2, 1]),
            ([1, 4, 1], [1, 2, 2]),
            ([2, 2, 1], [2, 2, 1]),
            ([2, 2, 1], [4, 1, 1]),
        ] {
            let modules = model.modules().into_iter().map(|module| {
                let own = |stages| ModuleParallelism::even(module, model.layers(module), stages);
                if module == ModuleKind::Llm {
                    own(llm_stages).dp_size(llm_dp).tp_size(llm_tp)
                } else {
                    own(stages).dp_size(dp_size).tp_size(tp_size)
                }
            });
            let setting = Setting::new(&model, modules.collect());
            let setting = Setting { placement: Placement::Colocated, ..setting };
            for schedule in SCHEDULES {
                let ran =
                    run_job::<B>(&Setting { schedule, ..setting.clone() }, &samples, &round_robin(8, 4));
                truth.assert_close(&ran.truth);
            }
        }
    }
}

/// The encoder is tensor-parallel, the LLM is not.
fn a_colocated_encoder_may_have_another_tensor_parallel_size<B: TestBackend>() {
    let model = with_encoders(true, false);
    let samples = samples(&model);
    let truth = one_by_one::<B>(&model, FrozenModules::default(), &samples);
    let modules =
        vec![cut(ModuleKind::Vision, &[2]).tp_size(2).dp_size(2), cut(ModuleKind::Llm, &[3, 1]).dp_size(2)];
    let setting = Setting { placement: Placement::Colocated, ..Setting::new(&model, modules) };
    truth.assert_close(&run_job::<B>(&setting, &samples, &round_robin(8, 4)).truth);
}

/// Four LLM stages, two on each rank, before and after which the ranks encode.
fn ranks_with_colocated_encoders_may_hold_several_llm_stages<B: TestBackend>() {
    for model in models() {
        let samples = samples(&model);
        let truth = one_by_one::<B>(&model, FrozenModules::default(), &samples);
        for ([stages, dp_size], [chunks, llm_stages, llm_dp, llm_tp], transport) in [
            ([1, 2], [2, 4, 1, 1], Transport::Threads),
            ([2, 1], [2, 2, 2, 1], Transport::Tcp),
            ([1, 4], [2, 4, 2, 1], Transport::Threads),
            ([2, 2], [4, 4, 2, 2], Transport::Threads),
        ] {
            let modules = model.modules().into_iter().map(|module| {
                let own = |stages| ModuleParallelism::even(module, model.layers(module), stages);
                if module == ModuleKind::Llm {
                    own(llm_stages).dp_size(llm_dp).tp_size(llm_tp)
                } else {
                    own(stages).dp_size(dp_size)
                }
            });
            let schedule = ScheduleKind::Interleaved { chunks: chunks as u16 };
            let setting = Setting { schedule, transport, ..Setting::new(&model, modules.collect()) };
            let setting = Setting { placement: Placement::Colocated, ..setting };
            let ran = run_job::<B>(&setting, &samples, &round_robin(8, 4));
            truth.assert_close(&ran.truth);
            let again = run_job::<B>(&setting, &samples, &round_robin(8, 4));
            assert_eq!(ran.truth, again.truth, "{chunks} chunks, {llm_stages} stages");
        }
    }
}

fn frozen_parts_and_recomputed_layers_run_on_shared_ranks<B: TestBackend>() {
    let parts = |encoder, projector| FrozenEncoder { encoder, projector };
    let model = with_encoders(true, true);
    let samples = samples(&model);
    for (vision, audio, is_llm_frozen) in
        [(parts(true, true), parts(true, true), false), (parts(true, false), parts(true, true), true)]
    {
        let frozen = FrozenModules { vision, audio, is_llm_frozen };
        let truth = one_by_one::<B>(&model, frozen, &samples);
        let activations = Activations::Recomputed;
        let setting = Setting { activations, frozen, ..joint(&model, CUTS[4], [2, 1]) };
        truth.assert_close(&run_job::<B>(&setting, &samples, &round_robin(8, 4)).truth);
        let modules = vec![
            cut(ModuleKind::Vision, &[1, 1]),
            cut(ModuleKind::Audio, &[2]).dp_size(2),
            cut(ModuleKind::Llm, &[2, 2]),
        ];
        let setting = Setting { frozen, placement: Placement::Colocated, ..Setting::new(&model, modules) };
        truth.assert_close(&run_job::<B>(&setting, &samples, &round_robin(8, 4)).truth);
    }
}

/// Nothing is sent between stages on the same rank; a chain stage that has both modules sends only LLM rows.
fn ranks_send_only_what_others_take<B: TestBackend>() {
    let model = with_encoders(true, false);
    let (samples, batch) = (samples(&model), round_robin(8, 4));
    let sends = |rows| {
        let timelines = run_job::<B>(&joint(&model, rows, [1, 1]), &samples, &batch).timelines;
        let is_send = |action| matches!(action, Action::Send(_) | Action::SendGrad(_));
        timelines
            .iter()
            .map(|rank| rank.iter().filter(|timed| is_send(timed.action)).count())
            .collect::<Vec<_>>()
    };
    assert_eq!(sends(CUTS[0]), [0]);
    assert_eq!(sends(CUTS[1]), [4, 4]);
    assert_eq!(sends(CUTS[4]), [4, 4 + 4, 4]);
}

#[expect(clippy::extra_unused_type_parameters, reason = "claims of a list have a backend")]
fn modules_that_cannot_share_ranks_are_refused<B: TestBackend>() {
    let model = with_encoders(true, false);
    let refused = |placement, modules: Vec<ModuleParallelism>, schedule| {
        let model = model.as_ref().clone();
        let job = Job::placed(placement, model, FrozenModules::default(), modules, schedule);
        job.err().unwrap().to_string()
    };
    let simple = ScheduleKind::OneForwardOneBackward;
    let of = |rows| chain(&model, rows);
    let wide = |dp_size, tp_size| {
        vec![cut(ModuleKind::Vision, &[2]).dp_size(dp_size).tp_size(tp_size), cut(ModuleKind::Llm, &[4])]
    };
    for (modules, expected) in [
        (of([&[0, 2], &[3, 1]]), "invalid `stages`: Vision ends in stage 1, after the LLM's first, 0"),
        (of([&[2], &[2, 2]]), "invalid `stages`: Vision has 1 entries, the LLM 2"),
        (of([&[2, 0, 0], &[2, 0, 2]]), "invalid `stages`: stage 1 has no layer"),
        (of([&[1, 0], &[2, 2]]), "invalid `stages`: the stages of Vision have 1 layers, the model has 2"),
        (wide(2, 1), "invalid `dp_size`: Vision has DP 2 and TP 1, expected 1 and 1 in joint placement"),
        (wide(1, 2), "invalid `dp_size`: Vision has DP 1 and TP 2, expected 1 and 1 in joint placement"),
    ] {
        assert_eq!(refused(Placement::Joint, modules, simple), expected);
    }
    assert_eq!(
        refused(Placement::Colocated, wide(2, 1), simple),
        "invalid `modules`: Vision takes 2 ranks, expected the LLM's 1 in colocated placement"
    );
    let empty = of([&[2, 0], &[0, 4]]);
    assert!(refused(Placement::Colocated, empty, simple).contains("must continue with layer"));
    for schedule in [ScheduleKind::Interleaved { chunks: 1 }, ScheduleKind::EncoderAhead { rounds: 1 }] {
        let error = refused(Placement::Joint, of(CUTS[1]), schedule);
        assert!(error.contains("is not for joint placement; `gpipe`, `1f1b` and `zb-h1` are"), "{error}");
    }
    let ahead = refused(Placement::Colocated, of([&[2], &[4]]), ScheduleKind::EncoderAhead { rounds: 1 });
    assert!(ahead.contains("is not for colocated placement"), "{ahead}");
    assert_eq!(model.layers(ModuleKind::Llm), LLM_LAYERS);
}
