//! Checks that measured times correct the plans: at an agreed step, on all ranks, until predictions are
//! right.

use std::sync::Arc;

use dflop_costmodel::correction::{
    CorrectionOptions, CorrectionTable, CorrectionTracker, FACTOR_ONE, SampleTime,
};
use dflop_costmodel::{CostModel, DeviceRate, ModelSpec, Module};
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::expand_shards;
use dflop_loader::{StepPlan, StepPlanner};
use dflop_tests::tar::TarBytes;

const DP_SIZE: usize = 2;
const MICROBATCHES: usize = 4;
/// Number of tokens from which texts run slower than predicted.
const SLOW_TOKENS: u64 = 600;

/// Writes texts with 1 to 1,500 words, short texts more often.
fn planner() -> StepPlanner {
    let directory = tempfile::tempdir().unwrap();
    let mut tar = TarBytes::new();
    for sample in 0..400_usize {
        let words = 1 + (sample * 7919 % 400).pow(2) * 1500 / 160_000;
        tar = tar.file(&format!("{sample:03}.txt"), "word ".repeat(words).as_bytes());
    }
    let shard = directory.path().join("texts.tar");
    std::fs::write(&shard, tar.finish()).unwrap();
    let shards = expand_shards(&[shard.to_str().unwrap()]).unwrap();
    let index = Arc::new(Index::open_or_build(shards, &IndexOptions::default()).unwrap());
    let model = CostModel::new(ModelSpec::preset("omni-7b").unwrap(), DeviceRate::preset("h100").unwrap());
    let builder = StepPlanner::builder(index, model).global_batch(64).dp_size(DP_SIZE);
    builder.microbatches(MICROBATCHES).work(200).build().unwrap()
}

fn llm_ns(plan: &StepPlan) -> Vec<u64> {
    plan.costs.iter().map(|cost| *cost.module_ns.as_slice().last().unwrap()).collect()
}

/// Returns the true sample time.
fn true_ns(tokens: u64, predicted_ns: u64) -> u64 {
    if tokens >= SLOW_TOKENS { 2 * predicted_ns } else { predicted_ns }
}

#[test]
fn a_table_is_in_force_from_its_step_on_in_every_clone() {
    let (planner, other) = (planner(), planner());
    let clone = planner.clone();
    let before = [planner.plan(4).unwrap(), other.plan(5).unwrap()];
    let table = |version, step| CorrectionTable::new(version, step, [(Module::Llm, 1000, 2 * FACTOR_ONE)]);
    planner.correct(table(1, 5).unwrap()).unwrap();
    let after = [clone.plan(4).unwrap(), clone.plan(5).unwrap()];
    assert_eq!(llm_ns(&after[0]), llm_ns(&before[0]));
    assert_ne!(llm_ns(&after[1]), llm_ns(&before[1]));
    assert_eq!(after[1].samples, before[1].samples, "the samples of a step do not depend on costs");
    assert_eq!(planner.planned_steps(), 6);
    for (table, reason) in [(table(2, 5), "6 steps are planned"), (table(1, 9), "does not follow")] {
        let refused = planner.correct(table.unwrap()).unwrap_err().to_string();
        assert!(refused.contains(reason), "{refused}");
    }
}

#[test]
fn an_observation_holds_the_samples_of_a_microbatch_without_correction() {
    let planner = planner();
    let factors = [(Module::Llm, 1000, 3 * FACTOR_ONE)];
    planner.correct(CorrectionTable::new(1, 0, factors).unwrap()).unwrap();
    let corrected = planner.plan(0).unwrap();
    let observed = planner.observation(&corrected, [1, 2], Some(Module::Llm), 77).unwrap();
    assert_eq!((observed.module, observed.measured_ns), (Some(Module::Llm), 77));
    assert_eq!(observed.samples.len(), corrected.ranks[1][2].len());
    for (&SampleTime { size: tokens, ns, .. }, &place) in observed.samples.iter().zip(&corrected.ranks[1][2])
    {
        let cost = &corrected.costs[place as usize];
        assert_eq!(tokens, u64::from(cost.tokens));
        assert!(ns <= cost.module_ns.as_slice()[2]);
    }
    // Texts have no work for the encoders.
    assert_eq!(planner.observation(&corrected, [0, 0], Some(Module::Vision), 77), None);
}

#[test]
fn texts_that_run_slower_than_predicted_are_learned_while_the_run_goes_on() {
    let planner = planner();
    let options = CorrectionOptions { interval_steps: 16, lead_steps: 2, ..CorrectionOptions::default() };
    let mut tracker = CorrectionTracker::new(options).unwrap();
    let mut tables = 0;
    for step in 0..64 {
        let plan = planner.plan(step).unwrap();
        for rank in 0..DP_SIZE {
            for microbatch in 0..MICROBATCHES {
                let place = [rank, microbatch];
                let Some(mut observed) = planner.observation(&plan, place, Some(Module::Llm), 1) else {
                    continue;
                };
                observed.measured_ns =
                    observed.samples.iter().map(|sample| true_ns(sample.size, sample.ns)).sum();
                tracker.observe(&observed).unwrap();
            }
        }
        if let Some(table) = tracker.end_step().and_then(|report| report.table) {
            planner.correct(table).unwrap();
            tables += 1;
        }
    }
    assert!(tables > 0);
    let plan = planner.plan(70).unwrap();
    let bare = self::planner().plan(70).unwrap();
    let mut slow = [0.0, 0.0];
    for ((cost, predicted), bare) in plan.costs.iter().zip(llm_ns(&plan)).zip(llm_ns(&bare)) {
        let truth = true_ns(cost.tokens.into(), bare) as f64;
        let error = (predicted as f64 - truth).abs() / truth;
        // Bins are an eighth of an octave wide: the bin that contains the limit has samples of both kinds.
        let is_near_limit = (0.9..1.1).contains(&(f64::from(cost.tokens) / SLOW_TOKENS as f64));
        assert!(error < 0.05 || is_near_limit, "{} tokens: {error}", cost.tokens);
        if u64::from(cost.tokens) >= SLOW_TOKENS {
            slow[0] += (bare as f64 - truth).abs() / truth;
            slow[1] += error;
        }
    }
    assert!(slow[0] > 10.0 * slow[1] && slow[0] > 1.0, "{slow:?}");
}
