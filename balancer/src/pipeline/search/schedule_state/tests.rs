//! Times and memory follow the changes of a state.

use super::*;
use crate::pipeline::config::{PipelineMemoryLimits, StageMemoryLimit};
use crate::pipeline::search::ChangeKind;
use crate::{Caps, Instance};
use dflop_costmodel::MicrobatchConstants;
use dflop_costmodel::random::SplitMix64;
use proptest::prelude::*;

/// Recomputes a state from its items.
fn renewed<'a>(state: &ScheduleState<'a>, config: &'a PipelineConfig) -> ScheduleState<'a> {
    let slots = Partition::from_groups(state.problem, state.slots.groups.clone());
    ScheduleState::new(state.problem, slots, config)
}

fn simulated<'a>(state: &ScheduleState<'a>, config: &'a PipelineConfig) -> Vec<u64> {
    renewed(state, config).into_parts().1
}

fn random_change(state: &ScheduleState<'_>, rng: &mut SplitMix64) -> Option<Change> {
    let [first, second] = [(); 2].map(|()| rng.below(state.problem.groups));
    let (givers, takers) = (state.slots.groups[first].len(), state.slots.groups[second].len());
    let kind = match rng.below(3) {
        0 => ChangeKind::Slots,
        1 if givers > 0 => ChangeKind::Items { gives: rng.below(givers), takes: None },
        _ if givers > 0 && takers > 0 => {
            ChangeKind::Items { gives: rng.below(givers), takes: Some(rng.below(takers)) }
        }
        _ => return None,
    };
    (first != second).then_some(Change { first, second, kind })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn makespans_and_memory_follow_every_change(
        times_ns in prop::collection::vec(0..1000_u64, 60),
        stages in prop::collection::vec(1..4_usize, 2),
        shape in prop::sample::select(vec![(1, 6), (2, 3), (3, 4), (4, 1)]),
        encoder_dp in 1..6_usize,
        bytes_max in prop::option::of(0..20_000_u64),
        constants in prop::collection::vec((0..3_000_u64, 0..500_u64), 2),
        seed in any::<u64>(),
    ) {
        let (dp_size, microbatches) = shape;
        let constants = constants.into_iter().map(|(floor_ns, base_ns)| MicrobatchConstants { floor_ns, base_ns });
        let instance = Instance::new(dp_size * microbatches, 2, times_ns.clone()).unwrap();
        let instance = instance.constants(constants.collect()).unwrap();
        let mut config = PipelineConfig::new(dp_size, stages).module_dp_sizes(vec![encoder_dp, dp_size]);
        config.memory = bytes_max.map(|bytes_max| {
            let limit = |kept: [u64; 2], in_flight| {
                StageMemoryLimit { in_flight, kept: kept.to_vec(), working: kept.to_vec(), bytes_max }
            };
            let stages = vec![limit([1, 0], 3), limit([0, 2], 2)];
            PipelineMemoryLimits { units: times_ns.into_iter().rev().collect(), stages }
        });
        let problem = Problem::new(&instance, &Caps::default()).unwrap();
        let mut rng = SplitMix64::new(seed);
        let mut groups = vec![Vec::new(); instance.groups()];
        (0..30).for_each(|item| groups[rng.below(instance.groups())].push(item));
        let mut state = ScheduleState::new(&problem, Partition::from_groups(&problem, groups), &config);
        let mut best = state.value();
        for _ in 0..40 {
            let limit_ns = if rng.below(2) == 0 { u64::MAX / 4 } else { 100 };
            let Some(change) = random_change(&state, &mut rng) else { continue };
            state.try_change(change, limit_ns, &mut Budget::work(u64::MAX));
            prop_assert_eq!(state.value(), renewed(&state, &config).value());
            prop_assert!(state.memory_excess() <= best.0, "the excess never rises");
            best = best.min(state.value());
        }
        state.return_to_best();
        prop_assert_eq!(state.value(), best);
        prop_assert_eq!(renewed(&state, &config).value(), best);
    }
}

#[test]
fn a_change_above_the_limit_leaves_no_trace() {
    let instance = Instance::new(4, 1, vec![90, 90, 90, 90]).unwrap();
    let config = PipelineConfig::new(2, vec![2]);
    let problem = Problem::new(&instance, &Caps::default()).unwrap();
    let groups = (0..4).map(|item| vec![item]).collect();
    let mut state = ScheduleState::new(&problem, Partition::from_groups(&problem, groups), &config);
    let kind = ChangeKind::Items { gives: 0, takes: None };
    state.try_change(Change { first: 0, second: 2, kind }, 149, &mut Budget::work(1));
    assert_eq!(state.slots.groups, [[0], [1], [2], [3]]);
    assert_eq!(simulated(&state, &config), [270, 270]);
    state.try_change(Change { first: 0, second: 2, kind }, 150, &mut Budget::work(1));
    assert_eq!(simulated(&state, &config), [180, 420]);
}
