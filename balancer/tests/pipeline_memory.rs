//! Pipeline assignments keep memory limits, on random instances.

use super::step_passes::simulated;
use dflop_balancer::{
    Budget, Caps, Instance, PipelineAssignment, PipelineConfig, PipelineMemoryLimits, PipelineObjective,
    StageMemoryLimit, Strategy, balance_pipeline,
};
use proptest::prelude::*;

/// Returns the bytes that a limit's lanes need: every rank, or all ranks together for shared modules.
fn needed(
    config: &PipelineConfig,
    units: &[u64],
    limit: &StageMemoryLimit,
    ranks: &[Vec<Vec<u32>>],
) -> Vec<u64> {
    let modules = config.stages.len();
    let is_shared = |module: usize| config.module_dp_size(module) != config.dp_size;
    let is_pool =
        (0..modules).any(|module| is_shared(module) && limit.kept[module] + limit.working[module] > 0);
    let slot_units = |rank: &Vec<Vec<u32>>, slot: usize, module: usize| -> u64 {
        rank[slot].iter().map(|item| units[*item as usize * modules + module]).sum()
    };
    let lane = |lane: usize| {
        let bytes = |factors: &[u64], slot: usize| -> u64 {
            let of_module = |(module, factor): (usize, &u64)| {
                let units = if is_pool {
                    let pool: u64 = ranks.iter().map(|rank| slot_units(rank, slot, module)).sum();
                    pool.div_ceil(config.module_dp_size(module) as u64)
                } else {
                    slot_units(&ranks[lane], slot, module)
                };
                factor * units
            };
            factors.iter().enumerate().map(of_module).sum()
        };
        let kept: Vec<u64> = (0..ranks[0].len()).map(|slot| bytes(&limit.kept, slot)).collect();
        let working = (0..ranks[0].len()).map(|slot| bytes(&limit.working, slot)).max().unwrap();
        let windows = kept.windows(limit.in_flight.min(kept.len()));
        windows.map(|window| window.iter().sum::<u64>()).max().unwrap() + working
    };
    (0..if is_pool { 1 } else { ranks.len() }).map(lane).collect()
}

/// Returns the bytes above the limits.
fn excess(config: &PipelineConfig, ranks: &[Vec<Vec<u32>>]) -> u64 {
    let limits = config.memory.as_ref().unwrap();
    let of_limit = |limit: &StageMemoryLimit| -> u64 {
        let needed = needed(config, &limits.units, limit, ranks);
        needed.into_iter().map(|bytes| bytes.saturating_sub(limit.bytes_max)).sum()
    };
    limits.stages.iter().map(of_limit).sum()
}

fn search(instance: &Instance, config: &PipelineConfig, work: u64) -> PipelineAssignment {
    balance_pipeline(instance, config, Strategy::SEARCH, &Caps::default(), &mut Budget::work(work)).unwrap()
}

/// A linear congruential generator.
struct Rng(u64);

impl Rng {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % end
    }
}

/// Draws an assignment without an empty microbatch.
fn random_ranks(items: usize, dp_size: usize, microbatches: usize, rng: &mut Rng) -> Vec<Vec<Vec<u32>>> {
    let groups = dp_size * microbatches;
    let mut order: Vec<u32> = (0..items as u32).collect();
    (1..items).rev().for_each(|last| order.swap(last, rng.below(last + 1)));
    let mut ranks = vec![vec![Vec::new(); microbatches]; dp_size];
    for (nth, item) in order.into_iter().enumerate() {
        let slot = if nth < groups { nth } else { rng.below(groups) };
        ranks[slot / microbatches][slot % microbatches].push(item);
    }
    ranks
}

