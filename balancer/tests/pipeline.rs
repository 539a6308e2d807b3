//! Pipeline assignments keep all guarantees, on random instances.

use super::step_passes::{StepPasses, simulated};
use dflop_balancer::schedule::{ModuleStages, PipelineLayout, ScheduleKind};
use dflop_balancer::{
    Budget, Caps, Communication, Error, Instance, PipelineAssignment, PipelineConfig, PipelineObjective,
    StageTimes, Strategy, balance_pipeline,
};
use dflop_costmodel::MicrobatchConstants;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

const OBJECTIVES: [PipelineObjective; 2] = [PipelineObjective::Makespan, PipelineObjective::MinMax];

/// Simulates a step as the executor runs it: parallel encoders, whose ranks share every round over all LLM
/// ranks unless there are as many encoder ranks.
fn laid_out(instance: &Instance, config: &PipelineConfig, ranks: &[Vec<Vec<u32>>]) -> u64 {
    let (dp_size, rounds, last) = (config.dp_size, ranks[0].len(), config.stages.len() - 1);
    let is_shared = |module: usize| config.module_dp_size(module) != dp_size;
    let module = |module: usize| {
        let stages = ModuleStages::new(config.stages[module], config.module_dp_size(module)).feeds(last);
        if is_shared(module) { stages.share_rounds() } else { stages }
    };
    let modules: Vec<ModuleStages> = (0..=last).map(module).collect();
    let layout = PipelineLayout::from_modules(&modules, rounds).unwrap();
    let passes = StepPasses::new(instance, config, ranks);
    let mut rows = [Vec::new(), Vec::new()];
    for stage in 0..layout.stages() {
        let width = config.module_dp_size(layout.module(stage));
        for microbatch in 0..layout.microbatches() {
            let (round, lane) = (microbatch / width, microbatch % width);
            let rank = if is_shared(layout.module(stage)) { 0 } else { lane };
            let of = passes.times_ns[rank][stage].get(round).copied().unwrap_or_default();
            rows[0].push(of.0);
            rows[1].push(of.1);
        }
    }
    let [forward, backward] = rows;
    let times = StageTimes::new(layout.stages(), layout.microbatches(), forward, backward).unwrap();
    let lists = layout.schedule(config.schedule).unwrap();
    let free = Communication::free(layout.stages(), layout.microbatches());
    layout.simulate(&lists, &times, &free).unwrap().makespan_ns
}

/// Simulates ranks whose stages form a single chain, several stages on each pipeline rank.
fn chained(instance: &Instance, config: &PipelineConfig, ranks: &[Vec<Vec<u32>>]) -> u64 {
    let chunks = config.schedule.chunks();
    let layout =
        PipelineLayout::chain(config.stages.iter().sum::<usize>() / chunks, chunks, ranks[0].len()).unwrap();
    let lists = layout.schedule(config.schedule).unwrap();
    let free = Communication::free(layout.stages(), layout.microbatches());
    let of_rank = |rank: &Vec<Vec<u32>>| {
        let times = config.stage_times(instance, rank).unwrap();
        layout.simulate(&lists, &times, &free).unwrap().makespan_ns
    };
    ranks.iter().map(of_rank).max().unwrap()
}

/// Finds the best makespan over assignments without an empty slot by trying all.
fn brute_force(
    instance: &Instance,
    config: &PipelineConfig,
    simulated: impl Fn(&Instance, &PipelineConfig, &[Vec<Vec<u32>>]) -> u64,
) -> u64 {
    let slots = instance.groups();
    let microbatches = slots / config.dp_size;
    let mut best = u64::MAX;
    for code in 0..slots.pow(instance.items() as u32) {
        let mut groups = vec![Vec::new(); slots];
        let mut rest = code;
        for item in 0..instance.items() as u32 {
            groups[rest % slots].push(item);
            rest /= slots;
        }
        if groups.iter().all(|group| !group.is_empty()) {
            let ranks: Vec<_> = groups.chunks(microbatches).map(<[_]>::to_vec).collect();
            best = best.min(simulated(instance, config, &ranks));
        }
    }
    best
}

