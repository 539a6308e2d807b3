//! Checks plans in which ranks share samples.

use std::num::NonZeroUsize;

use dflop_balancer::Caps;
use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::memory::ReplicaMemory;
use dflop_costmodel::{DevicePreset, KeyExchange, KeyExchangeKind, ModelSpec};
use dflop_loader::sample::BatchLayout;
use dflop_loader::{
    ContextGroups, ContextPlan, Error, RankTraining, StepPlanner, StepPlannerBuilder, Synchronization,
    compare_context, simulate_plan,
};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::loaders;

fn data() -> TempDataset {
    TempDataset::new(2, 30, Compression::Plain)
}

/// Plans 8 samples over 8 ranks.
fn builder(data: &TempDataset) -> StepPlannerBuilder {
    loaders::builder(data.index(), 8, 8)
}

fn meet(data: &TempDataset, synchronization: Synchronization) -> StepPlanner {
    builder(data).one_device(synchronization).build().unwrap()
}

/// Groups of up to `most` ranks whose messages take no time: samples in the test data are short.
fn groups(least: usize, most: usize) -> ContextGroups {
    let exchange = KeyExchange { kind: KeyExchangeKind::Ring, link: None, element_bytes: 2 };
    ContextGroups { ranks: [least, most], exchange }
}

/// Checks that a plan has every sample once, with its tokens, on aligned groups.
fn check(plan: &ContextPlan, slots: usize) {
    assert_eq!(plan.places.len(), plan.whole.samples.len());
    for place in &plan.places {
        assert!(place.slot < slots && place.ranks.start.is_multiple_of(place.ranks.len()), "{place:?}");
        assert!(place.media.iter().flatten().all(|rank| place.ranks.contains(rank)), "{place:?}");
    }
    let all: u64 = plan.tokens.iter().flatten().map(|modules| modules.last().unwrap()).sum();
    assert_eq!(all, plan.whole.costs.iter().map(|cost| u64::from(cost.tokens)).sum::<u64>());
    assert!(plan.bound.ns <= plan.makespan_ns, "{} {}", plan.bound.ns, plan.makespan_ns);
}

#[test]
fn one_sample_a_rank_is_faster_if_ranks_share_samples() {
    let data = data();
    for synchronization in [
        Synchronization::PerStep,
        Synchronization::PerMicrobatch,
        Synchronization::PerShardGroup(NonZeroUsize::new(4).unwrap()),
    ] {
        let planner = meet(&data, synchronization);
        for step in 0..3 {
            let plan = planner.plan_context(step, &groups(1, 8)).unwrap();
            check(&plan, 1);
            assert!(plan.makespan_ns < plan.whole.makespan_ns, "{synchronization}, step {step}");
            assert!(plan.split_samples() > 0);
            // A shard group is never crossed.
            let most = plan.places.iter().map(|place| place.ranks.len()).max().unwrap();
            assert!(
                most <= synchronization.shard_ranks(8).get().max(2)
                    || synchronization == Synchronization::PerStep
            );
            let again = meet(&data, synchronization).plan_context(step, &groups(1, 8)).unwrap();
            assert_eq!((&again.places, again.makespan_ns), (&plan.places, plan.makespan_ns));
        }
    }
}

/// Stages of ranks that share a sample wait for each other in every pass.
#[test]
fn pipelines_are_faster_if_they_share_samples() {
    let data = data();
    for (microbatches, stages, schedule) in [
        (1, vec![1, 1, 4], ScheduleKind::OneForwardOneBackward),
        (2, vec![2, 1, 2], ScheduleKind::GPipe),
        (2, vec![1, 1, 2], ScheduleKind::Interleaved { chunks: 2 }),
    ] {
        let planner = |context: Option<ContextGroups>| {
            let batch = 8 * microbatches as u64;
            let planner = builder(&data).global_batch(batch).microbatches(microbatches);
            let planner = planner.stages(stages.clone()).schedule(schedule);
            context.into_iter().fold(planner, StepPlannerBuilder::context).build().unwrap()
        };
        for step in 0..3 {
            let plan = planner(None).plan_context(step, &groups(1, 8)).unwrap();
            check(&plan, microbatches);
            assert!(plan.makespan_ns < plan.whole.makespan_ns, "{schedule}, step {step}");
            assert!(plan.split_samples() > 0);
            let split = planner(Some(groups(1, 8)));
            let step_plan = split.plan(step).unwrap();
            assert_eq!(step_plan.makespan_ns, plan.makespan_ns);
            // Every rank for itself, with the longest slices of its groups, does not wait for the others.
            let alone = simulate_plan(&split, &step_plan, schedule).unwrap();
            let longest_ns = alone.iter().map(|own| own.makespan_ns).max().unwrap();
            assert!((plan.makespan_ns / 2..=plan.makespan_ns).contains(&longest_ns), "{longest_ns}");
        }
        // Without splits, the step takes what the simulation of its pipelines says.
        let whole = planner(None).plan_context(0, &groups(1, 1)).unwrap();
        assert!(whole.makespan_ns <= whole.whole.makespan_ns);
    }
}

