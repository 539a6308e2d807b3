//! Checks plans for ranks that run all modules in sequence on one device.

use dflop_balancer::Strategy;
use dflop_loader::sample::BatchLayout;
use dflop_loader::{BalancedLoader, Error, Microbatch, StepPlan, StepPlannerBuilder, Synchronization};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::{planning, run};
use futures::StreamExt;

fn data() -> TempDataset {
    TempDataset::new(2, 30, Compression::Plain)
}

/// Plans 24 samples over 2 ranks with 3 microbatches each.
fn builder(data: &TempDataset) -> StepPlannerBuilder {
    planning::builder(data.index(), 24, 2).microbatches(3)
}

fn plan(data: &TempDataset, meet: Synchronization, strategy: Strategy) -> StepPlan {
    builder(data).one_device(meet).strategy(strategy).build().unwrap().plan(0).unwrap()
}

/// Returns the time of every microbatch, all modules in sequence, by rank.
fn microbatches_ns(plan: &StepPlan) -> Vec<Vec<u64>> {
    let sample = |&place: &u32| plan.costs[place as usize].module_ns.as_slice().iter().sum::<u64>();
    let microbatch = |places: &Vec<u32>| places.iter().map(sample).sum();
    plan.ranks.iter().map(|rank| rank.iter().map(microbatch).collect()).collect()
}

/// Returns the time of a microbatch in a module.
fn module_ns(plan: &StepPlan, places: &[u32], module: usize) -> u64 {
    places.iter().map(|&place| plan.costs[place as usize].module_ns.as_slice()[module]).sum()
}

#[test]
fn a_rank_takes_the_sum_of_all_modules_of_its_microbatches() {
    let data = data();
    let plan = plan(&data, Synchronization::PerStep, Strategy::SEARCH);
    let sums: Vec<u64> = microbatches_ns(&plan).iter().map(|rank| rank.iter().sum()).collect();
    assert_eq!(plan.makespan_ns, *sums.iter().max().unwrap());
    assert!(plan.bound.ns <= plan.makespan_ns);
    let blind = self::plan(&data, Synchronization::PerStep, Strategy::ROUND_ROBIN);
    assert!(plan.makespan_ns < blind.makespan_ns, "{} of {}", plan.makespan_ns, blind.makespan_ns);
}

#[test]
fn ranks_that_meet_in_every_layer_wait_for_the_slowest_encoder_and_the_slowest_llm() {
    let data = data();
    let meet = |strategy| self::plan(&data, Synchronization::PerMicrobatch, strategy);
    let plan = meet(Strategy::SEARCH);
    let modules = plan.costs[0].module_ns.as_slice().len();
    let slowest = |slot: usize, module: usize| {
        let ranks = plan.ranks.iter();
        ranks.map(|rank| module_ns(&plan, &rank[slot], module)).max().unwrap()
    };
    let slots = (0..3).flat_map(|slot| (0..modules).map(move |module| (slot, module)));
    assert_eq!(plan.makespan_ns, slots.map(|(slot, module)| slowest(slot, module)).sum::<u64>());
    assert!(plan.bound.ns <= plan.makespan_ns);
    for other in [Strategy::ROUND_ROBIN, Strategy::LPT, Strategy::MULTI_LPT] {
        let other = meet(other);
        assert!(plan.makespan_ns < other.makespan_ns, "{} of {}", plan.makespan_ns, other.makespan_ns);
    }
    // Without the search, whole microbatches of like length run at the same time.
    let sorted = microbatches_ns(&meet(Strategy::LPT));
    assert!(sorted.iter().all(|rank| rank.is_sorted_by(|one, next| one >= next)), "{sorted:?}");
}

#[test]
fn padding_is_work_of_the_device_as_well() {
    let data = data();
    for meet in [Synchronization::PerStep, Synchronization::PerMicrobatch] {
        let padded =
            builder(&data).one_device(meet).pad_to_tokens(4096, BatchLayout::Packed).build().unwrap();
        let (padded, plain) = (padded.plan(0).unwrap(), plan(&data, meet, Strategy::SEARCH));
        assert!(padded.makespan_ns > plain.makespan_ns, "{meet:?}");
    }
}

/// Returns the cost per microbatch on rank 0 in step 0, in nanoseconds, and the module times.
fn delivered_costs(planner: StepPlannerBuilder) -> Vec<(u64, Vec<u64>)> {
    let loader = BalancedLoader::builder(planner.build().unwrap(), 0).steps(1).build().unwrap();
    let steps: Vec<_> = run(loader.stream().collect());
    let cost = |microbatch: &Microbatch| {
        ((microbatch.cost_seconds() * 1e9).round() as u64, microbatch.module_ns.clone())
    };
    steps[0].as_ref().unwrap().microbatches.iter().map(cost).collect()
}

#[test]
fn a_microbatch_costs_the_sum_of_its_modules_in_lockstep_and_the_slowest_in_a_pipeline() {
    let data = data();
    for meet in [Synchronization::PerStep, Synchronization::PerMicrobatch] {
        for (cost_ns, module_ns) in delivered_costs(builder(&data).one_device(meet)) {
            assert_eq!(cost_ns, module_ns.iter().sum::<u64>(), "{meet:?}");
        }
    }
    for (cost_ns, module_ns) in delivered_costs(builder(&data)) {
        assert_eq!(cost_ns, module_ns.into_iter().max().unwrap());
    }
}

#[test]
fn one_device_has_no_pipeline_stages() {
    let data = data();
    let refused = builder(&data).one_device(Synchronization::PerStep).stages(vec![1, 1, 1]).build();
    assert!(matches!(refused, Err(Error::Config { setting: "stages", .. })), "{refused:?}");
}
