//! Plans from anywhere have the scores of planned ones, and the reason where they cannot run.

use super::closed_form::{cluster, encoder, links, llm, problem, sizes};
use super::disaggregated;
use dflop_balancer::schedule::ScheduleKind;
use dflop_planner::{
    Cluster, Degrees, Method, MethodStep, ParallelismPlan, Placement, PlanProblem, SearchSpaceOptions,
    Workload, compare, compare_plan, evaluate, method_step, plan,
};
use std::collections::BTreeMap;

fn degrees(tp: u32, pp: u32, dp: u32) -> Degrees {
    Degrees { tp, pp, dp }
}

/// All kinds of plans with one placement.
fn options(placement: Placement) -> SearchSpaceOptions {
    SearchSpaceOptions {
        is_disaggregated: placement == Placement::Disaggregated,
        is_colocated: placement == Placement::Colocated,
        is_joint: placement == Placement::Joint,
        has_uneven_layers: true,
        has_recomputation: true,
        has_encoder_ahead: true,
        has_sharded_optimizer: true,
        ..SearchSpaceOptions::default()
    }
}

/// Makes a plan wrong.
type Change<'a> = &'a dyn Fn(&mut ParallelismPlan);

#[test]
fn a_found_plan_has_the_scores_of_its_search() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 48, 5, 3).unwrap();
    for placement in [Placement::Disaggregated, Placement::Colocated, Placement::Joint] {
        let mut problem = problem(&costs, &workload, cluster(8, 80_000_000));
        problem.options = options(placement);
        problem.cluster.links = Some(links());
        let found = plan(&problem).unwrap();
        // A given plan needs no search options.
        let options = SearchSpaceOptions { has_sharded_optimizer: true, ..SearchSpaceOptions::default() };
        let given = compare_plan(&PlanProblem { options, ..problem.clone() }, &found.plan).unwrap();
        let ours = given.methods.last().unwrap();
        assert_eq!((ours.method, &ours.plan), (Method::Ours, &found.plan));
        assert!((ours.step_seconds - found.step_seconds).abs() < 1e-12, "{placement:?} {ours:?}");
        assert!((ours.step_seconds_p95 - found.step_seconds_p95).abs() < 1e-12);
        assert!(found.lower_bound_seconds <= given.ideal_seconds && given.ideal_seconds <= ours.step_seconds);
        let explanation = &found.explanation;
        assert_eq!(ours.memory, [explanation.encoder_memory[0], explanation.llm_memory]);
        assert!(ours.fits);
        let compared = compare(&problem, &found).unwrap();
        for score in &given.methods {
            let row = compared.methods.iter().find(|row| row.method == score.method).unwrap();
            assert_eq!((row.step_seconds, row.waits), (score.step_seconds, score.waits), "{placement:?}");
        }
    }
}

#[test]
fn a_plan_that_no_search_lists_has_scores() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 96, 5, 3).unwrap();
    let problem = problem(&costs, &workload, cluster(16, 1 << 40));
    let even = disaggregated(degrees(1, 2, 1), degrees(2, 3, 2), 4);
    let mut uneven = even.clone();
    (uneven.encoders[0].layers, uneven.llm.layers) = (vec![1, 3], vec![1, 4, 1]);
    assert!(evaluate(&problem, &uneven).is_err());
    let [even_seconds, uneven_seconds] = [&even, &uneven].map(|plan| {
        let compared = compare_plan(&problem, plan).unwrap();
        let names: Vec<&str> = compared.methods.iter().map(|score| score.method.name()).collect();
        assert_eq!(names, ["data-blind", "lpt", "lpt, sorted", "dflop"]);
        let ours = compared.methods.last().unwrap().step_seconds;
        for score in &compared.methods {
            assert!(compared.ideal_seconds <= ours && ours <= score.step_seconds, "{score:?}");
            assert_eq!((&score.plan, score.fits), (plan, true));
            let waits: f64 = score.waits.largest_first().iter().map(|(_, fraction)| fraction).sum();
            assert!((waits - score.idle_fraction).abs() < 1e-9, "{score:?}");
        }
        ours
    });
    assert!(even_seconds < uneven_seconds, "{even_seconds} {uneven_seconds}");
    let score = evaluate(&problem, &even).unwrap();
    assert!((score.mean_seconds() - even_seconds).abs() < 1e-12);
    // A recomputed module takes longer and needs no option of a search.
    uneven.encoders[0].is_recomputed = true;
    let recomputed = compare_plan(&problem, &uneven).unwrap();
    assert!(recomputed.methods[3].step_seconds > uneven_seconds);
}

