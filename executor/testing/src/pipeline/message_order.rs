//! Transports that match messages only by order: both ends of every lane list the same messages.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use dflop_balancer::schedule::ScheduleKind;
use dflop_comm::PayloadShape;
use dflop_device::Cpu;
use dflop_executor::pipeline::{Job, ModuleParallelism, PipelineStepPlan, Placement};
use dflop_models::ModuleKind;

use super::batch::{Cut, Sample, language_model, plan_microbatches, round_robin, texts, with_encoders};
use super::job::{Setting, pipeline, work};
use super::media::samples;
use crate::claim::claims;
use crate::hooked::{Call, CallKind, Hooked};
use crate::support::run;

claims! {
    cpu:
    stages_of_a_language_model_agree_on_the_order_of_messages,
    encoders_and_llm_agree_on_the_order_of_messages_in_every_placement,
}

/// Message tag and shape.
type Seen = (u64, PayloadShape);

/// Messages by peer, flow (the lowest tag bit) and whether this rank sends them.
type Log = BTreeMap<(usize, u64, bool), Vec<Seen>>;

/// Records the order in which a rank posts its messages.
fn record(log: &Mutex<Log>, call: &Call<'_>) {
    let (peer, is_send, tag, shape) = match call.kind {
        CallKind::Send { to, tag, shape } => (to, true, tag, shape),
        CallKind::Recv { from, tag, shape } => (from, false, tag, shape),
        _ => return,
    };
    if !call.is_split {
        log.lock().unwrap().entry((peer, tag & 1, is_send)).or_default().push((tag, shape));
    }
}

/// Runs two steps and returns the messages on every rank.
fn logs(setting: &Setting<Cpu>, samples: &[Sample], cut: &Cut) -> Vec<Log> {
    let job: Arc<Job> = Arc::new(setting.job().unwrap());
    run(setting.transport, job.world_size(), setting.comm, |comm| {
        let (device, log) = (Cpu::new(1).unwrap(), Arc::new(Mutex::new(Log::new())));
        let recorded = Arc::clone(&log);
        let comm = Hooked::new(comm, move |call| record(&recorded, call));
        let mut pipeline = pipeline::<Cpu>(setting, &job, comm, &device).unwrap();
        let roles = pipeline.roles().to_vec();
        let targets = samples.iter().map(Sample::target_tokens).sum();
        for step in 0..2 {
            let plan = PipelineStepPlan::new(&job, step, targets, plan_microbatches(samples, cut)).unwrap();
            pipeline.step(&work(&job, &roles, &Arc::new(plan), samples, cut, &device)).unwrap();
        }
        std::mem::take(&mut *log.lock().unwrap())
    })
}

/// Runs a job and compares the messages that a rank sends with the messages that the peer receives.
#[track_caller]
fn assert_alike(setting: &Setting<Cpu>, samples: &[Sample], cut: &Cut) {
    let logs = logs(setting, samples, cut);
    let mut messages = 0;
    for (rank, log) in logs.iter().enumerate() {
        for (&(peer, flow, is_send), seen) in log {
            let other = logs[peer].get(&(rank, flow, !is_send));
            assert_eq!(other, Some(seen), "rank {rank}, peer {peer}, {:?}", setting.schedule);
            messages += seen.len();
        }
    }
    assert!(messages > 0, "ranks exchange messages");
}

fn module(module: ModuleKind, layers: usize, sizes: [usize; 3]) -> ModuleParallelism {
    let [stages, dp_size, tp_size] = sizes;
    ModuleParallelism::even(module, layers, stages).dp_size(dp_size).tp_size(tp_size)
}

fn stages_of_a_language_model_agree_on_the_order_of_messages() {
    let (model, samples, cut) = (language_model(false), texts(12), round_robin(12, 8));
    for schedule in ScheduleKind::ALL {
        for dp_size in [1, 2] {
            let stages = if schedule.chunks() > 1 { 4 } else { 3 };
            let modules = vec![module(ModuleKind::Llm, 4, [stages, dp_size, 1])];
            assert_alike(&Setting { schedule, ..Setting::new(&model, modules) }, &samples, &cut);
        }
    }
}

fn encoders_and_llm_agree_on_the_order_of_messages_in_every_placement() {
    let model = with_encoders(true, true);
    // Some microbatches have no media for an encoder, and one has no sample.
    let cut: Cut = vec![vec![0, 2], vec![1], vec![3, 6], vec![], vec![4, 5], vec![7]];
    let samples = samples(&model);
    let schedules = [ScheduleKind::GPipe, ScheduleKind::OneForwardOneBackward, ScheduleKind::ZeroBubble];
    for (placement, [vision, audio, llm]) in [
        (Placement::Disaggregated, [[1, 3, 1], [2, 1, 1], [2, 2, 1]]),
        (Placement::Disaggregated, [[2, 2, 1], [1, 2, 2], [2, 1, 2]]),
        (Placement::Colocated, [[1, 2, 1], [2, 1, 1], [2, 1, 1]]),
        (Placement::Colocated, [[2, 2, 1], [2, 2, 1], [2, 2, 1]]),
    ] {
        let modules = vec![
            module(ModuleKind::Vision, 2, vision),
            module(ModuleKind::Audio, 2, audio),
            module(ModuleKind::Llm, 4, llm),
        ];
        for schedule in schedules {
            let setting =
                Setting { placement, schedule, is_sharded: false, ..Setting::new(&model, modules.clone()) };
            assert_alike(&setting, &samples, &cut);
        }
    }
    // Both encoders are before the LLM, in the first chain stage.
    let modules = vec![
        ModuleParallelism::new(ModuleKind::Vision, vec![0..2, 2..2]),
        ModuleParallelism::new(ModuleKind::Audio, vec![0..2, 2..2]),
        ModuleParallelism::new(ModuleKind::Llm, vec![0..0, 0..4]),
    ];
    for schedule in schedules {
        let setting =
            Setting { placement: Placement::Joint, schedule, ..Setting::new(&model, modules.clone()) };
        assert_alike(&setting, &samples, &cut);
    }
}
