//! What pipeline assignments promise, on random instances.

use dflop_balancer::schedule::ScheduleKind;
use dflop_balancer::{Budget, Caps, CompiledSchedule, Instance, PipelineConfig, Strategy, balance_pipeline};
use proptest::prelude::*;

/// The makespan of the best assignment of items to slots, none empty, by trying all.
fn brute_force(instance: &Instance, config: &PipelineConfig) -> u64 {
    let slots = instance.groups();
    let microbatches = slots / config.dp_size;
    let stages = config.stages.iter().sum();
    let rows: Vec<usize> = (0..stages).collect();
    let mut compiled =
        CompiledSchedule::new(ScheduleKind::OneForwardOneBackward, &rows, microbatches).unwrap();
    let mut best = u64::MAX;
    for code in 0..slots.pow(instance.items() as u32) {
        let mut groups = vec![Vec::new(); slots];
        let mut rest = code;
        for item in 0..instance.items() as u32 {
            groups[rest % slots].push(item);
            rest /= slots;
        }
        if groups.iter().all(|group| !group.is_empty()) {
            let makespan =
                |rank: &[Vec<u32>]| compiled.makespan_ns(&config.stage_times(instance, rank).unwrap());
            best = best.min(groups.chunks(microbatches).map(makespan).max().unwrap());
        }
    }
    best
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn bound_is_at_most_the_optimum_and_no_answer_is_below_it(
        times_ns in prop::collection::vec(0..30_u64, 10),
        shape in prop::sample::select(vec![(1, 2), (1, 3), (2, 1), (2, 2)]),
        stages in prop::sample::select(vec![[1, 1], [1, 3], [2, 1]]),
    ) {
        let (dp_size, microbatches) = shape;
        let instance = Instance::new(dp_size * microbatches, 2, times_ns).unwrap();
        let config = PipelineConfig::new(dp_size, stages.to_vec());
        let optimum = brute_force(&instance, &config);
        for strategy in Strategy::ALL {
            let caps = Caps::default();
            let found =
                balance_pipeline(&instance, &config, strategy, &caps, &mut Budget::work(2_000)).unwrap();
            prop_assert!(found.bound.ns <= optimum, "{:?} above {}", found.bound, optimum);
            prop_assert!(found.makespan_ns >= optimum);
            if strategy == Strategy::Search && found.bound.ns > 0 {
                prop_assert!(found.makespan_ns <= optimum * 3 / 2);
            }
        }
    }

    #[test]
    fn every_item_runs_once_and_no_microbatch_is_empty_or_above_its_cap(
        times_ns in prop::collection::vec(0..1_000_u64, 90),
        dp_size in 1..5_usize,
        microbatches in 1..9_usize,
    ) {
        let instance = Instance::groups_may_be_empty(dp_size * microbatches, 3, times_ns).unwrap();
        let instance = instance.tokens((0..30).map(|item| item % 5).collect()).unwrap();
        let config = PipelineConfig::new(dp_size, vec![1, 2, 1]);
        let caps = Caps { tokens_max: Some(60 * 3 / 2 / (dp_size * microbatches) as u64 + 4), bytes_max: None };
        for strategy in Strategy::ALL {
            let run = || balance_pipeline(&instance, &config, strategy, &caps, &mut Budget::work(500)).unwrap();
            let found = run();
            prop_assert!(found.ranks.len() == dp_size && found.ranks.iter().all(|rank| rank.len() == microbatches));
            let groups = found.ranks.concat();
            prop_assert!(groups.iter().all(|group| !group.is_empty()) || groups.len() > 30);
            let tokens = |group: &Vec<u32>| group.iter().map(|item| u64::from(item % 5)).sum::<u64>();
            prop_assert!(groups.iter().all(|group| tokens(group) <= caps.tokens_max.unwrap()));
            let mut all = groups.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..30).collect::<Vec<_>>());
            prop_assert_eq!(found, run());
        }
    }
}

#[test]
fn each_step_towards_the_search_pays() {
    let times_ns: Vec<u64> = (0..512).map(|i| (i * 7919 % 997) * (i * 104_729 % 31)).collect();
    let instance = Instance::new(32, 2, times_ns).unwrap();
    let config = PipelineConfig::new(4, vec![1, 3]);
    let makespan_ns = |strategy| {
        balance_pipeline(&instance, &config, strategy, &Caps::default(), &mut Budget::work(20_000))
            .unwrap()
            .makespan_ns
    };
    let [blind, lpt, search] = [Strategy::RoundRobin, Strategy::MultiLpt, Strategy::Search].map(makespan_ns);
    assert!(search < lpt && lpt < blind, "{search} {lpt} {blind}");
}
