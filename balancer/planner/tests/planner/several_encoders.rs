//! Plans for models with several parallel encoders.

use super::closed_form::{ClosedForm, cluster, encoder, links, llm, problem, sizes};
use super::{degrees, most_bytes};
use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::MediaUnits;
use dflop_planner::{
    Degrees, ItemSize, Method, ModulePlan, ParallelismPlan, Placement, PlanProblem, SearchSpaceOptions,
    Workload, compare, evaluate, plan,
};

/// An audio-window encoder: fewer layers, each slower.
fn audio() -> ClosedForm {
    ClosedForm { layers: 3, degrees: vec![1], unit_ns: 70_000.0, ..encoder() }
}

/// Every third sample has audio, most have tiles.
fn heard_and_seen() -> Vec<ItemSize> {
    let with_audio = |(at, size): (usize, ItemSize)| {
        let windows = if at % 3 == 0 { 1 + at as u32 % 5 } else { 0 };
        let audio = MediaUnits::from_tiles(windows, 1);
        ItemSize::from_media(&[size.media(0), audio], size.tokens + 50 * windows).unwrap()
    };
    sizes().into_iter().enumerate().map(with_audio).collect()
}

fn with_audio<'a>(problem: &PlanProblem<'a>, audio: &'a ClosedForm) -> PlanProblem<'a> {
    PlanProblem { encoders: vec![problem.encoders[0], audio], ..problem.clone() }
}

/// The second encoder has negligible layers and no media: the plan without it is as fast with a GPU less.
#[test]
fn an_encoder_without_work_costs_a_gpu_and_no_time() {
    let (costs, idle) = ((encoder(), llm()), ClosedForm { layers: 1, launch_ns: 0.0, ..audio() });
    let workload = Workload::draw(&sizes(), 48, 4, 1).unwrap();
    let alone = plan(&problem(&costs, &workload, cluster(11, 1 << 40))).unwrap();
    let both = with_audio(&problem(&costs, &workload, cluster(12, 1 << 40)), &idle);
    let found = plan(&both).unwrap();
    assert_eq!(found.plan.encoders.len(), 2);
    assert!(found.step_seconds <= alone.step_seconds * 1.01, "{found:?} {alone:?}");
}

/// Five GPUs: every split, degree and number of microbatches for two encoders and the LLM.
#[test]
fn a_small_cluster_gets_the_plan_of_brute_force() {
    let (costs, audio) = ((encoder(), llm()), audio());
    let workload = Workload::draw(&heard_and_seen(), 8, 3, 1).unwrap();
    for (gpus, memory_bytes) in [(3, 1 << 40), (5, 1 << 40), (6, 55_000_000)] {
        let problem = with_audio(&problem(&costs, &workload, cluster(gpus, memory_bytes)), &audio);
        let found = plan(&problem).unwrap();
        let mut best = f64::INFINITY;
        let mut tried = 0;
        for seen in degrees(&[1, 2], 4, gpus - 2) {
            for heard in degrees(&[1], 3, gpus - 1 - seen.gpus()) {
                for of_llm in degrees(&[1, 2, 4], 6, gpus - seen.gpus() - heard.gpus()) {
                    for microbatches in 1..=8 / of_llm.dp {
                        let plan = disaggregated([seen, heard], of_llm, microbatches);
                        let Ok(score) = evaluate(&problem, &plan) else { continue };
                        assert!(score.lower_bound_ns / 1e9 <= score.mean_seconds(), "{plan:?}");
                        tried += 1;
                        if most_bytes(&score) <= memory_bytes {
                            best = best.min(score.mean_seconds());
                        }
                    }
                }
            }
        }
        assert!(tried >= 8, "{tried}");
        assert!((found.step_seconds - best).abs() < 1e-12, "{gpus}: {} {best} {found:?}", found.step_seconds);
        assert!(found.lower_bound_seconds <= best);
    }
}

fn disaggregated(encoders: [Degrees; 2], llm: Degrees, microbatches: u32) -> ParallelismPlan {
    let [seen, heard] = encoders;
    ParallelismPlan {
        expert_parallel: 1,
        encoders: vec![ModulePlan::even(4, seen), ModulePlan::even(3, heard)],
        llm: ModulePlan::even(6, llm),
        microbatches,
        placement: Placement::Disaggregated,
        schedule: ScheduleKind::OneForwardOneBackward,
    }
}

