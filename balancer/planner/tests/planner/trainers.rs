//! Plans for a trainer are those that it runs, with its gradient sums and its memory.

use super::closed_form::{ClosedForm, cluster, encoder, links, llm, problem, sizes};
use super::disaggregated;
use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::memory::Trainer;
use dflop_planner::{
    Degrees, EncoderSplit, ParallelismPlan, Placement, PlanProblem, SearchSpaceOptions, StageBytes, Workload,
    compare_plan, plan,
};
use proptest::prelude::*;

/// Options for all kinds of plans that PyTorch runs.
fn torch(placements: [bool; 3]) -> SearchSpaceOptions {
    let [is_disaggregated, is_colocated, is_joint] = placements;
    SearchSpaceOptions {
        is_disaggregated,
        is_colocated,
        is_joint,
        has_uneven_layers: true,
        has_recomputation: true,
        has_encoder_ahead: true,
        has_other_schedules: true,
        trainer: Trainer::Torch,
        ..SearchSpaceOptions::default()
    }
}

fn with_options<'a>(
    costs: &'a (ClosedForm, ClosedForm),
    workload: &'a Workload,
    gpus: u32,
    options: SearchSpaceOptions,
) -> PlanProblem<'a> {
    let encoder_split = EncoderSplit::Medium;
    PlanProblem { options, encoder_split, ..problem(costs, workload, cluster(gpus, 1 << 40)) }
}

fn is_run(plan: &ParallelismPlan) -> bool {
    plan.encoders.iter().chain([&plan.llm]).all(|module| module.degrees.tp == 1) && plan.expert_parallel == 1
}

#[test]
fn the_number_of_threads_changes_no_plan() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 48, 6, 3).unwrap();
    let mut problem = with_options(&costs, &workload, 16, torch([true; 3]));
    problem.cluster.links = Some(links());
    let planned = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| plan(&problem).unwrap())
    };
    let found = planned(1);
    assert!(found.plans_simulated > 0);
    for threads in [2, 5] {
        assert_eq!(planned(threads), found, "{threads} threads");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn every_plan_is_one_that_the_trainer_runs(
        gpus in 2u32..10, each in 1u32..4, seed in 0u64..99, places in 1usize..8, is_sharded: bool,
    ) {
        let costs = (encoder(), llm());
        let workload = Workload::draw(&sizes(), gpus * each, 2, seed).unwrap();
        let placements = [1, 2, 4].map(|bit| places & bit > 0);
        let options = SearchSpaceOptions { has_sharded_optimizer: is_sharded, ..torch(placements) };
        let mut problem = with_options(&costs, &workload, gpus, options);
        problem.cluster.links = (seed % 2 == 0).then(links);
        let found = plan(&problem).unwrap();
        prop_assert!(is_run(&found.plan), "{found:?}");
        if let Some(next) = &found.explanation.runner_up {
            prop_assert!(is_run(&next.plan), "{next:?}");
        }
        prop_assert!(found.lower_bound_seconds <= found.step_seconds);
        let given = compare_plan(&problem, &found.plan).unwrap();
        let ours = given.methods.last().unwrap();
        prop_assert!((ours.step_seconds - found.step_seconds).abs() < 1e-12, "{found:?} {given:?}");
    }
}

#[test]
fn plans_that_the_trainer_lacks_are_refused_by_name() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 12, 2, 3).unwrap();
    let problem = with_options(&costs, &workload, 8, torch([true, false, false]));
    let degrees = |tp| Degrees { tp, pp: 1, dp: 1 };
    let executor = SearchSpaceOptions { trainer: Trainer::Dflop, ..problem.options };
    for (tps, module) in [([1, 2], "llm"), ([2, 1], "encoder")] {
        let plan = disaggregated(degrees(tps[0]), degrees(tps[1]), 2);
        let error = compare_plan(&problem, &plan).unwrap_err().to_string();
        let expected =
            format!("`{module}` has a TP degree of 2; trainer `torch` runs stages on one rank each");
        assert!(error.contains(&expected), "{error}");
        assert!(compare_plan(&PlanProblem { options: executor, ..problem.clone() }, &plan).is_ok());
    }
    let experts = ParallelismPlan { expert_parallel: 2, ..disaggregated(degrees(1), degrees(1), 2) };
    assert!(compare_plan(&problem, &experts).is_err());
    let tiles = PlanProblem { encoder_split: EncoderSplit::Tile, ..problem };
    let error = plan(&tiles).unwrap_err().to_string();
    assert!(error.contains("trainer `torch` shares whole media, not tiles"), "{error}");
}

/// A rank per module, so that nothing but sums and passes differs.
fn seconds(options: SearchSpaceOptions, schedule: ScheduleKind, has_links: bool) -> f64 {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 12, 2, 3).unwrap();
    let mut problem = with_options(&costs, &workload, 8, options);
    problem.cluster.links = has_links.then(links);
    let degrees = |pp, dp| Degrees { tp: 1, pp, dp };
    let plan = ParallelismPlan { schedule, ..disaggregated(degrees(1, 2), degrees(3, 2), 3) };
    compare_plan(&problem, &plan).unwrap().methods.last().unwrap().step_seconds
}

/// PyTorch sums gradients after the last pass of a stage, and a split backward pass computes the gradients of
/// rows twice.
#[test]
fn sums_follow_the_passes_and_split_passes_take_longer() {
    let pytorch = torch([true, false, false]);
    let executor = SearchSpaceOptions { trainer: Trainer::Dflop, ..pytorch };
    let both = |schedule, has_links| [executor, pytorch].map(|own| seconds(own, schedule, has_links));
    let plain = ScheduleKind::OneForwardOneBackward;
    let [without, with] = both(plain, false);
    assert!((without - with).abs() < 1e-12);
    let [hidden, exposed] = both(plain, true);
    assert!(hidden < exposed, "{hidden} {exposed}");
    let [once, twice] = both(ScheduleKind::ZeroBubble, false);
    // Three passes in place of two after a forward pass.
    assert!(once < twice && twice < once * 4.0 / 3.0 + 1e-9, "{once} {twice}");
}

#[test]
fn gradient_sums_are_the_least_memory() {
    let bytes = StageBytes {
        fixed: 10.0,
        optimizer: 8.0,
        sums: 4.0,
        shared_sums: 6.0,
        kept_per_unit: 1.0,
        working_per_unit: 1.0,
        ..StageBytes::default()
    };
    assert_eq!([bytes.at(2.0, 1.0), bytes.at(20.0, 1.0)].map(|bytes| bytes as u32), [28, 39]);
    assert!((bytes.shared_by(2).at(0.0, 0.0) - (10.0 + 4.0 + 4.0 + 3.0)).abs() < 1e-12);
}

/// A colocated plan keeps its placement and its degrees in the answer.
#[test]
fn placements_are_searched_alone() {
    let costs = (encoder(), llm());
    let workload = Workload::draw(&sizes(), 12, 2, 3).unwrap();
    for (placements, placement) in [
        ([true, false, false], Placement::Disaggregated),
        ([false, true, false], Placement::Colocated),
        ([false, false, true], Placement::Joint),
    ] {
        let found = plan(&with_options(&costs, &workload, 6, torch(placements))).unwrap();
        assert_eq!(found.plan.placement, placement);
        assert!(is_run(&found.plan));
    }
}