#[test]
fn joint_and_colocated_plans_may_be_cut_in_any_way() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 96, 3, 3).unwrap();
    let problem = problem(&costs, &workload, cluster(16, 1 << 40));
    let mut joint = disaggregated(degrees(1, 2, 4), degrees(2, 2, 2), 6);
    (joint.placement, joint.encoders[0].layers) = (Placement::Joint, vec![3, 1]);
    joint.llm.layers = vec![0, 6];
    let mut colocated = disaggregated(degrees(2, 1, 4), degrees(1, 2, 4), 6);
    (colocated.placement, colocated.llm.layers) = (Placement::Colocated, vec![5, 1]);
    for plan in [joint, colocated] {
        let compared = compare_plan(&problem, &plan).unwrap();
        let ours = compared.methods.last().unwrap();
        assert!(compared.ideal_seconds <= ours.step_seconds, "{compared:?}");
        assert_eq!((ours.memory.len(), ours.memory[0]), (2, ours.memory[1]), "both modules share the GPUs");
    }
}

#[test]
fn the_passes_in_a_step_end_with_the_step() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 48, 3, 3).unwrap();
    let cluster = Cluster { links: Some(links()), ..cluster(16, 1 << 40) };
    let problem = problem(&costs, &workload, cluster);
    let mut scores = compare(&problem, &plan(&problem).unwrap()).unwrap().methods;
    let mut colocated = disaggregated(degrees(2, 1, 4), degrees(1, 2, 4), 6);
    colocated.placement = Placement::Colocated;
    scores.extend(compare_plan(&problem, &colocated).unwrap().methods);
    assert_eq!(scores.len(), 13);
    for score in &scores {
        let step = |batch: usize| method_step(&problem, score, batch).unwrap();
        let steps: Vec<MethodStep> = (0..3).map(step).collect();
        let mean_ns = steps.iter().map(|step| step.makespan_ns as f64).sum::<f64>() / 3.0;
        assert!((mean_ns / 1e9 / score.step_seconds - 1.0).abs() < 1e-9, "{score:?}");
        for step in steps {
            let mut ends_ns = BTreeMap::new();
            for pass in &step.passes {
                assert!(pass.start_ns < pass.end_ns && pass.end_ns <= step.makespan_ns, "{pass:?}");
                let last_ns = ends_ns.entry([pass.module, pass.stage, pass.rank]).or_insert(0);
                assert!(*last_ns <= pass.start_ns, "{pass:?}: one pass at a time");
                *last_ns = pass.end_ns;
            }
            let modules: Vec<usize> = ends_ns.keys().map(|place| place[0]).collect();
            assert!(modules.contains(&1), "the LLM has passes");
            assert_eq!(modules.contains(&0), score.plan.placement != Placement::Joint);
        }
    }
    assert!(method_step(&problem, &scores[0], 3).is_err());
}

#[test]
fn memory_is_reported_and_not_refused() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 96, 3, 3).unwrap();
    let problem = problem(&costs, &workload, cluster(16, 20_000_000));
    let plan = disaggregated(degrees(1, 1, 4), degrees(1, 1, 12), 2);
    let compared = compare_plan(&problem, &plan).unwrap();
    for score in &compared.methods {
        assert!(!score.fits && score.memory[1].headroom_bytes < 0, "{score:?}");
        assert!(score.memory[0].headroom_bytes > 0, "{score:?}");
    }
}

