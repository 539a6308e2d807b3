//! Compares the planner with the reference implementation's rule and the paper's, all on the same simulation.

use dflop_planner::{
    EncoderSplit, Evaluation, ParallelismPlan, PlanProblem, SearchSpaceOptions, Workload, evaluate, plan,
};
use dflop_tests::plan_cases::rules::{Rule, choose, is_complete};
use dflop_tests::plan_cases::{CASES, Case, Prepared};

fn problem<'a>(prepared: &'a Prepared, workload: &'a Workload) -> PlanProblem<'a> {
    PlanProblem {
        encoders: prepared.model.encoder_costs(),
        llm: &prepared.model.llm,
        workload,
        cluster: prepared.cluster,
        options: SearchSpaceOptions::default(),
        encoder_split: EncoderSplit::Tile,
        memory_margin: 1.1,
    }
}

/// Returns the plan time in seconds on the batches of a case.
fn seconds(case: &Case, prepared: &Prepared, batches: usize, plan: &ParallelismPlan) -> f64 {
    let workload = prepared.workload(case.global_batch, batches);
    evaluate(&problem(prepared, &workload), plan).as_ref().map(Evaluation::mean_seconds).unwrap()
}

#[test]
fn no_plan_of_the_reference_is_faster_and_on_the_geometric_mean_it_is_ten_percent_slower() {
    let mut product = 1.0_f64;
    for case in &CASES {
        let prepared = case.prepare();
        assert!(is_complete(&prepared), "{}", case.name);
        let workload = prepared.workload(case.global_batch, 20);
        let found = plan(&problem(&prepared, &workload)).unwrap();
        let theirs = choose(Rule::Reference, case, &prepared).unwrap();
        let theirs_seconds = seconds(case, &prepared, 20, &theirs);
        let factor = theirs_seconds / found.step_seconds;
        assert!(factor >= 1.0, "{}: {factor} {theirs:?} {:?}", case.name, found.plan);
        product *= factor;
    }
    let mean = product.powf(1.0 / CASES.len() as f64);
    assert!(mean >= 1.10, "{mean}");
}

#[test]
fn the_makespan_of_the_mean_is_no_guide() {
    let case = &CASES[0];
    let prepared = case.prepare();
    let workload = prepared.workload(case.global_batch, 10);
    let found = plan(&problem(&prepared, &workload)).unwrap();
    let paper = choose(Rule::Paper, case, &prepared).unwrap();
    assert!(seconds(case, &prepared, 10, &paper) > found.step_seconds, "{paper:?}");
}
