//! The planner agrees with brute force, the bound with scores, and explanations with the facts.

mod closed_form;
mod data_parallel;
mod experts;
mod given;
mod joint;
mod schedules;
mod several_encoders;
mod trainers;

use closed_form::{ClosedForm, cluster, encoder, links, llm, problem, sizes};
use dflop_balancer::Error;
use dflop_balancer::schedule::ScheduleKind;
use dflop_planner::{
    Degrees, EncoderSplit, Evaluation, ItemSize, Method, ModuleCosts, ModulePlan, ParallelismPlan, Placement,
    SearchSpaceOptions, Workload, compare, evaluate, plan,
};
use proptest::prelude::*;

fn disaggregated(encoder: Degrees, llm: Degrees, microbatches: u32) -> ParallelismPlan {
    ParallelismPlan {
        expert_parallel: 1,
        schedule: ScheduleKind::OneForwardOneBackward,
        encoders: vec![ModulePlan::even(4, encoder)],
        llm: ModulePlan::even(6, llm),
        microbatches,
        placement: Placement::Disaggregated,
    }
}

/// Returns the memory on the fullest GPU.
fn most_bytes(score: &Evaluation) -> u64 {
    score.encoder_bytes.iter().copied().fold(score.llm_bytes, u64::max)
}

/// Lists all degrees for a module on at most `gpus` GPUs.
fn degrees(tps: &[u32], layers: u32, gpus: u32) -> Vec<Degrees> {
    let mut all = Vec::new();
    for &tp in tps {
        for pp in 1..=layers {
            all.extend((1..=gpus / (tp * pp)).map(|dp| Degrees { tp, pp, dp }));
        }
    }
    all
}

#[test]
fn a_small_cluster_gets_the_plan_of_brute_force() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 12, 3, 1).unwrap();
    for (gpus, memory_bytes) in [(4, 1 << 40), (6, 1 << 40), (6, 60_000_000)] {
        let problem = problem(&costs, &workload, cluster(gpus, memory_bytes));
        let found = plan(&problem).unwrap();
        assert!(found.is_exhaustive);
        let mut best = f64::INFINITY;
        let mut tried = 0;
        for of_encoder in degrees(&[1, 2], 4, gpus - 1) {
            for of_llm in degrees(&[1, 2, 4], 6, gpus - of_encoder.gpus()) {
                for microbatches in 1..=12 / of_llm.dp {
                    let Ok(score) = evaluate(&problem, &disaggregated(of_encoder, of_llm, microbatches))
                    else {
                        continue;
                    };
                    tried += 1;
                    if most_bytes(&score) <= memory_bytes {
                        best = best.min(score.mean_seconds());
                    }
                }
            }
        }
        assert!(tried > 100, "{tried}");
        assert!((found.step_seconds - best).abs() < 1e-12, "{gpus}: {} {best}", found.step_seconds);
        assert!(found.lower_bound_seconds <= best);
    }
}

#[test]
fn methods_are_compared_on_the_same_batches() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 96, 10, 3).unwrap();
    let problem = problem(&costs, &workload, cluster(32, 1 << 40));
    let found = plan(&problem).unwrap();
    let compared = compare(&problem, &found).unwrap();
    assert_eq!(compared, compare(&problem, &found).unwrap());
    let names: Vec<&str> = compared.methods.iter().map(|score| score.method.name()).collect();
    let all = [
        "by hand, joint",
        "lpt, sorted",
        "data-blind, joint",
        "data-blind, uniform",
        "data-blind",
        "lpt",
        "paper",
        "paper, sorted",
        "dflop",
    ];
    assert_eq!(names, all);
    let of = |method: Method| compared.methods.iter().find(|score| score.method == method).unwrap();
    let ours = of(Method::Ours);
    for score in compared.methods.iter().filter(|score| score.plan.placement == Placement::Disaggregated) {
        assert!(ours.step_seconds <= score.step_seconds, "{:?}", score.method);
        assert!(score.step_seconds <= score.step_seconds_p95 && score.fits);
        assert!((0.0..1.0).contains(&score.idle_fraction), "{:?} {}", score.method, score.idle_fraction);
        assert!(compared.ideal_seconds <= score.step_seconds);
        assert!(score.plan.gpus() <= 32);
    }
    assert!(ours.step_seconds <= found.step_seconds + 1e-12, "{} {}", ours.step_seconds, found.step_seconds);
    assert!(of(Method::DataBlind).step_seconds > 1.05 * ours.step_seconds);
    let uniform = of(Method::DataBlindUniform);
    let [encoder, llm] = [&uniform.plan.encoders[0], &uniform.plan.llm].map(|module| module.degrees);
    assert_eq!((encoder.tp, encoder.dp), (llm.tp, llm.dp));
    for (method, sorted) in [(Method::Lpt, Method::LptSorted), (Method::Paper, Method::PaperSorted)] {
        let changed = (of(method).step_seconds - of(sorted).step_seconds).abs();
        assert!(changed > 1e-9, "{method:?}: the order matters");
    }
    assert_eq!(of(Method::Lpt).plan, found.plan);
    assert_eq!(of(Method::LptSorted).plan, found.plan);
}