/// Draws an instance with two modules and limits that some assignment keeps; `slack` more percent are
/// allowed.
fn case(seed: u64, items: usize, slack: u64) -> (Instance, PipelineConfig) {
    let mut rng = Rng(seed);
    for _ in 0..8 {
        rng.below(2);
    }
    let (dp_size, microbatches) = [(1, 2), (1, 3), (1, 4), (2, 2), (2, 1)][rng.below(5)];
    let stages = [[1, 1], [1, 2], [2, 1], [1, 3]][rng.below(4)];
    let encoder_dp = if rng.below(2) == 0 { dp_size } else { 1 + rng.below(3) };
    let times_ns: Vec<u64> = (0..2 * items).map(|_| rng.below(30) as u64).collect();
    // Units that follow the times, or not.
    let is_like = rng.below(2) == 0;
    let unit =
        |time: u64, rng: &mut Rng| if is_like { time + rng.below(4) as u64 } else { rng.below(30) as u64 };
    let units: Vec<u64> = times_ns.iter().map(|time| unit(*time, &mut rng)).collect();
    let ranks = random_ranks(items, dp_size, microbatches, &mut rng);
    let config = PipelineConfig::new(dp_size, stages.to_vec()).module_dp_sizes(vec![encoder_dp, dp_size]);
    let depth: usize = stages.iter().sum();
    let mut limits = Vec::new();
    for stage in 0..depth {
        let mut factors = |is_own: bool| if is_own { 1 + rng.below(3) as u64 } else { 0 };
        let is_encoder = stage < stages[0];
        let kept = vec![factors(is_encoder), factors(!is_encoder)];
        let working = vec![factors(is_encoder) / 2, factors(!is_encoder) / 2];
        let mut limit = StageMemoryLimit { in_flight: depth - stage, kept, working, bytes_max: 0 };
        let most = needed(&config, &units, &limit, &ranks).into_iter().max().unwrap();
        limit.bytes_max = most * (100 + slack) / 100;
        limits.push(limit);
    }
    let config = config.memory(PipelineMemoryLimits { units, stages: limits });
    (Instance::new(dp_size * microbatches, 2, times_ns).unwrap(), config)
}

/// Finds the minimum makespan over assignments that have no empty microbatch and keep the limits.
fn brute_force(instance: &Instance, config: &PipelineConfig) -> Option<u64> {
    let slots = instance.groups();
    let mut best: Option<u64> = None;
    for code in 0..slots.pow(instance.items() as u32) {
        let mut groups = vec![Vec::new(); slots];
        let mut rest = code;
        for item in 0..instance.items() as u32 {
            groups[rest % slots].push(item);
            rest /= slots;
        }
        let ranks: Vec<_> = groups.chunks(slots / config.dp_size).map(<[_]>::to_vec).collect();
        if groups.iter().all(|group| !group.is_empty()) && excess(config, &ranks) == 0 {
            let makespan_ns = simulated(instance, config, &ranks);
            best = Some(best.map_or(makespan_ns, |best| best.min(makespan_ns)));
        }
    }
    best
}

#[test]
fn a_search_finds_an_assignment_that_fits_near_the_best_of_them() {
    let (mut cases, mut binding, mut far) = (0, 0, 0);
    for slack in [0, 5, 20] {
        for seed in 0..150 {
            let (instance, config) = case(seed * 7919 + 3, 5 + (seed % 3) as usize, slack);
            let optimum = brute_force(&instance, &config).unwrap();
            let found = search(&instance, &config, 8_000);
            assert_eq!((found.memory_excess, excess(&config, &found.ranks)), (0, 0), "{config:?}");
            assert!(found.makespan_ns >= optimum && found.bound.ns <= optimum);
            far += u32::from(found.makespan_ns * 20 > optimum * 21);
            let free = PipelineConfig { memory: None, ..config };
            binding += u32::from(search(&instance, &free, 8_000).makespan_ns < optimum);
            cases += 1;
        }
    }
    assert!(binding * 4 > cases, "the limits of {binding} bind");
    // Exact limits separate the assignments that fit, so changes may not lead from one assignment to the
    // next.
    assert!(far * 100 <= cases, "{far} of {cases} are far from the optimum");
}

/// Builds an instance with a single stage-bound module whose items are a microbatch each.
fn alternating() -> (Instance, PipelineConfig) {
    let units = vec![90, 10, 91, 11, 92, 12, 93, 13];
    let limit =
        |in_flight, bytes_max| StageMemoryLimit { in_flight, kept: vec![1], working: vec![0], bytes_max };
    let limits = PipelineMemoryLimits { units: units.clone(), stages: vec![limit(2, 106), limit(1, 93)] };
    (Instance::new(8, 1, units).unwrap(), PipelineConfig::new(1, vec![2]).memory(limits))
}

