//! Plans under interleaved 1F1B and ZB-H1 have the makespans and the memory of closed forms, and are found.

use super::closed_form::{ClosedForm, cluster, encoder, llm, problem, sizes};
use super::disaggregated;
use dflop_balancer::schedule::ScheduleKind;
use dflop_planner::{
    Degrees, ItemSize, MethodScore, ModulePlan, ParallelismPlan, Placement, PlanProblem, SearchSpaceOptions,
    Workload, compare, compare_plan, evaluate, plan,
};

const PLAIN: ScheduleKind = ScheduleKind::OneForwardOneBackward;
const SPLIT: ScheduleKind = ScheduleKind::ZeroBubble;
const CHUNKS: ScheduleKind = ScheduleKind::Interleaved { chunks: 2 };
/// Tokens in every sample, and samples in a batch.
const TOKENS: u32 = 500;
const SAMPLES: u32 = 6;

/// Modules without work outside the layers.
fn costs() -> (ClosedForm, ClosedForm) {
    (ClosedForm { ends_ns: 0.0, ..encoder() }, ClosedForm { ends_ns: 0.0, ..llm() })
}

/// Six equal samples.
fn workload() -> Workload {
    Workload::draw(&[ItemSize::from_tiles(1, TOKENS); SAMPLES as usize], SAMPLES, 1, 0).unwrap()
}

/// Three LLM ranks with two layers each, and a sample in each of six microbatches. Encoders run on separate
/// GPUs, or on those of the LLM.
fn three_ranks(schedule: ScheduleKind, placement: Placement) -> ParallelismPlan {
    let degrees = Degrees { tp: 1, pp: 3, dp: 1 };
    let ranks = if placement == Placement::Colocated { 3 } else { 1 };
    ParallelismPlan {
        llm: ModulePlan::in_chunks(6, degrees, schedule.chunks() as u32),
        placement,
        schedule,
        ..disaggregated(Degrees { tp: 1, pp: 1, dp: ranks }, degrees, SAMPLES)
    }
}

fn score(schedule: ScheduleKind, placement: Placement) -> MethodScore {
    let (costs, workload) = (costs(), workload());
    let problem = problem(&costs, &workload, cluster(4, 1 << 40));
    let compared = compare_plan(&problem, &three_ranks(schedule, placement)).unwrap();
    let ours = compared.methods.last().unwrap().clone();
    assert!(compared.ideal_seconds <= ours.step_seconds, "{schedule}: {compared:?}");
    let waits: f64 = ours.waits.largest_first().iter().map(|(_, fraction)| fraction).sum();
    assert!((waits - ours.idle_fraction).abs() < 1e-9, "{ours:?}");
    ours
}

/// With `p` ranks and a microbatch's time `t` on a rank, the bubble is `(p - 1) t` under 1F1B, a `v`-th of
/// that with `v` chunks, and shorter by `2 (p - 1) w` with weight gradients of `w`, a third of the work that
/// is not attention.
#[test]
fn bubbles_are_those_of_the_schedules() {
    let model = costs().1;
    let linear_ns = model.launch_ns + model.unit_ns * f64::from(TOKENS);
    let layer_ns = linear_ns + model.square_ns * f64::from(TOKENS * TOKENS);
    let ns = |schedule| score(schedule, Placement::Colocated).step_seconds * 1e9;
    let [plain, split, chunks] = [PLAIN, SPLIT, CHUNKS].map(ns);
    // A pass is rounded to a nanosecond, and a time is interpolated between knots.
    let assert_close = |found: f64, expected: f64| {
        assert!((found - expected).abs() < 1e-3 * expected, "{found} {expected}");
    };
    assert_close(plain - chunks, 2.0 * 2.0 * layer_ns / 2.0);
    assert_close(plain - split, 2.0 * 2.0 * (2.0 * linear_ns / 3.0));
}

/// A stage before the last holds fewer microbatches under 1F1B; under ZB-H1, each of four stages holds four.
#[test]
fn stages_hold_microbatches_until_their_weight_gradients() {
    let (model, layers) = (costs().1, 2.0);
    let bytes = |in_flight: f64| {
        (layers * (model.layer_bytes + in_flight * model.unit_bytes * f64::from(TOKENS))) as u64
    };
    let of = |schedule| score(schedule, Placement::Disaggregated).memory[1].bytes;
    assert_eq!((of(PLAIN), of(SPLIT)), (bytes(3.0), bytes(4.0)));
}

