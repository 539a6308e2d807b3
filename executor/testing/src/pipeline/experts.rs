//! Language models with experts: the router decision is read while other ranks wait.

use dflop_balancer::schedule::ScheduleKind;
use dflop_executor::pipeline::ModuleParallelism;
use dflop_models::{Activations, FrozenModules, ModuleKind};

use super::batch::{LLM_LAYERS, round_robin, texts, with_experts};
use super::job::{Setting, run_job};
use super::reference::one_by_one;
use crate::claim::claims;
use crate::device::TestBackend;

claims! {
    stages_schedules_and_recomputation_give_the_same_bits,
    replicas_change_nothing_but_rounding,
}

fn llm(stages: usize) -> ModuleParallelism {
    ModuleParallelism::even(ModuleKind::Llm, LLM_LAYERS, stages)
}

fn stages_schedules_and_recomputation_give_the_same_bits<B: TestBackend>() {
    let (model, samples, cut) = (with_experts(), texts(7), round_robin(7, 4));
    let whole = run_job::<B>(&Setting::new(&model, vec![llm(1)]), &samples, &cut).truth;
    one_by_one::<B>(&model, FrozenModules::default(), &samples).assert_close(&whole);
    for (schedule, stages, activations) in [
        (ScheduleKind::OneForwardOneBackward, 2, Activations::Stored),
        (ScheduleKind::OneForwardOneBackward, 4, Activations::Recomputed),
        (ScheduleKind::ZeroBubble, 2, Activations::Stored),
        (ScheduleKind::Interleaved { chunks: 2 }, 2, Activations::Recomputed),
    ] {
        let setting = Setting { schedule, activations, ..Setting::new(&model, vec![llm(stages)]) };
        assert_eq!(run_job::<B>(&setting, &samples, &cut).truth, whole, "{schedule} {stages}");
    }
}

fn replicas_change_nothing_but_rounding<B: TestBackend>() {
    let (model, samples) = (with_experts(), texts(8));
    let truth = one_by_one::<B>(&model, FrozenModules::default(), &samples);
    for (dp_size, microbatches, stages) in [(2, 4, 1), (2, 8, 2)] {
        let setting = Setting::new(&model, vec![llm(stages).dp_size(dp_size)]);
        truth.assert_close(&run_job::<B>(&setting, &samples, &round_robin(8, microbatches)).truth);
    }
}