#[test]
fn an_even_order_fits_where_peak_order_does_not() {
    let (instance, config) = alternating();
    let caps = Caps::default();
    let peak =
        balance_pipeline(&instance, &config, Strategy::MULTI_LPT, &caps, &mut Budget::work(0)).unwrap();
    assert_eq!(peak.memory_excess, 93 + 92 - 106);
    for objective in [PipelineObjective::Makespan, PipelineObjective::MinMax] {
        let found = search(&instance, &config.clone().objective(objective), 2_000);
        assert_eq!((found.memory_excess, excess(&config, &found.ranks)), (0, 0), "{objective:?}");
        // No two large microbatches are neighbors.
        for pair in found.ranks[0].windows(2) {
            assert!(pair.iter().flatten().any(|item| item % 2 == 1), "{:?}", found.ranks);
        }
    }
    let free = search(&instance, &PipelineConfig { memory: None, ..config.clone() }, 2_000);
    assert!(excess(&config, &free.ranks) > 0, "the limit binds");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_excess_is_that_of_the_answer_and_every_machine_finds_it(
        times_ns in prop::collection::vec(0..1_000_u64, 60),
        units in prop::collection::vec(0..500_u64, 60),
        shape in prop::sample::select(vec![(1, 6), (2, 3), (3, 4), (4, 1)]),
        encoder_dp in 1..6_usize,
        percent in 20..150_u64,
        is_min_max in any::<bool>(),
    ) {
        let (dp_size, microbatches) = shape;
        let instance = Instance::new(dp_size * microbatches, 2, times_ns).unwrap();
        let instance = instance.tokens((0..30).collect()).unwrap();
        let caps = Caps { tokens_max: Some(30 + 435 * 2 / (dp_size * microbatches) as u64), bytes_max: None };
        let total = |module: usize| units.iter().skip(module).step_by(2).sum::<u64>();
        let bytes_max = |module: usize| total(module) * 2 * percent / 100 / (dp_size * microbatches) as u64;
        let stages = vec![
            StageMemoryLimit { in_flight: 3, kept: vec![1, 0], working: vec![1, 0], bytes_max: bytes_max(0) },
            StageMemoryLimit { in_flight: 2, kept: vec![0, 3], working: vec![0, 1], bytes_max: bytes_max(1) },
        ];
        let limits = PipelineMemoryLimits { units, stages };
        let objective = if is_min_max { PipelineObjective::MinMax } else { PipelineObjective::Makespan };
        let config = PipelineConfig::new(dp_size, vec![1, 1]).module_dp_sizes(vec![encoder_dp, dp_size]);
        let config = config.objective(objective).memory(limits);
        let mut least = u64::MAX;
        for strategy in Strategy::for_any_size() {
            let run = || balance_pipeline(&instance, &config, strategy, &caps, &mut Budget::work(1_000)).unwrap();
            let found = run();
            prop_assert_eq!(found.memory_excess, excess(&config, &found.ranks));
            prop_assert_eq!(found.makespan_ns, simulated(&instance, &config, &found.ranks));
            let mut items = found.ranks.concat().concat();
            items.sort_unstable();
            prop_assert_eq!(items, (0..30).collect::<Vec<_>>());
            for group in found.ranks.concat() {
                prop_assert!(!group.is_empty());
                prop_assert!(group.iter().map(|item| u64::from(*item)).sum::<u64>() <= caps.tokens_max.unwrap());
            }
            prop_assert_eq!(&found, &run());
            if strategy == Strategy::MULTI_LPT {
                least = found.memory_excess;
            }
            if strategy == Strategy::SEARCH {
                prop_assert!(is_min_max || found.memory_excess <= least);
            }
        }
    }

    #[test]
    fn no_limits_change_nothing(
        times_ns in prop::collection::vec(0..1_000_u64, 60),
        encoder_dp in 1..4_usize,
    ) {
        let instance = Instance::new(6, 2, times_ns).unwrap();
        let config = PipelineConfig::new(2, vec![1, 2]).module_dp_sizes(vec![encoder_dp, 2]);
        let free = search(&instance, &config, 1_000);
        prop_assert_eq!(free.memory_excess, 0);
        let limits = PipelineMemoryLimits { units: vec![1; 60], stages: Vec::new() };
        prop_assert_eq!(free, search(&instance, &config.memory(limits), 1_000));
    }
}