/// The plan without splits is the one of whole samples, in time.
#[test]
fn groups_of_one_rank_are_whole_samples() {
    let data = data();
    let planner = builder(&data).microbatches(1).one_device(Synchronization::PerMicrobatch).build().unwrap();
    let plan = planner.plan_context(1, &groups(1, 1)).unwrap();
    check(&plan, 1);
    assert_eq!(plan.split_samples(), 0);
    assert!(plan.makespan_ns <= plan.whole.makespan_ns);
}

/// Messages over a slow link take longer than they save.
#[test]
fn samples_stay_whole_over_a_slow_link() {
    let data = data();
    let mut slow = groups(1, 8);
    slow.exchange.link = DevicePreset::named("h100")
        .unwrap()
        .links()
        .map(|links| dflop_costmodel::DeviceLink { latency_seconds: 1.0, ..links.infiniband });
    let plan = meet(&data, Synchronization::PerMicrobatch).plan_context(0, &slow).unwrap();
    assert_eq!(plan.split_samples(), 0);
    assert!(plan.makespan_ns <= plan.whole.makespan_ns);
    let all = ContextGroups { ranks: [2, 2], ..slow };
    let plan = meet(&data, Synchronization::PerMicrobatch).plan_context(0, &all).unwrap();
    check(&plan, 1);
    assert!(plan.split_samples() == 8 && plan.makespan_ns > 1_000_000_000);
}

/// A cap below the longest sample has no plan for whole samples, and one for slices.
#[test]
fn a_sample_above_the_token_cap_is_split() {
    let data = data();
    let plain = meet(&data, Synchronization::PerMicrobatch);
    let longest = plain.plan(0).unwrap().costs.iter().map(|cost| u64::from(cost.tokens)).max().unwrap();
    let cap = longest * 3 / 4;
    let caps = Caps { tokens_max: Some(cap), bytes_max: None };
    let planner = builder(&data).caps(caps).one_device(Synchronization::PerMicrobatch).build().unwrap();
    assert!(matches!(planner.plan(0), Err(Error::Plan(_))));
    let plan = planner.plan_context(0, &groups(1, 8)).unwrap();
    check(&plan, 1);
    assert!(plan.tokens.iter().flatten().all(|modules| *modules.last().unwrap() <= cap));
    assert!(planner.plan_context(0, &groups(1, 1)).is_err());
}

#[test]
fn plans_without_slices_are_refused_by_name() {
    let data = data();
    let shared = builder(&data).module_dp_sizes(vec![4, 8, 8]).build().unwrap();
    let layers = vec![vec![9, 9, 0], vec![9, 9, 0], vec![0, 9, 18]];
    let joint = builder(&data).stage_layers(layers).build().unwrap();
    let fixed = builder(&data)
        .one_device(Synchronization::PerMicrobatch)
        .pad_to_tokens(65_536, BatchLayout::Packed)
        .build()
        .unwrap();
    for (planner, part) in
        [(shared, "module_dp_sizes"), (joint, "layers of several modules"), (fixed, "fixed length")]
    {
        let refused = planner.plan_context(0, &groups(1, 8)).unwrap_err();
        assert!(
            matches!(&refused, Error::Config { setting: "context", reason } if reason.contains(part)),
            "{refused}"
        );
    }
    let planner = meet(&data, Synchronization::PerMicrobatch);
    assert!(planner.plan_context(0, &groups(1, 3)).is_err());
    assert!(planner.plan_context(0, &groups(16, 16)).is_err());
}

#[test]
fn fixed_degrees_and_splits_are_compared() {
    let data = data();
    let spec = ModelSpec::preset("omni-7b").unwrap();
    let links = DevicePreset::named("h100").unwrap().links();
    let training = RankTraining { memory: ReplicaMemory::new(&spec), links, gpus_per_node: 8 };
    let planner = meet(&data, Synchronization::PerMicrobatch);
    let found = compare_context(&planner, &[groups(2, 2), groups(1, 8)], 0..3, &training).unwrap();
    let [fixed, split] = &found[..] else { panic!("two choices: {found:?}") };
    assert!(fixed.split_fraction > 0.999 && split.split_fraction <= 1.0 && split.split_fraction > 0.0);
    for summary in &found {
        assert_eq!(summary.steps.step_seconds.len(), 3);
        assert!(summary.steps.bound_seconds <= summary.steps.mean_seconds());
        assert!((0.0..1.0).contains(&summary.steps.bubble_fraction));
        assert!(summary.exposed_seconds.is_some() && summary.memory.unwrap().total() > 0);
    }
    let seconds: f64 = (0..3).map(|step| planner.plan(step).unwrap().makespan_ns as f64 / 1e9).sum();
    assert!(3.0 * split.steps.mean_seconds() < seconds);
    let pipelines = builder(&data).stages(vec![1, 1, 4]).build().unwrap();
    let found = compare_context(&pipelines, &[groups(8, 8), groups(1, 8)], 0..2, &training).unwrap();
    assert!(found.iter().all(|own| own.memory.is_none() && own.exposed_seconds.is_none()));
    assert!(found.iter().all(|own| (0.0..1.0).contains(&own.steps.bubble_fraction)));
    assert!(found[1].steps.mean_seconds() <= found[0].steps.mean_seconds());
}
