//! Checks the global order and plans: equal samples for any number of ranks, and any step without the earlier
//! steps.

use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::expand_shards;
use dflop_loader::{StepPlan, Tail};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders::planner;

fn sorted_samples(plan: &StepPlan) -> Vec<u64> {
    let places = plan.ranks.iter().flatten().flatten();
    let mut samples: Vec<u64> = places.map(|&place| plan.samples[place as usize].sample).collect();
    samples.sort_unstable();
    samples
}

#[test]
fn a_step_holds_the_same_samples_for_every_dp_size_and_an_epoch_visits_each_once() {
    let data = TempDataset::new(3, 40, Compression::Plain);
    let index = data.index();
    let mut epochs = Vec::new();
    for dp_size in [1, 2, 3, 8] {
        let planner = planner(&index, 24, dp_size, 2, Tail::Carry);
        let steps: Vec<Vec<u64>> = (0..5).map(|step| sorted_samples(&planner.plan(step).unwrap())).collect();
        let mut epoch = steps.concat();
        epoch.sort_unstable();
        assert_eq!(epoch, (0..120).collect::<Vec<_>>(), "dp size {dp_size}");
        epochs.push(steps);
    }
    assert!(epochs.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn a_late_step_is_planned_as_in_the_full_run() {
    let data = TempDataset::new(2, 30, Compression::Plain);
    let planner = planner(&data.index(), 16, 2, 2, Tail::Carry);
    let all: Vec<_> = (0..9).map(|step| planner.plan(step).unwrap()).collect();
    let late = planner.plan(8).unwrap();
    assert_eq!((late.digest, &late.ranks), (all[8].digest, &all[8].ranks));
    assert_ne!(all[7].digest, all[8].digest);
}

#[test]
fn every_rank_computes_the_same_plan_from_an_index_of_its_own() {
    let data = TempDataset::new(2, 30, Compression::Plain);
    let first = planner(&data.index(), 16, 3, 2, Tail::Carry).plan(2).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    for shard in 0..2 {
        let name = format!("shard-{shard:03}.tar");
        std::fs::copy(data.shard(shard), elsewhere.path().join(name)).unwrap();
    }
    let shards = expand_shards(&[elsewhere.path().to_str().unwrap()]).unwrap();
    let options = IndexOptions { threads: 1, ..IndexOptions::default() };
    let index = std::sync::Arc::new(Index::open_or_build(shards, &options).unwrap());
    assert_eq!(index.fingerprint(), data.index().fingerprint());
    assert_eq!(planner(&index, 16, 3, 2, Tail::Carry).plan(2).unwrap().digest, first.digest);
}

#[test]
fn compressed_shards_are_shuffled_one_at_a_time() {
    let data = TempDataset::new(3, 20, Compression::Zstd);
    let plan = planner(&data.index(), 20, 2, 2, Tail::Carry).plan(0).unwrap();
    let samples = sorted_samples(&plan);
    assert!(samples.iter().all(|sample| sample / 20 == samples[0] / 20), "{samples:?}");
}

#[test]
fn a_short_last_batch_may_be_smaller_than_the_groups() {
    let data = TempDataset::new(1, 33, Compression::Plain);
    let planner = planner(&data.index(), 16, 4, 2, Tail::Short);
    assert_eq!(planner.steps().per_epoch(), 3);
    assert_eq!(sorted_samples(&planner.plan(2).unwrap()).len(), 1);
}

#[test]
fn balancing_beats_the_data_blind_cut() {
    let data = TempDataset::new(4, 64, Compression::Plain);
    let planner = planner(&data.index(), 64, 4, 4, Tail::Carry);
    let blind = planner.clone().strategy(dflop_balancer::Strategy::ROUND_ROBIN);
    let total = |planner: &dflop_loader::StepPlanner| -> u64 {
        (0..4).map(|step| planner.plan(step).unwrap().makespan_ns).sum()
    };
    assert!(total(&planner) < total(&blind));
}

#[test]
fn microbatches_stay_near_each_other_in_tokens() {
    let data = TempDataset::new(4, 64, Compression::Plain);
    let planner = planner(&data.index(), 64, 2, 2, Tail::Carry);
    let plan = planner.plan(0).unwrap();
    let tokens = |places: &Vec<u32>| -> u64 {
        places.iter().map(|&place| u64::from(plan.costs[place as usize].tokens)).sum()
    };
    let microbatches: Vec<u64> = plan.ranks.iter().flatten().map(tokens).collect();
    let mean = microbatches.iter().sum::<u64>().div_ceil(4);
    let longest = plan.costs.iter().map(|cost| u64::from(cost.tokens)).max().unwrap();
    let most = (mean + mean / 4).max(mean + longest);
    assert!(microbatches.iter().all(|&tokens| tokens <= most), "{microbatches:?} over {most}");
}
