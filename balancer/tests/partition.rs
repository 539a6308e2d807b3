//! Every strategy keeps all guarantees, on random instances.

use dflop_balancer::{Assignment, Budget, Caps, Error, Instance, Strategy, balance, lower_bound};
use proptest::prelude::*;
use proptest::strategy::Strategy as _;

const MODULES: usize = 2;

fn solve(instance: &Instance, strategy: Strategy, caps: Caps) -> Assignment {
    balance(instance, strategy, &caps, &mut Budget::work(500)).unwrap()
}

/// Draws rows for two modules; zeros and equal values are common.
fn times(items: std::ops::Range<usize>) -> impl proptest::strategy::Strategy<Value = Vec<u64>> {
    prop::collection::vec(
        prop_oneof![Just(0), 1..20_u64, 1..1_000_000_000_u64],
        MODULES * items.start..MODULES * items.end,
    )
    .prop_map(|times| times[..times.len() / MODULES * MODULES].to_vec())
}

/// Finds the best makespan over partitions without an empty group by trying all.
fn brute_force(instance: &Instance) -> u64 {
    fn visit(instance: &Instance, item: u32, groups: &mut Vec<Vec<u32>>, best: &mut u64) {
        if item as usize == instance.items() {
            if groups.iter().all(|group| !group.is_empty()) {
                let makespan = groups.iter().flat_map(|group| instance.load_ns(group)).max().unwrap();
                *best = makespan.min(*best);
            }
            return;
        }
        for group in 0..groups.len() {
            groups[group].push(item);
            visit(instance, item + 1, groups, best);
            groups[group].pop();
        }
    }
    let mut best = u64::MAX;
    visit(instance, 0, &mut vec![Vec::new(); instance.groups()], &mut best);
    best
}