/// Draws a pseudo-random number in `0..1`.
fn uniform(state: &mut u64) -> f64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 11) as f64 / (1_u64 << 53) as f64
}

/// Generates texts, images with 1 to 10 tiles and videos; the slower module takes 1 ms per sample on average.
/// `weight` is the encoder's share of that.
fn batch(items: usize, groups: usize, weight: f64, seed: u64) -> Instance {
    let mut state = seed;
    let (mut rows, mut tokens) = (Vec::new(), Vec::new());
    for _ in 0..items {
        let kind = uniform(&mut state);
        let text = 60.0 * (2.0 * uniform(&mut state)).exp2() * (1.0 + 4.0 * uniform(&mut state));
        let tiles = match kind {
            kind if kind < 0.2 => 0.0,
            kind if kind < 0.8 => 1.0 + (10.0 * uniform(&mut state)).floor(),
            _ => 8.0 + (24.0 * uniform(&mut state)).floor(),
        };
        let all = text + 200.0 * tiles;
        rows.push([tiles, all * (1.0 + all / 20_000.0)]);
        tokens.push(all as u64);
    }
    let mean = |module: usize| rows.iter().map(|row| row[module]).sum::<f64>() / items as f64;
    let scales = [1e6 * weight / mean(0), 1e6 / mean(1)];
    let times_ns = rows.iter().flat_map(|row| [(row[0] * scales[0]) as u64, (row[1] * scales[1]) as u64]);
    Instance::new(groups, 2, times_ns.collect()).unwrap().tokens(tokens).unwrap()
}

fn solve(instance: &Instance, config: &PipelineConfig, caps: &Caps, work: u64) -> PipelineAssignment {
    balance_pipeline(instance, config, Strategy::SEARCH, caps, &mut Budget::work(work)).unwrap()
}