#[test]
fn a_plan_that_cannot_run_is_refused_with_the_part() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 96, 2, 3).unwrap();
    let problem = problem(&costs, &workload, cluster(16, 1 << 40));
    let base = disaggregated(degrees(1, 1, 4), degrees(2, 2, 2), 4);
    let message = |problem: &PlanProblem<'_>, change: Change<'_>| {
        let mut plan = base.clone();
        change(&mut plan);
        compare_plan(problem, &plan).unwrap_err().to_string()
    };
    let changes: [(Change<'_>, &str); 13] = [
        (&|plan| plan.encoders.push(plan.llm.clone()), "it has 2 encoders, and the model 1"),
        (&|plan| plan.llm.layers[0] = 2, "`llm` has 5 layers, and the model's has 6"),
        (&|plan| plan.llm.layers = vec![6, 0], "`llm` has a stage without layers"),
        (&|plan| plan.llm.degrees.pp = 3, "`llm` has 3 stages, with layers for 2"),
        (
            &|plan| plan.llm.degrees.tp = 3,
            "`llm` has a TP degree of 3; heads, costs and nodes allow: 1, 2, 4",
        ),
        (&|plan| plan.encoders[0].degrees.dp = 0, "`encoder` has a degree of 0"),
        (&|plan| plan.llm.degrees.dp = 7, "it uses 32 GPUs, and the cluster has 16"),
        (&|plan| plan.llm.degrees.dp = u32::MAX, "samples, and a global batch has 96"),
        (&|plan| plan.microbatches = 0, "it has no microbatches"),
        (
            &|plan| plan.microbatches = 100,
            "100 microbatches on each of 2 DP ranks need 200 samples, and a global batch has 96",
        ),
        (
            &|plan| plan.placement = Placement::Joint,
            "`encoder` has tp1,pp1,dp4; with joint placement each GPU holds whole encoder layers: tp1,pp2,dp4",
        ),
        (
            &|plan| plan.placement = Placement::Colocated,
            "`encoder` uses 4 GPUs; a colocated encoder uses the LLM's, which are 8",
        ),
        (&|plan| plan.expert_parallel = 2, "expert parallelism of 2"),
    ];
    for (change, expected) in changes {
        let found = message(&problem, change);
        assert!(found.contains(expected), "{found}, expected {expected}");
    }
    let chain = |layers: [[u32; 2]; 2]| {
        message(&problem, &|plan| {
            plan.placement = Placement::Joint;
            plan.encoders[0].degrees = degrees(1, 2, 4);
            [plan.encoders[0].layers, plan.llm.layers] = layers.map(|layers| layers.to_vec());
        })
    };
    let found = chain([[3, 1], [3, 3]]);
    assert!(found.contains("`encoder` ends in stage 2, after the LLM's first stage, 1"), "{found}");
    let found = chain([[4, 0], [6, 0]]);
    assert!(found.contains("stage 2 has no layers"), "{found}");
}

#[test]
fn a_plan_whose_schedule_cannot_run_is_refused() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 96, 2, 3).unwrap();
    let problem = problem(&costs, &workload, cluster(16, 1 << 40));
    let base = disaggregated(degrees(1, 1, 4), degrees(2, 2, 2), 4);
    let message = |problem: &PlanProblem<'_>, change: Change<'_>| {
        let mut plan = base.clone();
        change(&mut plan);
        compare_plan(problem, &plan).unwrap_err().to_string()
    };
    let found = message(&problem, &|plan| {
        plan.placement = Placement::Joint;
        plan.schedule = ScheduleKind::EncoderAhead { rounds: 1 };
    });
    assert!(
        found.contains("1f1b-ahead:1 is for disaggregated placement, and the plan's is joint"),
        "{found}"
    );
    let found = message(&problem, &|plan| plan.schedule = ScheduleKind::Interleaved { chunks: 2 });
    assert!(found.contains("interleaved:2 is for colocated placement"), "{found}");
    let found = message(&problem, &|plan| {
        plan.placement = Placement::Colocated;
        plan.encoders[0].degrees = degrees(1, 1, 8);
        plan.schedule = ScheduleKind::Interleaved { chunks: 2 };
    });
    assert!(found.contains("`llm` has 4 stages, with layers for 2"), "{found}");
    let found = message(&problem, &|plan| {
        plan.llm.is_recomputed = true;
        plan.schedule = ScheduleKind::ZeroBubble;
    });
    assert!(found.contains("recomputing layers saves no memory"), "{found}");
}
