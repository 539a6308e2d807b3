//! Checks plans for ranks that run all modules in sequence on one device.

use std::num::NonZeroUsize;

use dflop_balancer::{Strategy, lockstep_ns};
use dflop_costmodel::memory::ReplicaMemory;
use dflop_costmodel::{DevicePreset, ModelSpec, RankLayout, Sharding};
use dflop_loader::sample::BatchLayout;
use dflop_loader::{
    BalancedLoader, Error, Microbatch, RankBalance, RankTraining, StepPlan, StepPlannerBuilder,
    Synchronization, compare_layouts, compare_ranks,
};
use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::{loaders, run};
use futures::StreamExt;

fn data() -> TempDataset {
    TempDataset::new(2, 30, Compression::Plain)
}

/// Plans 24 samples over 2 ranks with 3 microbatches each.
fn builder(data: &TempDataset) -> StepPlannerBuilder {
    loaders::builder(data.index(), 24, 2).microbatches(3)
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

/// Plans 24 samples over 4 ranks with 2 microbatches each.
fn four_ranks(data: &TempDataset, meet: Synchronization) -> StepPlannerBuilder {
    loaders::builder(data.index(), 24, 4).microbatches(2).one_device(meet)
}

fn shard_groups(ranks: usize) -> Synchronization {
    Synchronization::PerShardGroup(NonZeroUsize::new(ranks).unwrap())
}

#[test]
fn shard_groups_wait_for_each_other_at_the_end_of_a_step_only() {
    let data = data();
    let plan = |meet, strategy| four_ranks(&data, meet).strategy(strategy).build().unwrap().plan(0).unwrap();
    let meets = [Synchronization::PerStep, shard_groups(2), Synchronization::PerMicrobatch];
    let blind = meets.map(|meet| plan(meet, Strategy::ROUND_ROBIN).makespan_ns);
    assert!(blind.is_sorted() && blind[0] < blind[2], "one plan: {blind:?}");
    let balanced = plan(shard_groups(2), Strategy::SEARCH);
    let rank = |rank: usize| (0..2).map(|slot| balanced.microbatch_ns(rank, slot)).collect::<Vec<_>>();
    let ranks: Vec<Vec<Vec<u64>>> = (0..4).map(rank).collect();
    assert_eq!(balanced.makespan_ns, ranks.chunks(2).map(lockstep_ns).max().unwrap());
    assert!(balanced.bound.ns <= balanced.makespan_ns && balanced.makespan_ns < blind[1]);
    let mut places: Vec<u32> = balanced.ranks.iter().flatten().flatten().copied().collect();
    places.sort_unstable();
    assert_eq!(places, (0..24).collect::<Vec<u32>>());
}

#[test]
fn shard_groups_of_one_rank_are_ddp_and_of_all_ranks_fsdp() {
    let data = data();
    let (ddp, fsdp) = (Synchronization::PerStep, Synchronization::PerMicrobatch);
    for strategy in [Strategy::ROUND_ROBIN, Strategy::LPT, Strategy::SEARCH] {
        let plan = |meet| {
            let plan = four_ranks(&data, meet).strategy(strategy).build().unwrap().plan(0).unwrap();
            (plan.ranks, plan.makespan_ns, plan.bound)
        };
        assert_eq!(plan(shard_groups(1)), plan(ddp), "{strategy}");
        assert_eq!(plan(shard_groups(4)), plan(fsdp), "{strategy}");
    }
    let refused = four_ranks(&data, shard_groups(3)).build();
    assert!(matches!(refused, Err(Error::Config { setting: "synchronize", .. })), "{refused:?}");
}

#[test]
fn a_plan_by_tokens_evens_tokens_and_nothing_else() {
    let data = data();
    let planner = four_ranks(&data, Synchronization::PerMicrobatch).build().unwrap();
    let (by_tokens, by_time) = (planner.plan_by_tokens(0).unwrap(), planner.plan(0).unwrap());
    let tokens = |plan: &StepPlan| -> Vec<u64> {
        let sum = |places: &Vec<u32>| {
            places.iter().map(|&place| u64::from(plan.costs[place as usize].tokens)).sum()
        };
        plan.ranks.iter().flatten().map(sum).collect()
    };
    let spread = |tokens: &[u64]| tokens.iter().max().unwrap() - tokens.iter().min().unwrap();
    assert!(spread(&tokens(&by_tokens)) <= spread(&tokens(&by_time)));
    assert_eq!(tokens(&by_tokens).iter().sum::<u64>(), tokens(&by_time).iter().sum::<u64>());
    assert!(by_tokens.ranks.iter().all(|rank| rank.len() == 2));
    assert!(by_tokens.makespan_ns >= by_time.makespan_ns);
    assert_eq!(planner.plan_by_tokens(0).unwrap().digest, by_tokens.digest);
    let pipeline = loaders::builder(data.index(), 24, 4).build().unwrap();
    assert!(matches!(pipeline.plan_by_tokens(0), Err(Error::Config { setting: "strategy", .. })));
}

/// DDP, HSDP and FSDP are the same as with a planner for each; `ZeRO` stages compute like a neighbor.
#[test]
fn layouts_of_the_same_ranks_are_compared() {
    let data = data();
    let spec = ModelSpec::preset("omni-7b").unwrap();
    let links = DevicePreset::named("h100").unwrap().links();
    let training = RankTraining { memory: ReplicaMemory::new(&spec), links, gpus_per_node: 8 };
    let planner = four_ranks(&data, Synchronization::PerMicrobatch).build().unwrap();
    let layouts = RankLayout::all(4, 8, 2);
    let found = compare_layouts(&planner, &layouts, 0..2, &training).unwrap();
    assert_eq!(found.iter().map(|summary| summary.layout).collect::<Vec<_>>(), layouts);
    let balances = [Strategy::ROUND_ROBIN, Strategy::SEARCH].map(RankBalance::Strategy);
    let is_near = |one: f64, other: f64| (one - other).abs() <= 1e-9 * other.abs();
    for summary in &found {
        let planner = four_ranks(&data, Synchronization::from(summary.layout)).build().unwrap();
        let alone = compare_ranks(&planner, &balances, 0..2, &training).unwrap();
        let seconds = [0, 1].map(|at| alone[at].steps.mean_seconds());
        match summary.layout.sharding {
            Sharding::Nothing | Sharding::Parameters => {
                assert!(
                    is_near(summary.blind_seconds, seconds[0]) && is_near(summary.step_seconds, seconds[1])
                );
                assert!(is_near(summary.exposed_seconds.unwrap(), alone[1].exposed_seconds.unwrap()));
                assert_eq!(summary.memory, alone[1].memory);
            }
            Sharding::Optimizer => assert!(is_near(summary.step_seconds, seconds[1])),
            Sharding::Gradients => {
                let is_faster = summary.step_seconds <= seconds[1] && summary.blind_seconds <= seconds[0];
                assert!(is_faster, "{summary:?} {seconds:?}");
            }
        }
    }
    let memory: Vec<u64> = found.iter().map(|summary| summary.memory.total()).collect();
    assert!(memory.iter().max() == memory.first() && memory.iter().min() == memory.last(), "{memory:?}");
}

#[test]
fn ways_to_balance_ranks_are_compared_with_communication_and_memory() {
    let data = data();
    let spec = ModelSpec::preset("omni-7b").unwrap();
    let links = DevicePreset::named("h100").unwrap().links();
    let training = RankTraining { memory: ReplicaMemory::new(&spec), links, gpus_per_node: 8 };
    let balances = [
        RankBalance::Strategy(Strategy::ROUND_ROBIN),
        RankBalance::Tokens,
        RankBalance::Strategy(Strategy::SEARCH),
    ];
    let compared = |meet| {
        let planner = four_ranks(&data, meet).build().unwrap();
        compare_ranks(&planner, &balances, 0..2, &training).unwrap()
    };
    let fsdp = compared(Synchronization::PerMicrobatch);
    let seconds: Vec<f64> = fsdp.iter().map(|summary| summary.steps.mean_seconds()).collect();
    assert!(seconds[2] < seconds[1] && seconds[2] < seconds[0], "{seconds:?}");
    assert!(fsdp[2].steps.bound_seconds > 0.0 && fsdp[2].steps.bound_seconds <= seconds[2]);
    for summary in &fsdp {
        let exchanged = summary.exchanged_seconds.unwrap();
        assert!(0.0 < exchanged && exchanged <= summary.steps.mean_seconds() * 1.000_001, "{exchanged}");
        assert_eq!((summary.steps.step_seconds.len(), summary.microbatch_tokens.len()), (2, 3));
        assert!((0.0..1.0).contains(&summary.steps.bubble_fraction));
        assert!(summary.exposed_seconds.is_some_and(|seconds| seconds >= 0.0));
    }
    assert!(fsdp[0].exchanged_seconds < Some(seconds[0]), "{seconds:?}");
    let ddp = compared(Synchronization::PerStep);
    assert_eq!(ddp[0].exchanged_seconds, None, "ranks wait for each other at the end of a step only");
    assert_eq!(ddp[0].memory.activations, fsdp[0].memory.activations, "the same microbatches");
    assert!(ddp[0].memory.optimizer >= 4 * fsdp[0].memory.optimizer - 48);
    let unlinked = RankTraining { links: None, ..training.clone() };
    let planner = four_ranks(&data, Synchronization::PerStep).build().unwrap();
    let unlinked = compare_ranks(&planner, &balances[..1], 0..1, &unlinked).unwrap();
    assert_eq!(unlinked[0].exposed_seconds, None);
}