proptest! {
    // No theorem: a random instance may be missed by a little more, so these are fixed.
    #![proptest_config(ProptestConfig { cases: 64, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

    #[test]
    fn the_search_is_within_five_percent_of_the_optimum_of_small_instances(
        times_ns in prop::collection::vec(0..30_u64, 10),
        shape in prop::sample::select(vec![(1, 2), (1, 3), (2, 1), (2, 2)]),
        stages in prop::sample::select(vec![[1, 1], [1, 3], [2, 1]]),
    ) {
        let (dp_size, microbatches) = shape;
        let instance = Instance::new(dp_size * microbatches, 2, times_ns).unwrap();
        let config = PipelineConfig::new(dp_size, stages.to_vec());
        let optimum = brute_force(&instance, &config, simulated);
        let found = solve(&instance, &config, &Caps::default(), 2_000);
        prop_assert!(found.makespan_ns <= optimum * 21 / 20, "{} {optimum}", found.makespan_ns);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn bound_is_at_most_the_optimum_and_no_answer_is_below_it(
        times_ns in prop::collection::vec(0..30_u64, 10),
        shape in prop::sample::select(vec![(1, 2), (1, 3), (2, 1), (2, 2)]),
        stages in prop::sample::select(vec![[1, 1], [1, 3], [2, 1]]),
        encoder_dp in prop::option::of(1..4_usize),
    ) {
        let (dp_size, microbatches) = shape;
        let instance = Instance::new(dp_size * microbatches, 2, times_ns).unwrap();
        let mut config = PipelineConfig::new(dp_size, stages.to_vec());
        if let Some(encoder_dp) = encoder_dp {
            config = config.module_dp_sizes(vec![encoder_dp, dp_size]);
        }
        let optimum = brute_force(&instance, &config, simulated);
        for strategy in Strategy::for_any_size() {
            let caps = Caps::default();
            let found =
                balance_pipeline(&instance, &config, strategy, &caps, &mut Budget::work(2_000)).unwrap();
            prop_assert!(found.bound.ns <= optimum, "{:?} above {}", found.bound, optimum);
            prop_assert!(found.makespan_ns >= optimum);
        }
    }

    #[test]
    fn the_bound_of_encoders_side_by_side_is_at_most_the_optimum(
        times_ns in prop::collection::vec(0..30_u64, 12),
        shape in prop::sample::select(vec![(1, 2), (1, 3), (2, 1), (2, 2)]),
        stages in prop::sample::select(vec![[1, 1, 1], [2, 1, 1], [1, 2, 2]]),
        encoder_dps in [1..4_usize, 1..4_usize],
    ) {
        let (dp_size, microbatches) = shape;
        let instance = Instance::new(dp_size * microbatches, 3, times_ns).unwrap();
        let dp_sizes = vec![encoder_dps[0], encoder_dps[1], dp_size];
        let config = PipelineConfig::new(dp_size, stages.to_vec()).module_dp_sizes(dp_sizes);
        let config = config.parallel_encoders();
        let optimum = brute_force(&instance, &config, simulated);
        let found = solve(&instance, &config, &Caps::default(), 2_000);
        prop_assert!(found.bound.ns <= optimum, "{:?} above {}", found.bound, optimum);
        prop_assert!(found.makespan_ns >= optimum);
        prop_assert!(found.makespan_ns <= optimum * 21 / 20, "{} {optimum}", found.makespan_ns);
    }

    #[test]
    fn ranks_with_several_stages_are_planned_for_their_schedule(
        times_ns in prop::collection::vec(0..30_u64, 10),
        shape in prop::sample::select(vec![(1, 2), (1, 3), (2, 2), (1, 4)]),
        stages in prop::sample::select(vec![[2, 2], [1, 3], [3, 3]]),
    ) {
        let (dp_size, microbatches) = shape;
        let instance = Instance::new(dp_size * microbatches, 2, times_ns).unwrap();
        let schedule = ScheduleKind::Interleaved { chunks: 2 };
        let config = PipelineConfig::new(dp_size, stages.to_vec()).schedule(schedule);
        let optimum = brute_force(&instance, &config, chained);
        for strategy in Strategy::for_any_size() {
            let caps = Caps::default();
            let found =
                balance_pipeline(&instance, &config, strategy, &caps, &mut Budget::work(2_000)).unwrap();
            prop_assert!(found.bound.ns <= optimum, "{:?} above {}", found.bound, optimum);
            prop_assert_eq!(found.makespan_ns, chained(&instance, &config, &found.ranks));
            if strategy == Strategy::SEARCH {
                prop_assert!(found.makespan_ns <= optimum * 21 / 20, "{} {optimum}", found.makespan_ns);
            }
        }
    }

    #[test]
    fn the_makespan_is_that_of_the_step_that_the_executor_runs(
        times_ns in prop::collection::vec(0..1_000_u64, 60),
        stages in prop::sample::select(vec![vec![2, 3], vec![1, 1], vec![3, 1, 2], vec![1, 2, 1], vec![1, 1, 2, 2]]),
        shape in prop::sample::select(vec![(1, 6), (2, 3), (3, 4), (4, 2)]),
        encoder_dps in prop::collection::vec(1..6_usize, 3),
        schedule in prop::sample::select(vec!["1f1b", "gpipe", "1f1b-ahead:1", "1f1b-ahead:3"]),
    ) {
        let ((dp_size, microbatches), modules) = (shape, stages.len());
        let times_ns = times_ns[..60 / modules * modules].to_vec();
        let instance = Instance::new(dp_size * microbatches, modules, times_ns).unwrap();
        let dp_sizes = [&encoder_dps[..modules - 1], &[dp_size]].concat();
        let config = PipelineConfig::new(dp_size, stages).module_dp_sizes(dp_sizes).parallel_encoders();
        let config = config.schedule(schedule.parse().unwrap());
        for strategy in [Strategy::LPT, Strategy::SEARCH] {
            let caps = Caps::default();
            let found = balance_pipeline(&instance, &config, strategy, &caps, &mut Budget::work(300)).unwrap();
            prop_assert_eq!(laid_out(&instance, &config, &found.ranks), found.makespan_ns);
            prop_assert_eq!(config.makespan_ns(&instance, &found.ranks).unwrap(), found.makespan_ns);
            prop_assert_eq!(found.ranks_ns.iter().copied().max(), Some(found.makespan_ns));
        }
    }

    #[test]
    fn every_item_runs_once_and_no_microbatch_is_empty_or_above_its_cap(
        times_ns in prop::collection::vec(0..1_000_u64, 90),
        dp_size in 1..5_usize,
        microbatches in 1..9_usize,
        encoder_dp in 1..5_usize,
    ) {
        let instance = Instance::with_empty_groups(dp_size * microbatches, 3, times_ns).unwrap();
        let instance = instance.tokens((0..30).map(|item| item % 5).collect()).unwrap();
        let config = PipelineConfig::new(dp_size, vec![1, 2, 1]).module_dp_sizes(vec![encoder_dp, dp_size, 2]);
        let caps = Caps { tokens_max: Some(60 * 3 / 2 / (dp_size * microbatches) as u64 + 4), bytes_max: None };
        for (strategy, objective) in Strategy::for_any_size().flat_map(|s| OBJECTIVES.map(|o| (s, o))) {
            let config = config.clone().objective(objective);
            let run = || balance_pipeline(&instance, &config, strategy, &caps, &mut Budget::work(500)).unwrap();
            let found = run();
            prop_assert!(found.ranks.len() == dp_size && found.ranks.iter().all(|rank| rank.len() == microbatches));
            prop_assert_eq!(simulated(&instance, &config, &found.ranks), found.makespan_ns);
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
    let [blind, lpt, search] =
        [Strategy::ROUND_ROBIN, Strategy::MULTI_LPT, Strategy::SEARCH].map(makespan_ns);
    assert!(search < lpt && lpt < blind, "{search} {lpt} {blind}");
}

/// Batches and pipelines for the claims about the objective.
fn cases() -> Vec<(Instance, PipelineConfig)> {
    let case = |items, groups, weight, seed, dp_size, stages: &[usize]| {
        (batch(items, groups, weight, seed), PipelineConfig::new(dp_size, stages.to_vec()))
    };
    vec![
        case(512, 64, 1.0, 1, 4, &[1, 3]),
        case(512, 64, 0.6, 2, 4, &[1, 3]),
        case(1024, 64, 0.9, 3, 8, &[2, 6]),
    ]
}

#[test]
fn the_makespan_as_objective_beats_min_max_with_the_best_order() {
    for (instance, config) in cases() {
        let makespan_ns = |objective| {
            let config = config.clone().objective(objective);
            let found = solve(&instance, &config, &Caps::default(), 200_000);
            assert!(found.gap() >= 0.0 && found.is_reproducible);
            found.makespan_ns
        };
        let [makespan, min_max] = OBJECTIVES.map(makespan_ns);
        assert!(makespan * 100 <= min_max * 96, "{makespan} {min_max}");
    }
}

#[test]
fn what_the_objective_gains_survives_errors_of_prediction() {
    for (instance, config) in cases() {
        let plans = OBJECTIVES.map(|objective| {
            solve(&instance, &config.clone().objective(objective), &Caps::default(), 200_000).ranks
        });
        let mut state = 5;
        let mut sums = [0, 0];
        for _ in 0..10 {
            let mut noise = || {
                let normal = (0..12).map(|_| uniform(&mut state)).sum::<f64>() - 6.0;
                (0.1 * normal - 0.005).exp()
            };
            let rows = (0..instance.items() as u32).flat_map(|item| instance.times_ns(item));
            let times_ns = rows.map(|time_ns| (*time_ns as f64 * noise()) as u64).collect();
            let truth = Instance::new(instance.groups(), 2, times_ns).unwrap();
            for (sum, ranks) in sums.iter_mut().zip(&plans) {
                *sum += simulated(&truth, &config, ranks);
            }
        }
        assert!(sums[0] * 100 <= sums[1] * 97, "{sums:?}");
    }
}

#[test]
fn tight_caps_hold_and_cost_little() {
    let (instance, config) = &cases()[0];
    let tokens: Vec<u64> = (0..512).map(|item| 1 + item * 7919 % 500).collect();
    let instance = instance.clone().tokens(tokens.clone()).unwrap().bytes(vec![3; 512]).unwrap();
    let mean = tokens.iter().sum::<u64>() / 64;
    let free = solve(&instance, config, &Caps::default(), 100_000);
    let caps = Caps { tokens_max: Some(mean * 5 / 4), bytes_max: Some(3 * 11) };
    let found = solve(&instance, config, &caps, 100_000);
    for group in found.ranks.concat() {
        assert!(group.iter().map(|&item| tokens[item as usize]).sum::<u64>() <= mean * 5 / 4);
        assert!(group.len() <= 11);
    }
    assert!(found.makespan_ns * 100 <= free.makespan_ns * 104);
    let is_loose = |group: &Vec<u32>| group.iter().map(|&item| tokens[item as usize]).sum::<u64>();
    assert!(free.ranks.concat().iter().map(is_loose).max().unwrap() > mean * 5 / 4, "the cap binds");
}

#[test]
fn an_item_above_a_cap_is_named() {
    let instance = Instance::new(2, 1, vec![1, 1, 1]).unwrap().bytes(vec![1, 9, 1]).unwrap();
    let caps = Caps { tokens_max: None, bytes_max: Some(8) };
    let config = PipelineConfig::new(1, vec![2]);
    let found = balance_pipeline(&instance, &config, Strategy::SEARCH, &caps, &mut Budget::work(10));
    assert!(matches!(found, Err(Error::CapItem { item: 1, value: 9, max: 8, .. })));
}

#[test]
fn a_deadline_marks_what_it_cuts_and_nothing_gets_worse() {
    let (instance, config) = &cases()[0];
    let run = |strategy, mut budget| {
        balance_pipeline(instance, config, strategy, &Caps::default(), &mut budget).unwrap()
    };
    let start = run(Strategy::MULTI_LPT, Budget::work(0));
    for looks in [1, 10, 100, 1_000] {
        let mut left = looks;
        let deadline = move || {
            left -= 1;
            left == 0
        };
        let found = run(Strategy::SEARCH, Budget::work(u64::MAX).deadline(deadline));
        assert!(!found.is_reproducible && found.makespan_ns <= start.makespan_ns);
        assert_eq!(found.makespan_ns, *found.ranks_ns.iter().max().unwrap());
    }
}

#[test]
fn a_search_without_end_ends_where_nothing_helps() {
    let instance = Instance::new(4, 2, (0..24).map(|i| i * 7919 % 101).collect()).unwrap();
    let found = solve(&instance, &PipelineConfig::new(2, vec![1, 1]), &Caps::default(), u64::MAX);
    assert!(found.work_spent > 1_000 && found.is_reproducible);
}

#[test]
fn an_encoder_of_its_own_dp_size_is_bound_by_the_sum_over_the_ranks() {
    // One sample takes the encoder as long as all other samples together.
    let mut times_ns: Vec<u64> = (0..16).flat_map(|_| [60, 90]).collect();
    times_ns[0] = 900;
    let instance = Instance::new(8, 2, times_ns).unwrap();
    let of = |config| solve(&instance, &config, &Caps::default(), 50_000);
    let inside = of(PipelineConfig::new(4, vec![1, 1]));
    let outside = of(PipelineConfig::new(4, vec![1, 1]).module_dp_sizes(vec![2, 4]));
    // Inside, some pipeline runs it in addition to its LLM work; outside, two ranks share 1,800 ns, none
    // less.
    assert!(inside.bound.ns >= 900 && outside.bound.ns >= 900);
    assert!(outside.makespan_ns >= 900 + 60);
    let many = of(PipelineConfig::new(4, vec![1, 1]).module_dp_sizes(vec![16, 4]));
    assert!(many.bound.ns >= 900 && many.makespan_ns <= outside.makespan_ns);
    let even = Instance::new(8, 2, (0..16).flat_map(|_| [600, 90]).collect()).unwrap();
    for (encoder_dp, total) in [(1, 9_600), (2, 4_800), (8, 1_200)] {
        let config = PipelineConfig::new(4, vec![1, 1]).module_dp_sizes(vec![encoder_dp, 4]);
        let found = solve(&even, &config, &Caps::default(), 10_000);
        assert!(found.bound.ns >= total && found.makespan_ns <= found.bound.ns + 700, "{found:?}");
    }
}

#[test]
fn times_of_one_rank_need_the_others_where_an_encoder_is_shared() {
    let instance = Instance::new(2, 2, vec![4, 9, 6, 3]).unwrap();
    let config = PipelineConfig::new(2, vec![1, 1]).module_dp_sizes(vec![4, 2]);
    let ranks = [vec![vec![0]], vec![vec![1]]];
    assert!(matches!(config.stage_times(&instance, &ranks[0]), Err(Error::Config { .. })));
    // (4 + 6) / 4 is 3, but the longest item takes 6 on any rank.
    assert_eq!(simulated(&instance, &config, &ranks), 6 + 9);
    assert!(matches!(config.ranks_times(&instance, &ranks[..1]), Err(Error::Length { .. })));
    let wrong = PipelineConfig::new(2, vec![1, 1]).module_dp_sizes(vec![4]);
    assert!(matches!(wrong.ranks_times(&instance, &ranks), Err(Error::Config { .. })));
}

#[test]
fn schedules_that_do_not_fit_the_stages_are_refused() {
    let instance = Instance::new(4, 2, vec![1; 8]).unwrap();
    let config = PipelineConfig::new(2, vec![1, 2]);
    for (schedule, dp_sizes) in [("zb-h1", vec![]), ("interleaved:2", vec![]), ("interleaved:3", vec![1, 2])]
    {
        let config = config.clone().schedule(schedule.parse().unwrap()).module_dp_sizes(dp_sizes);
        let caps = Caps::default();
        let found = balance_pipeline(&instance, &config, Strategy::LPT, &caps, &mut Budget::work(0));
        assert!(matches!(found, Err(Error::Config { setting: "schedule", .. })), "{schedule}");
    }
}

proptest! {
    /// Microbatches in one stage; a single rank processes everything: the bound is never above a makespan.
    #[test]
    fn bounds_with_constants_hold_for_any_cut(
        times_ns in prop::collection::vec(0..200_u64, 12),
        constants in prop::collection::vec((0..400_u64, 0..200_u64), 2),
        stages in prop::collection::vec(1..3_usize, 2),
        encoder_dp in 1..4_usize,
        slots in prop::collection::vec(0..4_usize, 6),
    ) {
        let constants = constants.into_iter().map(|(floor_ns, base_ns)| MicrobatchConstants { floor_ns, base_ns });
        let instance = Instance::new(4, 2, times_ns).unwrap().constants(constants.collect()).unwrap();
        let config = PipelineConfig::new(2, stages).module_dp_sizes(vec![encoder_dp, 2]);
        let bound = balance_pipeline(
            &instance, &config, Strategy::ROUND_ROBIN, &Caps::default(), &mut Budget::work(0),
        ).unwrap().bound;
        let mut groups = vec![Vec::new(); 4];
        // The first four items keep all microbatches from being empty.
        (0..6_u32).for_each(|item| {
            let slot = if item < 4 { item as usize } else { slots[item as usize] };
            groups[slot].push(item);
        });
        let ranks = [groups[..2].to_vec(), groups[2..].to_vec()];
        let makespan_ns = config.makespan_ns(&instance, &ranks).unwrap();
        prop_assert!(bound.ns <= makespan_ns, "{bound:?} {makespan_ns}");
    }
}