proptest! {
    #[test]
    fn every_item_is_in_exactly_one_group_and_none_is_empty(times_ns in times(1..80), groups in 1..40_usize) {
        let items = times_ns.len() / MODULES;
        let instance = Instance::with_empty_groups(groups, MODULES, times_ns).unwrap();
        for strategy in Strategy::for_any_size() {
            let found = solve(&instance, strategy, Caps::default());
            prop_assert_eq!(found.groups.len(), groups);
            let filled = found.groups.iter().filter(|group| !group.is_empty()).count();
            prop_assert!(filled == groups || items < groups);
            let mut all: Vec<u32> = found.groups.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..items as u32).collect::<Vec<_>>());
            let makespan = found.groups.iter().flat_map(|group| instance.load_ns(group)).max().unwrap();
            prop_assert_eq!(makespan, found.makespan_ns);
            prop_assert!(found.bound.ns <= found.makespan_ns);
        }
    }

    #[test]
    fn bound_is_at_most_the_optimum_and_no_answer_is_below_it(times_ns in times(3..8), groups in 1..4_usize) {
        let instance = Instance::new(groups.min(times_ns.len() / MODULES), MODULES, times_ns).unwrap();
        let optimum = brute_force(&instance);
        prop_assert!(lower_bound(&instance).ns <= optimum);
        for strategy in Strategy::for_any_size() {
            prop_assert!(solve(&instance, strategy, Caps::default()).makespan_ns >= optimum);
        }
    }

    /// Whole tiles in the first module, rounded, some a little off or far off; the second module is free.
    #[test]
    fn bound_of_tiles_is_at_most_the_optimum(
        unit in 100.0..5_000_000.0_f64,
        tiles in prop::collection::vec((0..12_u32, 0..2_000_000_u64, prop_oneof![9 => Just(0), 1 => 0..2_000_u64]), 3..8),
        groups in 1..4_usize,
    ) {
        let times_ns = tiles.iter().flat_map(|(count, llm_ns, off)| {
            [(unit * f64::from(*count)).round() as u64 + off, *llm_ns]
        });
        let instance = Instance::new(groups, MODULES, times_ns.collect()).unwrap();
        prop_assert!(lower_bound(&instance).ns <= brute_force(&instance));
    }

    #[test]
    fn search_finds_the_optimum_of_small_instances(times_ns in times(3..8), groups in 1..4_usize) {
        let instance = Instance::new(groups.min(times_ns.len() / MODULES), MODULES, times_ns).unwrap();
        let found = balance(&instance, Strategy::SEARCH, &Caps::default(), &mut Budget::work(20_000)).unwrap();
        prop_assert_eq!(found.makespan_ns, brute_force(&instance));
    }

    #[test]
    fn exact_proves_the_optimum_of_small_instances(times_ns in times(3..10), groups in 1..4_usize) {
        let instance = Instance::new(groups.min(times_ns.len() / MODULES), MODULES, times_ns).unwrap();
        let found = balance(&instance, Strategy::EXACT, &Caps::default(), &mut Budget::work(4_000_000)).unwrap();
        prop_assert_eq!(found.makespan_ns, brute_force(&instance));
        prop_assert!(found.is_optimal());
    }

    #[test]
    fn search_is_never_worse_than_its_start(times_ns in times(20..60), groups in 2..16_usize) {
        let instance = Instance::new(groups, MODULES, times_ns).unwrap();
        let start = solve(&instance, Strategy::MULTI_LPT, Caps::default());
        let found = solve(&instance, Strategy::SEARCH, Caps::default());
        prop_assert!(found.makespan_ns <= start.makespan_ns);
    }

    /// Graham's bound, on a single module.
    #[test]
    fn lpt_makespan_is_at_most_mean_plus_longest(
        times_ns in prop::collection::vec(0..1_000_000_u64, 1..80),
        groups in 1..20_usize,
    ) {
        let instance = Instance::with_empty_groups(groups, 1, times_ns.clone()).unwrap();
        let (sum, longest) = (times_ns.iter().sum::<u64>(), *times_ns.iter().max().unwrap());
        for strategy in [Strategy::LPT, Strategy::MULTI_LPT, Strategy::SEARCH] {
            let found = solve(&instance, strategy, Caps::default());
            // multi_lpt compares f32 loads: it may see groups as equal that differ by their rounding.
            let rounding = if strategy == Strategy::LPT { 0 } else { sum >> 18 };
            prop_assert!(found.makespan_ns <= sum / groups as u64 + longest + rounding);
        }
    }

    /// The greedy bound on several modules: where the last item fits best, all groups' sums do.
    #[test]
    fn multi_lpt_makespan_is_at_most_mean_of_all_modules_plus_longest(times_ns in times(1..80), groups in 1..20_usize) {
        let instance = Instance::with_empty_groups(groups, MODULES, times_ns.clone()).unwrap();
        let (sum, longest) = (times_ns.iter().sum::<u64>(), *times_ns.iter().max().unwrap());
        let found = solve(&instance, Strategy::MULTI_LPT, Caps::default());
        prop_assert!(found.makespan_ns <= sum / groups as u64 + longest + (sum >> 18));
    }

    #[test]
    fn the_same_input_gives_the_same_answer(times_ns in times(10..60), groups in 1..10_usize) {
        let instance = Instance::new(groups, MODULES, times_ns).unwrap();
        for strategy in Strategy::for_any_size() {
            prop_assert_eq!(
                solve(&instance, strategy, Caps::default()),
                solve(&instance.clone(), strategy, Caps::default())
            );
        }
    }

    #[test]
    fn caps_hold_or_the_error_says_why(
        rows in prop::collection::vec((0..1000_u64, 0..1000_u64, 0..100_u64, 1..100_u64), 4..40),
        groups in 1..5_usize,
        slack in 100..130_u64,
    ) {
        let column = |pick: fn(&(u64, u64, u64, u64)) -> u64| rows.iter().map(pick).collect::<Vec<_>>();
        let times_ns = rows.iter().flat_map(|row| [row.0, row.1]).collect();
        let (tokens, bytes) = (column(|row| row.2), column(|row| row.3));
        let cap = |column: &[u64]| Some(column.iter().sum::<u64>().div_ceil(groups as u64) * slack / 100);
        let caps = Caps { tokens_max: cap(&tokens), bytes_max: cap(&bytes) };
        let instance = Instance::new(groups, MODULES, times_ns).unwrap();
        let instance = instance.tokens(tokens.clone()).unwrap().bytes(bytes.clone()).unwrap();
        for strategy in Strategy::for_any_size() {
            match balance(&instance, strategy, &caps, &mut Budget::work(500)) {
                Ok(found) => for group in &found.groups {
                    let sum = |column: &[u64]| group.iter().map(|item| column[*item as usize]).sum::<u64>();
                    prop_assert!(sum(&tokens) <= caps.tokens_max.unwrap());
                    prop_assert!(sum(&bytes) <= caps.bytes_max.unwrap());
                    prop_assert!(!group.is_empty());
                },
                Err(Error::CapItem { item, value, max, .. }) => {
                    prop_assert!(value > max && (tokens[item] == value || bytes[item] == value));
                }
                Err(Error::CapUnmet { .. }) => prop_assert!(slack < 130),
                Err(error) => prop_assert!(false, "{error}"),
            }
        }
    }
}

