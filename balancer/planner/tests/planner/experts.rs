//! Plans for a model with experts: every expert-parallel degree is searched, and costs follow it.

use super::closed_form::{cluster, links, sizes};
use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::model::{ExpertsDetails, ExpertsSpec, LayerSet};
use dflop_costmodel::{DevicePreset, ExpertImbalance, ModelSpec};
use dflop_planner::{
    Cluster, Degrees, EncoderSplit, ExpertParallel, ModelCostsBuilder, ModuleCosts, ModulePlan,
    ParallelismPlan, Placement, PlanProblem, PlannedModel, SearchSpaceOptions, StagePart, Workload, compare,
    evaluate, plan,
};

/// Two experts out of eight in each layer, in four layers.
fn spec() -> ModelSpec {
    let mut spec = ModelSpec::preset("tiny").unwrap();
    spec.audio = None;
    spec.llm.experts = Some(ExpertsSpec {
        layers: LayerSet::range(0, 4),
        experts: 8,
        experts_per_token: 2,
        ffn: 1024,
        shared_ffn: 0,
        details: ExpertsDetails::NONE,
    });
    spec
}

fn settings(degree: Option<u32>, imbalance: ExpertImbalance) -> ExpertParallel {
    ExpertParallel { degree, imbalance, links: Some(links()), gpus_per_node: 2 }
}

fn costs(spec: &ModelSpec, settings: ExpertParallel) -> PlannedModel {
    let device = DevicePreset::named("a100").unwrap();
    ModelCostsBuilder::new(spec).device(device).expert_parallel(settings).build().unwrap()
}

fn problem<'a>(costs: &'a PlannedModel, workload: &'a Workload, memory_bytes: u64) -> PlanProblem<'a> {
    PlanProblem {
        encoders: costs.encoder_costs(),
        llm: &costs.llm,
        workload,
        cluster: Cluster { gpus_per_node: 2, links: Some(links()), ..cluster(4, memory_bytes) },
        options: SearchSpaceOptions::default(),
        encoder_split: EncoderSplit::Tile,
        memory_margin: 1.0,
    }
}

/// Every plan on four GPUs with every degree, with and without memory for all experts on a single GPU.
#[test]
fn a_small_cluster_gets_the_degree_of_brute_force() {
    let (spec, workload) = (spec(), Workload::draw(&sizes(), 4, 1, 1).unwrap());
    let costs = costs(&spec, settings(None, ExpertImbalance::Uniform));
    for memory_bytes in [1 << 40, 600_000_000] {
        let problem = problem(&costs, &workload, memory_bytes);
        let found = plan(&problem).unwrap();
        assert!(found.is_exhaustive);
        let (mut best, mut tried) = (f64::INFINITY, 0);
        for (expert_parallel, encoder, llm) in small_plans() {
            for microbatches in 1..=4 / llm.dp {
                let plan = ParallelismPlan {
                    encoders: vec![ModulePlan::even(4, encoder)],
                    llm: ModulePlan::even(4, llm),
                    expert_parallel,
                    microbatches,
                    placement: Placement::Disaggregated,
                    schedule: ScheduleKind::OneForwardOneBackward,
                };
                let Ok(score) = evaluate(&problem, &plan) else { continue };
                tried += 1;
                if score.llm_bytes.max(score.encoder_bytes[0]) <= memory_bytes {
                    best = best.min(score.mean_seconds());
                }
            }
        }
        assert!(tried > 20, "{tried}");
        assert!((best - found.step_seconds).abs() < 1e-12, "{best} {found:?}");
        assert!(found.lower_bound_seconds <= best);
        let compared = compare(&problem, &found).unwrap();
        let ours = compared.methods.last().unwrap();
        assert!((ours.step_seconds - found.step_seconds).abs() < 1e-12, "{ours:?}");
        let loads = found.expert_loads.unwrap();
        assert!(1.0 <= loads.expected && loads.expected <= loads.worst);
    }
}

/// With a fixed degree, the LLM's DP degree is a multiple of it, and other degrees are rejected.
#[test]
fn a_fixed_degree_divides_the_dp_degree() {
    let (spec, workload) = (spec(), Workload::draw(&sizes(), 4, 1, 1).unwrap());
    let costs = costs(&spec, settings(Some(2), ExpertImbalance::Uniform));
    let problem = problem(&costs, &workload, 1 << 40);
    let found = plan(&problem).unwrap();
    assert_eq!((found.plan.expert_parallel, found.plan.llm.degrees.dp), (2, 2));
    assert!((evaluate(&problem, &found.plan).unwrap().mean_seconds() - found.step_seconds).abs() < 1e-12);
    let mut odd = found.plan.clone();
    odd.llm.degrees.dp = 1;
    assert!(evaluate(&problem, &odd).is_err());
    let three = ParallelismPlan { expert_parallel: 3, ..found.plan };
    let error = evaluate(&problem, &three).unwrap_err().to_string();
    assert!(error.contains("expert parallelism of 3 is not one"), "{error}");
}