/// All placements and links: our plan is at least as fast as every method's plan, and the comparison finds
/// the promised time.
#[test]
fn no_method_is_faster() {
    let (costs, audio) = ((encoder(), llm()), audio());
    let workload = Workload::draw(&heard_and_seen(), 96, 6, 3).unwrap();
    for (is_joint, is_colocated, has_links, memory_bytes) in [
        (false, false, false, 1 << 40),
        (false, false, true, 30_000_000),
        (true, false, true, 1 << 40),
        (true, false, false, 20_000_000),
        (false, true, true, 1 << 40),
    ] {
        let options = SearchSpaceOptions {
            is_joint,
            is_colocated,
            has_uneven_layers: has_links,
            has_encoder_ahead: !is_colocated,
            has_sharded_optimizer: is_joint,
            ..SearchSpaceOptions::default()
        };
        let mut cluster = cluster(32, memory_bytes);
        cluster.links = has_links.then(links);
        let problem = PlanProblem { options, ..problem(&costs, &workload, cluster) };
        let problem = with_audio(&problem, &audio);
        let found = plan(&problem).unwrap();
        let compared = compare(&problem, &found).unwrap();
        let ours = compared.methods.last().unwrap();
        assert_eq!(ours.method, Method::Ours);
        assert!((ours.step_seconds - found.step_seconds).abs() < 1e-12, "{ours:?} {found:?}");
        assert!(ours.fits && compared.ideal_seconds <= ours.step_seconds);
        let is_searched = |placement| placement == Placement::Disaggregated || is_joint;
        for score in compared.methods.iter().filter(|score| score.fits && is_searched(score.plan.placement)) {
            assert!(ours.step_seconds <= score.step_seconds * 1.005, "{score:?} {ours:?}");
            assert!(score.plan.gpus() <= 32 && score.plan.encoders.len() == 2);
        }
        let explanation = &found.explanation;
        assert_eq!(explanation.encoder_memory.len(), 2);
        assert!(explanation.encoder_memory.iter().all(|memory| memory.headroom_bytes >= 0));
        let uniform = compared.methods.iter().find(|score| score.method == Method::DataBlindUniform).unwrap();
        assert!(
            uniform.plan.encoders.iter().all(|encoder| encoder.degrees.dp == uniform.plan.llm.degrees.dp)
        );
    }
}

/// Colocated encoders run before and after the LLM, sequentially.
#[test]
fn colocated_encoders_take_turns() {
    let (costs, audio) = ((encoder(), llm()), audio());
    let workload = Workload::draw(&heard_and_seen(), 24, 3, 3).unwrap();
    let options =
        SearchSpaceOptions { is_disaggregated: false, is_colocated: true, ..SearchSpaceOptions::default() };
    let one = PlanProblem { options, ..problem(&costs, &workload, cluster(4, 1 << 40)) };
    let found = plan(&with_audio(&one, &audio)).unwrap();
    assert_eq!(found.plan.placement, Placement::Colocated);
    assert_eq!(found.plan.gpus(), 4);
    assert!(found.step_seconds > plan(&one).unwrap().step_seconds);
}

#[test]
fn more_encoders_than_plans_have_are_refused() {
    let (costs, audio) = ((encoder(), llm()), audio());
    let workload = Workload::draw(&sizes(), 4, 1, 0).unwrap();
    let mut many = problem(&costs, &workload, cluster(8, 1 << 40));
    many.encoders.extend([&audio; 4].map(|audio| audio as &dyn dflop_planner::ModuleCosts));
    let error = plan(&many).unwrap_err().to_string();
    assert_eq!(error, "invalid `encoders`: plans are made for 1 to 4 encoders and an LLM, got 5 encoders");
    assert!(ItemSize::from_media(&[MediaUnits::default(); 5], 1).is_err());
    let mut two = problem(&costs, &workload, cluster(2, 1 << 40));
    two.encoders.push(&audio);
    let error = plan(&two).unwrap_err().to_string();
    assert!(error.contains("use at least 3 GPUs"), "{error}");
}