/// A single rank, stage and microbatch: every method with separate encoder GPUs runs the same two passes
/// sequentially, and methods on one GPU run the same without a wait.
#[test]
fn without_a_choice_all_methods_agree() {
    let costs = (ClosedForm { degrees: vec![1], ..encoder() }, ClosedForm { degrees: vec![1], ..llm() });
    let workload = Workload::draw(&[ItemSize::from_tiles(3, 500)], 1, 1, 0).unwrap();
    let problem = problem(&costs, &workload, cluster(2, 1 << 40));
    let found = plan(&problem).unwrap();
    let compared = compare(&problem, &found).unwrap();
    for score in &compared.methods {
        assert!((score.step_seconds - found.step_seconds).abs() < 1e-12, "{score:?}");
        let idle = if score.plan.placement == Placement::Joint { 0.0 } else { 0.5 };
        assert!((score.idle_fraction - idle).abs() < 1e-9, "{score:?}");
    }
}

#[test]
fn a_larger_search_keeps_its_promises() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 96, 20, 3).unwrap();
    let problem = problem(&costs, &workload, cluster(32, 40_000_000));
    let found = plan(&problem).unwrap();
    assert!(!found.is_exhaustive && found.plans_simulated < found.plans_bounded / 10);
    let score = evaluate(&problem, &found.plan).unwrap();
    assert!((score.mean_seconds() - found.step_seconds).abs() < 1e-12);
    assert!(found.plan.gpus() <= 32);
    assert!(found.step_seconds <= found.step_seconds_p95);
    assert!(found.lower_bound_seconds <= found.step_seconds);
    let explanation = &found.explanation;
    for memory in [explanation.encoder_memory[0], explanation.llm_memory] {
        assert_eq!(memory.bytes as i64 + memory.headroom_bytes, 40_000_000);
        assert!(memory.headroom_bytes >= 0);
    }
    let next = explanation.runner_up.as_ref().unwrap();
    assert!(next.step_seconds >= found.step_seconds && next.plan != found.plan);
    assert_eq!(found, plan(&problem).unwrap(), "the same every time");
    // Many random plans: none is better.
    for (tp, pp, dp) in [(1, 1, 16), (1, 2, 10), (2, 2, 6), (4, 1, 6), (1, 3, 8), (1, 6, 4), (2, 1, 10)] {
        let of_llm = Degrees { tp, pp, dp };
        for encoder_pp in [1, 2] {
            let dp = (32 - of_llm.gpus()) / encoder_pp;
            for microbatches in [1, 2, 4, 6, 8, 12] {
                let plan = disaggregated(Degrees { tp: 1, pp: encoder_pp, dp }, of_llm, microbatches);
                let Ok(score) = evaluate(&problem, &plan) else { continue };
                if most_bytes(&score) <= 40_000_000 {
                    assert!(score.mean_seconds() >= found.step_seconds, "{plan:?}");
                }
            }
        }
    }
}

#[test]
fn every_option_makes_plans_no_slower() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 12, 2, 1).unwrap();
    let mut problem = problem(&costs, &workload, cluster(4, 40_000_000));
    let plain = plan(&problem).unwrap();
    let widened = [
        SearchSpaceOptions { is_colocated: true, ..SearchSpaceOptions::default() },
        SearchSpaceOptions { has_uneven_layers: true, ..SearchSpaceOptions::default() },
        SearchSpaceOptions { has_recomputation: true, ..SearchSpaceOptions::default() },
    ];
    for options in widened {
        problem.options = options;
        let found = plan(&problem).unwrap();
        assert!(found.step_seconds <= plain.step_seconds, "{options:?}");
    }
    problem.options =
        SearchSpaceOptions { is_disaggregated: false, is_colocated: true, ..SearchSpaceOptions::default() };
    let colocated = plan(&problem).unwrap().plan;
    assert_eq!((colocated.placement, colocated.encoders[0].degrees.pp), (Placement::Colocated, 1));
    assert_eq!(colocated.encoders[0].degrees.gpus(), colocated.llm.degrees.gpus());
    problem.options = SearchSpaceOptions::default();
    problem.cluster.links = Some(links());
    assert!(plan(&problem).unwrap().step_seconds > plain.step_seconds);
    problem.cluster.links = None;
    problem.encoder_split = EncoderSplit::Sample;
    assert!(plan(&problem).unwrap().step_seconds >= plain.step_seconds);
}