/// Lists expert parallelism and the encoder and LLM degrees on four GPUs.
fn small_plans() -> Vec<(u32, Degrees, Degrees)> {
    let mut all = Vec::new();
    for (tp, pp) in [(1, 1), (1, 2), (1, 3), (2, 1)] {
        for dp in 1..=3 / (tp * pp) {
            for (encoder_tp, encoder_pp) in [(1, 1), (1, 2), (2, 1), (1, 3)] {
                for encoder_dp in 1..=(4 - tp * pp * dp) / (encoder_tp * encoder_pp) {
                    let encoder = Degrees { tp: encoder_tp, pp: encoder_pp, dp: encoder_dp };
                    let llm = Degrees { tp, pp, dp };
                    all.extend([1, 2, 4, 8].map(|ep| (ep, encoder, llm)));
                }
            }
        }
    }
    all
}

/// Expert bytes are divided; times grow with the fullest rank's load and with the exchanges.
#[test]
fn costs_follow_the_degree() {
    let spec = spec();
    let of = |degree: u32, factor: f64| costs(&spec, settings(Some(degree), ExpertImbalance::Factor(factor)));
    let part = StagePart { layers: 4, is_first: true, is_last: true };
    let experts = 4.0 * 8.0 * 3.0 * 256.0 * 1024.0;
    let (one, four) = (of(1, 1.0).llm, of(4, 1.0).llm);
    let bytes = |costs: &dyn ModuleCosts| {
        let memory = costs.memory(1, part, false);
        memory.fixed + memory.optimizer + memory.expert_optimizer
    };
    assert!((bytes(&one) - bytes(&four) - 16.0 * experts * 0.75).abs() < 1.0);
    assert!((four.expert_gradient_bytes(1, part) - 2.0 * experts / 4.0).abs() < 1.0);
    let gradients = |costs: &dyn ModuleCosts| {
        costs.gradient_bytes(1, part)
            + costs.expert_gradient_bytes(1, part) * f64::from(costs.expert_parallel())
    };
    assert!((gradients(&one) - gradients(&four)).abs() < 1.0);
    let shared = four.memory(1, part, false).shared_by(8);
    assert!(
        (shared.expert_optimizer - 12.0 * experts / 4.0 / 2.0).abs() < 1.0,
        "two ranks have the same experts"
    );
    // Twice the load: the expert and exchange times once more.
    let [even, double] = [1.0, 2.0].map(|factor| of(4, factor).llm.layer_ns(1, 10_000));
    assert!(double > even && double < 2.0 * even);
    // Three quarters of 20,000 rows with 512 bytes are exchanged four times: a fourth in the node, two
    // fourths outside.
    let bytes = 20_000.0 * 512.0;
    let exchange = 4.0 * (links().nvlink.send_ns(bytes / 4.0) + links().infiniband.send_ns(bytes / 2.0));
    let free = ModelCostsBuilder::new(&spec).device(DevicePreset::named("a100").unwrap());
    let settings = ExpertParallel { links: None, ..settings(Some(4), ExpertImbalance::Factor(1.0)) };
    let free = free.expert_parallel(settings).build().unwrap();
    assert!((even - free.llm.layer_ns(1, 10_000) - exchange).abs() < 1.0);
}

#[test]
fn a_degree_that_does_not_divide_the_experts_is_an_error() {
    let build = |spec: &ModelSpec, degree| {
        let device = DevicePreset::named("a100").unwrap();
        let settings = settings(Some(degree), ExpertImbalance::Uniform);
        let built = ModelCostsBuilder::new(spec).device(device).expert_parallel(settings).build();
        built.map(|_| ()).unwrap_err().to_string()
    };
    assert_eq!(build(&spec(), 3), "invalid `ep`: = 3 must divide the 8 experts of a layer");
    let plain = ModelSpec::preset("tiny").unwrap();
    assert_eq!(build(&plain, 2), "invalid `ep`: `tiny` has no experts to divide over 2 ranks");
}