#[test]
fn a_loose_cap_is_met_by_every_strategy() {
    let times_ns: Vec<u64> = (0..400).map(|i| i * 7919 % 997).collect();
    let tokens: Vec<u64> = (0..200).map(|i| i * 31 % 89).collect();
    let tokens_max = Some(tokens.iter().sum::<u64>() * 102 / 100 / 20);
    let instance = Instance::new(20, 2, times_ns).unwrap().tokens(tokens).unwrap();
    for strategy in Strategy::for_any_size() {
        let caps = Caps { tokens_max, bytes_max: None };
        assert_eq!(balance(&instance, strategy, &caps, &mut Budget::work(500)).unwrap().groups.len(), 20);
    }
}

#[test]
fn a_deadline_marks_the_answer_only_if_it_cuts() {
    let times_ns: Vec<u64> = (0..2000).map(|i| i * 7919 % 99_991 + 1).collect();
    let instance = Instance::new(100, 2, times_ns).unwrap();
    let solve = |budget: &mut Budget| balance(&instance, Strategy::SEARCH, &Caps::default(), budget).unwrap();
    assert!(!solve(&mut Budget::work(u64::MAX).deadline(|| true)).is_reproducible);
    assert!(solve(&mut Budget::work(1000).deadline(|| false)).is_reproducible);
}

#[test]
fn work_spent_is_within_the_budget_and_repeats() {
    let times_ns: Vec<u64> = (0..2000).map(|i| i * 7919 % 99_991 + 1).collect();
    let instance = Instance::new(100, 2, times_ns).unwrap();
    let spent = |work| {
        let mut budget = Budget::work(work);
        balance(&instance, Strategy::SEARCH, &Caps::default(), &mut budget).unwrap().work_spent
    };
    assert_eq!(spent(0), 0);
    assert!((1000..2000).contains(&spent(1000)));
    assert_eq!(spent(1000), spent(1000));
}

#[test]
fn a_nanosecond_above_the_bound_is_not_the_optimum() {
    let times_ns = vec![0, 611_140_681, 0, 858_530_072, 0, 563_176_059, 0, 0, 563_176_060, 1];
    let instance = Instance::new(2, 2, times_ns).unwrap();
    assert_eq!(solve(&instance, Strategy::SEARCH, Caps::default()).makespan_ns, brute_force(&instance));
}

#[test]
fn an_empty_batch_has_an_empty_answer() {
    let instance = Instance::with_empty_groups(3, 2, vec![]).unwrap();
    for strategy in Strategy::for_any_size() {
        let found = solve(&instance, strategy, Caps::default());
        assert_eq!((found.groups, found.makespan_ns), (vec![vec![]; 3], 0));
    }
}

#[test]
fn few_large_groups_do_not_overshoot_the_budget() {
    let times_ns: Vec<u64> = (0..8000).map(|i| i * 7919 % 99_991 + 1).collect();
    let instance = Instance::new(2, 1, times_ns).unwrap();
    let found = balance(&instance, Strategy::SEARCH, &Caps::default(), &mut Budget::work(10)).unwrap();
    assert!(found.work_spent < 1000);
}
