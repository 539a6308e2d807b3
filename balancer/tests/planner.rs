//! The planner agrees with brute force, its bound with scores, and its explanations with the facts.

use dflop_balancer::Error;
use dflop_balancer::planner::{
    Cluster, Degrees, EncoderSplit, ItemSize, Link, Links, Method, ModuleCosts, ParallelismPlan, Placement,
    PlanProblem, SearchSpaceOptions, StageBytes, StagePart, Workload, compare, evaluate, plan,
};
use proptest::prelude::*;

/// A module in closed form: a launch cost, work in proportion to units, attention with their square.
#[derive(Debug, Clone)]
struct ClosedForm {
    layers: u32,
    degrees: Vec<u32>,
    launch_ns: f64,
    unit_ns: f64,
    square_ns: f64,
    ends_ns: f64,
    layer_bytes: f64,
    unit_bytes: f64,
}

impl ModuleCosts for ClosedForm {
    fn layers(&self) -> u32 {
        self.layers
    }

    fn tp_degrees(&self) -> Vec<u32> {
        self.degrees.clone()
    }

    /// Every degree costs a tenth more than the share that it removes.
    fn layer_ns(&self, tp: u32, units: u64) -> f64 {
        let tp = f64::from(tp);
        self.launch_ns + self.unit_ns * units as f64 * (0.9 / tp + 0.1)
    }

    fn sample_ns(&self, tp: u32, units: u64) -> f64 {
        self.square_ns * (units * units) as f64 / f64::from(tp)
    }

    fn outside_layers_ns(&self, tp: u32, units: u64) -> f64 {
        self.ends_ns * units as f64 / f64::from(tp)
    }

    fn memory(&self, tp: u32, part: StagePart, is_recomputed: bool) -> StageBytes {
        let (layers, tp) = (f64::from(part.layers), f64::from(tp));
        let kept = self.unit_bytes * layers / tp;
        StageBytes {
            fixed: self.layer_bytes * layers / tp / 4.0,
            optimizer: 0.75 * self.layer_bytes * layers / tp,
            kept_per_unit: if is_recomputed { kept / 8.0 } else { kept },
            working_per_unit: if is_recomputed { self.unit_bytes / tp } else { 0.0 },
        }
    }

    fn border_bytes(&self) -> f64 {
        1000.0
    }

    fn gradient_bytes(&self, tp: u32, part: StagePart) -> f64 {
        self.layer_bytes * f64::from(part.layers) / f64::from(tp) / 8.0
    }
}

fn encoder() -> ClosedForm {
    ClosedForm {
        layers: 4,
        degrees: vec![1, 2],
        launch_ns: 2_000.0,
        unit_ns: 30_000.0,
        square_ns: 0.0,
        ends_ns: 9_000.0,
        layer_bytes: 1e6,
        unit_bytes: 1e4,
    }
}

fn llm() -> ClosedForm {
    ClosedForm {
        layers: 6,
        degrees: vec![1, 2, 4],
        launch_ns: 5_000.0,
        unit_ns: 60.0,
        square_ns: 0.01,
        ends_ns: 90.0,
        layer_bytes: 8e6,
        unit_bytes: 2e3,
    }
}

fn sizes() -> Vec<ItemSize> {
    (0..97).map(|at: u32| ItemSize::of_tiles(at * 7919 % 11 % 7, 100 + at * 104_729 % 1900)).collect()
}

fn cluster(gpus: u32, memory_bytes: u64) -> Cluster {
    Cluster { gpus, gpus_per_node: 4, memory_bytes, links: None }
}

fn links() -> Links {
    let link = |bytes_per_second, latency_seconds| Link { bytes_per_second, latency_seconds };
    Links { nvlink: link(2e11, 1e-6), infiniband: link(1e10, 1e-5) }
}

fn problem<'a>(
    costs: &'a (ClosedForm, ClosedForm),
    workload: &'a Workload,
    cluster: Cluster,
) -> PlanProblem<'a> {
    PlanProblem {
        encoder: &costs.0,
        llm: &costs.1,
        workload,
        cluster,
        options: SearchSpaceOptions::default(),
        encoder_split: EncoderSplit::Tile,
        memory_margin: 1.0,
    }
}

/// Splits layers as equally as possible, larger shares first.
fn even(layers: u32, pp: u32) -> Vec<u32> {
    (0..pp).map(|stage| layers / pp + u32::from(stage < layers % pp)).collect()
}

fn disaggregated(encoder: Degrees, llm: Degrees, microbatches: u32) -> ParallelismPlan {
    ParallelismPlan {
        rounds_ahead: 0,
        encoder,
        llm,
        microbatches,
        placement: Placement::Disaggregated,
        encoder_layers: even(4, encoder.pp),
        llm_layers: even(6, llm.pp),
        is_encoder_recomputed: false,
        is_llm_recomputed: false,
    }
}

/// Lists all degrees of a module on at most `gpus` GPUs.
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
                    if score.encoder_bytes.max(score.llm_bytes) <= memory_bytes {
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
        "data-blind, uniform",
        "data-blind, joint",
        "by hand",
        "data-blind",
        "lpt",
        "lpt, sorted",
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
    assert_eq!(
        (uniform.plan.encoder.tp, uniform.plan.encoder.dp),
        (uniform.plan.llm.tp, uniform.plan.llm.dp)
    );
    for (method, sorted) in [(Method::Lpt, Method::LptSorted), (Method::Paper, Method::PaperSorted)] {
        let changed = (of(method).step_seconds - of(sorted).step_seconds).abs();
        assert!(changed > 1e-9, "{method:?}: the order matters");
    }
    assert_eq!(of(Method::Lpt).plan, found.plan);
    assert_eq!(of(Method::LptSorted).plan, found.plan);
}