/// A single microbatch on one GPU per module: a layer's forward pass takes a third of the layer time,
/// backward two thirds.
#[test]
fn recomputed_layers_run_forward_again_and_keep_their_inputs() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&[ItemSize::from_tiles(3, 500)], 1, 1, 0).unwrap();
    let mut problem = problem(&costs, &workload, cluster(2, 1 << 40));
    problem.options.has_recomputation = true;
    let one = Degrees { tp: 1, pp: 1, dp: 1 };
    let score = |encoder, llm| {
        let mut plan = disaggregated(one, one, 1);
        (plan.encoders[0].is_recomputed, plan.llm.is_recomputed) = (encoder, llm);
        evaluate(&problem, &plan).unwrap()
    };
    let [plain, all] = [false, true].map(|llm| score(false, llm));
    let layers_ns = 6.0 * (costs.1.layer_ns(1, 500) + costs.1.sample_ns(1, 500));
    let longer_ns = (all.makespans_ns[0] - plain.makespans_ns[0]) as f64;
    assert!((longer_ns - layers_ns / 3.0).abs() < 3.0, "{longer_ns} {layers_ns}");
    // All six layers keep an eighth, and one at a time is recomputed whole.
    let kept = 500.0 * 6.0 * costs.1.unit_bytes;
    let less = (plain.llm_bytes - all.llm_bytes) as f64 + 500.0 * costs.1.unit_bytes;
    assert!((less - kept * 7.0 / 8.0).abs() < 3.0, "{less}");
    assert!(score(true, false).makespans_ns[0] > plain.makespans_ns[0]);
}

#[test]
fn uneven_layers_relieve_the_stage_with_the_head() {
    let mut costs = (encoder(), llm());
    costs.1.ends_ns = 120.0;
    costs.1.degrees = vec![1];
    costs.1.layer_bytes = 30e6;
    costs.1.layers = 7;
    (costs.0.unit_ns, costs.0.ends_ns) = (3_000.0, 0.0);
    let workload = Workload::draw(&sizes(), 24, 2, 1).unwrap();
    let mut problem = problem(&costs, &workload, cluster(4, 140_000_000));
    let even = plan(&problem).unwrap();
    problem.options.has_uneven_layers = true;
    let uneven = plan(&problem).unwrap();
    assert!(uneven.step_seconds < even.step_seconds * 0.97, "{uneven:?} {even:?}");
    let layers = &uneven.plan.llm.layers;
    assert!(layers[layers.len() - 1] < layers[0], "{layers:?}");
}

#[test]
fn nothing_fits_names_what_would() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 12, 2, 1).unwrap();
    let mut problem = problem(&costs, &workload, cluster(4, 28_000_000));
    let Err(error) = plan(&problem) else { panic!("{:?}", plan(&problem)) };
    assert!(matches!(error, Error::NothingFits { .. }));
    let message = error.to_string();
    for part in ["GiB more memory per GPU", "recomputation", "GPUs"] {
        assert!(message.contains(part), "{message}");
    }
    problem.options.has_recomputation = true;
    assert!(plan(&problem).is_ok(), "the message names a change that fits");
    problem.options.has_recomputation = false;
    let gpus: u32 = message.rsplit_once(" GPUs").unwrap().0.rsplit(' ').next().unwrap().parse().unwrap();
    problem.cluster.gpus = gpus;
    assert!(plan(&problem).is_ok(), "the message names a change that fits: {gpus}");

    problem.cluster = cluster(1, 1 << 40);
    let message = plan(&problem).unwrap_err().to_string();
    assert!(message.contains("too few"), "{message}");
    let mut costs = (encoder(), llm());
    costs.1.degrees = vec![3];
    problem.llm = &costs.1;
    problem.cluster = cluster(8, 1 << 40);
    let message = plan(&problem).unwrap_err().to_string();
    assert!(message.contains("no tensor-parallel degree of the llm divides a node of 4"), "{message}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_bound_is_never_above_its_score(
        tp in 0usize..3, encoder_tp in 0usize..2, pp in 1u32..7, encoder_pp in 1u32..5, dp in 1u32..7,
        encoder_dp in 1u32..9, microbatches in 1u32..25, seed in 0u64..1000, has_links in any::<bool>(),
        is_by_sample in any::<bool>(), launch in 0.0f64..100_000.0,
    ) {
        let mut costs = (encoder(), llm());
        costs.1.launch_ns = launch;
        let (of_llm, of_encoder) = (
            Degrees { tp: [1, 2, 4][tp], pp, dp },
            Degrees { tp: [1, 2][encoder_tp], pp: encoder_pp, dp: encoder_dp },
        );
        let workload = Workload::draw(&sizes(), 24, 3, seed).unwrap();
        let mut problem = problem(&costs, &workload, cluster(128, 1 << 40));
        problem.cluster.links = has_links.then(links);
        if is_by_sample {
            problem.encoder_split = EncoderSplit::Sample;
        }
        prop_assume!(dp * microbatches <= 24);
        let score = evaluate(&problem, &disaggregated(of_encoder, of_llm, microbatches));
        prop_assume!(score.is_ok());
        let score = score.unwrap();
        let mean_ns = score.mean_seconds() * 1e9;
        prop_assert!(score.lower_bound_ns <= mean_ns, "{} {mean_ns}", score.lower_bound_ns);
        prop_assert!(score.lower_bound_ns > mean_ns * 0.05, "{} {mean_ns}", score.lower_bound_ns);
    }
}
