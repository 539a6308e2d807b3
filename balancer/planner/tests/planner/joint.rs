//! Joint placement plans keep all guarantees.

use super::closed_form::{cluster, encoder, llm, problem, sizes};
use dflop_planner::{
    Degrees, Method, ModulePlan, ParallelismPlan, Placement, PlanProblem, SearchSpaceOptions, Workload,
    compare, evaluate, plan,
};

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
        let stages = by_hand.plan.encoders[0].layers.iter().enumerate();
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
        [&found.plan.encoders[0], &found.plan.llm].map(|module| module.layers.iter().sum::<u32>()),
        [4, 6]
    );
    assert!(found.plan.gpus() <= 32 && found.lower_bound_seconds <= found.step_seconds);
    let score = evaluate(&problem, &found.plan).unwrap();
    assert!((score.mean_seconds() - found.step_seconds).abs() < 1e-12);
    assert!(score.llm_bytes <= 14_000_000);
}

/// Four GPUs, 4 samples: every joint plan with every number of microbatches.
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
            // Only layers cut as in the space are its plans.
            for [encoder_layers, llm_layers] in cuts(pp as usize) {
                let module = |degrees, layers| ModulePlan { degrees, layers, is_recomputed: false };
                let plan = ParallelismPlan {
                    encoders: vec![module(Degrees { tp: 1, pp, dp: dp * tp }, encoder_layers)],
                    llm: module(Degrees { tp, pp, dp }, llm_layers),
                    placement: Placement::Joint,
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

/// Lists the ways to cut 4 encoder layers and 6 LLM layers, a single chain, into non-empty stages.
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