#[test]
fn joint_plans_are_at_least_as_fast_as_all_methods() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 96, 10, 3).unwrap();
    for memory_bytes in [1 << 40, 40_000_000] {
        let options = SearchSpaceOptions { is_joint: true, ..SearchSpaceOptions::default() };
        let problem = PlanProblem { options, ..problem(&costs, &workload, cluster(32, memory_bytes)) };
        let found = plan(&problem).unwrap();
        let compared = compare(&problem, &found).unwrap();
        let ours = compared.methods.last().unwrap();
        assert!((ours.step_seconds - found.step_seconds).abs() < 1e-12);
        assert!(ours.fits && compared.ideal_seconds <= ours.step_seconds);
        for score in compared.methods.iter().filter(|score| score.fits) {
            assert!(ours.step_seconds <= score.step_seconds * 1.005, "{score:?}");
        }
        let by_hand = compared.methods.iter().find(|score| score.method == Method::ByHand).unwrap();
        assert_eq!(by_hand.plan.placement, Placement::Joint);
        let stages = by_hand.plan.encoder_layers.iter().enumerate();
        assert!(stages.skip(1).all(|(_, layers)| *layers == 0), "{by_hand:?}");
    }
}

#[test]
fn joint_plans_hold_every_layer_once_and_fit() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 96, 10, 3).unwrap();
    let options = SearchSpaceOptions {
        is_disaggregated: false,
        is_joint: true,
        has_sharded_optimizer: true,
        ..SearchSpaceOptions::default()
    };
    let problem = PlanProblem { options, ..problem(&costs, &workload, cluster(32, 14_000_000)) };
    let found = plan(&problem).unwrap();
    assert_eq!(found.plan.placement, Placement::Joint);
    assert_eq!(
        [&found.plan.encoder_layers, &found.plan.llm_layers].map(|layers| layers.iter().sum::<u32>()),
        [4, 6]
    );
    assert!(found.plan.gpus() <= 32 && found.lower_bound_seconds <= found.step_seconds);
    let score = evaluate(&problem, &found.plan).unwrap();
    assert!((score.mean_seconds() - found.step_seconds).abs() < 1e-12);
    assert!(score.llm_bytes <= 14_000_000);
}

/// Four GPUs of 4 samples: every joint plan with every number of microbatches.
#[test]
fn no_joint_plan_of_a_small_cluster_is_better() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 8, 3, 5).unwrap();
    let options =
        SearchSpaceOptions { is_disaggregated: false, is_joint: true, ..SearchSpaceOptions::default() };
    let problem = PlanProblem { options, ..problem(&costs, &workload, cluster(4, 1 << 40)) };
    let found = plan(&problem).unwrap();
    assert!(found.is_exhaustive);
    let mut tried = 0;
    for (tp, pp) in [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (4, 1_u32)] {
        let dp = 4 / (tp * pp);
        for microbatches in 1..=8 / dp {
            // Only layers as the space cuts them are its plans.
            for [encoder_layers, llm_layers] in cuts(pp as usize) {
                let plan = ParallelismPlan {
                    encoder: Degrees { tp: 1, pp, dp: dp * tp },
                    llm: Degrees { tp, pp, dp },
                    placement: Placement::Joint,
                    encoder_layers,
                    llm_layers,
                    ..found.plan.clone()
                };
                let plan = ParallelismPlan { microbatches, ..plan };
                let Ok(score) = evaluate(&problem, &plan) else { continue };
                tried += 1;
                assert!(score.mean_seconds() >= found.step_seconds - 1e-12, "{plan:?}");
                assert!(score.mean_seconds() >= found.lower_bound_seconds);
            }
        }
    }
    assert!(tried > 50, "{tried}");
}

/// Lists the ways to cut 4 encoder layers and 6 LLM layers, one chain, into stages that are not empty.
fn cuts(stages: usize) -> Vec<[Vec<u32>; 2]> {
    let borders = |code: usize| -> Vec<usize> { (1..10).filter(|at| code >> at & 1 == 1).collect() };
    let chosen = (0..1_usize << 10).filter(|code| code & 1 == 0 && code.count_ones() as usize + 1 == stages);
    let cut = |code: usize| {
        let mut ends = borders(code);
        ends.push(10);
        let mut start = 0;
        let mut layers = [Vec::new(), Vec::new()];
        for end in ends {
            layers[0].push(end.min(4).saturating_sub(start.min(4)) as u32);
            layers[1].push((end.max(4) - start.max(4)) as u32);
            start = end;
        }
        layers
    };
    chosen.map(cut).collect()
}

/// One rank, one stage each, one microbatch: every method with GPUs of its own for the encoder runs the same
/// two passes one after another, and those on one GPU the same without a wait.
#[test]
fn without_a_choice_all_methods_agree() {
    let costs = (ClosedForm { degrees: vec![1], ..encoder() }, ClosedForm { degrees: vec![1], ..llm() });
    let workload = Workload::draw(&[ItemSize::of_tiles(3, 500)], 1, 1, 0).unwrap();
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
    for memory in [explanation.encoder_memory, explanation.llm_memory] {
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
                if score.encoder_bytes.max(score.llm_bytes) <= 40_000_000 {
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
    assert_eq!((colocated.placement, colocated.encoder.pp), (Placement::Colocated, 1));
    assert_eq!(colocated.encoder.gpus(), colocated.llm.gpus());
    problem.options = SearchSpaceOptions::default();
    problem.cluster.links = Some(links());
    assert!(plan(&problem).unwrap().step_seconds > plain.step_seconds);
    problem.cluster.links = None;
    problem.encoder_split = EncoderSplit::Sample;
    assert!(plan(&problem).unwrap().step_seconds >= plain.step_seconds);
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
    let layers = &uneven.plan.llm_layers;
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