/// The first of `p` ranks holds `2 (p - 1) + (v - 1) p + 1` microbatches in one of `v` chunks each, next to
/// the encoder, whose ranks hold two tiles at once.
#[test]
fn ranks_hold_microbatches_in_chunks() {
    let (of_encoder, of_llm) = costs();
    let held = 2.0 * (3.0 - 1.0) + (2.0 - 1.0) * 3.0 + 1.0;
    let llm_bytes = 2.0 * of_llm.layer_bytes + held * of_llm.unit_bytes * f64::from(TOKENS);
    let encoder_bytes = 4.0 * (of_encoder.layer_bytes + 2.0 * of_encoder.unit_bytes);
    let ours = score(CHUNKS, Placement::Colocated);
    assert_eq!(ours.memory[1].bytes, (llm_bytes + encoder_bytes) as u64);
    assert_eq!(ours.memory[0], ours.memory[1]);
    // The whole layers of a rank are in three microbatches.
    let plain = 2.0 * (of_llm.layer_bytes + 3.0 * of_llm.unit_bytes * f64::from(TOKENS)) + encoder_bytes;
    assert_eq!(score(PLAIN, Placement::Colocated).memory[1].bytes, plain as u64);
}

/// An LLM that does not fit on one GPU.
fn large() -> (ClosedForm, ClosedForm) {
    (encoder(), ClosedForm { degrees: vec![1], layer_bytes: 20e6, ..llm() })
}

fn options(placement: Placement) -> SearchSpaceOptions {
    SearchSpaceOptions {
        is_disaggregated: placement == Placement::Disaggregated,
        is_colocated: placement == Placement::Colocated,
        is_joint: placement == Placement::Joint,
        ..SearchSpaceOptions::default()
    }
}

#[test]
fn a_search_proposes_the_schedule_of_the_fastest_plan() {
    let costs = large();
    let workload = Workload::draw(&sizes(), 24, 4, 3).unwrap();
    for placement in [Placement::Disaggregated, Placement::Colocated, Placement::Joint] {
        let options = options(placement);
        let problem = PlanProblem { options, ..problem(&costs, &workload, cluster(6, 119_000_000)) };
        let plain = plan(&problem).unwrap();
        assert_eq!(plain.plan.schedule, PLAIN);
        let options = SearchSpaceOptions { has_other_schedules: true, ..options };
        let problem = PlanProblem { options, ..problem.clone() };
        let found = plan(&problem).unwrap();
        assert!(found.step_seconds <= plain.step_seconds, "{placement:?} {found:?}");
        // A split stage beside encoders holds more microbatches, which may not fit.
        if placement != Placement::Disaggregated {
            assert!(found.step_seconds < plain.step_seconds, "{placement:?} {found:?}");
            let is_interleaved = matches!(found.plan.schedule, ScheduleKind::Interleaved { .. });
            assert!(found.plan.schedule == SPLIT || (is_interleaved && placement == Placement::Colocated));
        }
        assert!(!found.is_exhaustive && found.lower_bound_seconds <= found.step_seconds);
        let score = evaluate(&problem, &found.plan).unwrap();
        assert!((score.mean_seconds() - found.step_seconds).abs() < 1e-12);
        let given = compare_plan(&problem, &found.plan).unwrap();
        let ours = given.methods.last().unwrap();
        assert!((ours.step_seconds - found.step_seconds).abs() < 1e-12 && ours.fits, "{ours:?}");
        assert!(found.lower_bound_seconds <= given.ideal_seconds);
        let compared = compare(&problem, &found).unwrap();
        assert_eq!(compared.methods.last().unwrap().waits, ours.waits);
    }
}

#[test]
fn a_schedule_may_be_searched_alone() {
    let costs = large();
    let workload = Workload::draw(&sizes(), 24, 2, 3).unwrap();
    for (placement, schedule) in
        [(Placement::Colocated, CHUNKS), (Placement::Colocated, SPLIT), (Placement::Joint, SPLIT)]
    {
        let options = SearchSpaceOptions { schedule, has_recomputation: true, ..options(placement) };
        let problem = PlanProblem { options, ..problem(&costs, &workload, cluster(6, 119_000_000)) };
        let found = plan(&problem).unwrap();
        assert_eq!((found.plan.schedule, found.plan.placement), (schedule, placement));
        let ModulePlan { degrees, layers, is_recomputed } = &found.plan.llm;
        assert_eq!(layers.len(), degrees.pp as usize * schedule.chunks());
        assert!(found.lower_bound_seconds <= found.step_seconds && !(*is_recomputed && schedule == SPLIT));
        let compared = compare(&problem, &found).unwrap();
        assert!((compared.methods.last().unwrap().step_seconds - found.step_seconds).abs() < 1e-12);
    }
}

#[test]
fn chunks_beside_encoders_are_refused() {
    let (costs, workload) = (costs(), workload());
    let mut problem = problem(&costs, &workload, cluster(4, 1 << 40));
    problem.options.schedule = CHUNKS;
    let error = plan(&problem).unwrap_err().to_string();
    assert!(error.contains("interleaved:2 is for encoders that are colocated"), "{error}");
}
