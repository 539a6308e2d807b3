//! Items that the ranks of pipelines share: step times, against all placements of small problems, and whole
//! placements.

use crate::context::{Case, Place, WORK, items, latencies, places};
use dflop_balancer::schedule::{Action, ScheduleKind, schedule};
use dflop_balancer::{
    Budget, Caps, ContextItem, ContextProblem, ContextSlice, Instance, PipelineConfig, Strategy,
    balance_context, balance_pipeline, context_pipeline_ns, split_time,
};
use dflop_costmodel::random::SplitMix64;
use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::ops::Range;

const KIND: ScheduleKind = ScheduleKind::OneForwardOneBackward;
/// Longest placement found over the shortest of all, on small problems.
const RATIO_MAX: f64 = 1.03;

/// A pass: rank, stage, microbatch, and whether it is forward.
type Pass = (usize, usize, usize, bool);

/// Computes the step time by going over all passes until no end changes.
fn step_ns(case: &Case, places: &[Place], stages: &[usize]) -> u64 {
    let count: usize = stages.iter().sum();
    let first_of_llm = count - stages[stages.len() - 1];
    let rows: Vec<usize> =
        stages.iter().enumerate().flat_map(|(module, stages)| vec![module; *stages]).collect();
    let loads = case.loads(places);
    let leaders: Vec<Vec<usize>> = (0..case.slots).map(|slot| case.leaders(places, slot)).collect();
    let group = |rank: usize, stage: usize, slot: usize| -> Vec<usize> {
        if stage < first_of_llm {
            return vec![rank];
        }
        (0..case.ranks).filter(|other| leaders[slot][*other] == leaders[slot][rank]).collect()
    };
    let mut lists: Vec<Vec<Pass>> = Vec::new();
    for rank in 0..case.ranks {
        for stage in 0..count {
            let pass = |action: &Action| match action {
                Action::Forward(part) => Some((rank, stage, part.microbatch as usize, true)),
                Action::Backward(part) => Some((rank, stage, part.microbatch as usize, false)),
                _ => None,
            };
            lists.push(schedule(KIND, stage, count, case.slots).iter().filter_map(pass).collect());
        }
    }
    let mut ends: HashMap<Pass, u64> = HashMap::new();
    loop {
        let before = ends.clone();
        for list in &lists {
            for (at, &(rank, stage, slot, is_forward)) in list.iter().enumerate() {
                let previous = at.checked_sub(1).map(|at| list[at]);
                let input = |rank: usize| match (is_forward, stage) {
                    (true, 0) => None,
                    (true, _) => Some((rank, stage - 1, slot, true)),
                    (false, _) if stage + 1 == count => Some((rank, stage, slot, true)),
                    (false, _) => Some((rank, stage + 1, slot, false)),
                };
                let mut begin = previous.and_then(|pass| ends.get(&pass)).copied().unwrap_or(0);
                let mut longest = 0;
                for other in group(rank, stage, slot) {
                    let list = &lists[other * count + stage];
                    let at = list.iter().position(|own| (own.2, own.3) == (slot, is_forward)).unwrap();
                    let previous = at.checked_sub(1).map(|at| list[at]);
                    for pass in [previous, input(other)].into_iter().flatten() {
                        begin = begin.max(ends.get(&pass).copied().unwrap_or(0));
                    }
                    let (forward, backward) = split_time(loads[slot][other][rows[stage]]);
                    longest = longest.max(if is_forward { forward } else { backward });
                }
                ends.insert((rank, stage, slot, is_forward), begin + longest);
            }
        }
        if ends == before {
            return ends.into_values().max().unwrap_or(0);
        }
    }
}

fn problem(case: &Case, stages: &[usize]) -> ContextProblem {
    case.problem().pipeline(&PipelineConfig::new(case.ranks, stages.to_vec())).unwrap()
}

fn small(seed: u64) -> (Case, Vec<usize>) {
    let mut random = SplitMix64::new(seed);
    let ([ranks, slots, count, encoders], stages) = [
        ([2, 2, 5, 1], vec![1, 2]),
        ([2, 3, 5, 0], vec![3]),
        ([4, 1, 5, 0], vec![2]),
        ([2, 2, 6, 0], vec![2]),
        ([4, 2, 4, 0], vec![1]),
    ][seed as usize % 5]
        .clone();
    let items = items(&mut random, count, 2, encoders);
    let latencies = latencies(seed.is_multiple_of(2));
    let (shard_ranks, group_max, caps) = (1, ranks, Caps::default());
    (Case { ranks, slots, encoders, shard_ranks, group_max, items, caps, latencies }, stages)
}

#[test]
fn small_problems_are_solved() {
    let (mut worst, mut exact) = (1.0_f64, 0);
    for seed in 0..25 {
        let (case, stages) = small(seed);
        let found = balance_context(&problem(&case, &stages), None, &mut Budget::work(WORK)).unwrap();
        assert_eq!(step_ns(&case, &places(&found), &stages), found.makespan_ns, "seed {seed}");
        let config = PipelineConfig::new(case.ranks, stages.clone());
        let time = |places: &[Place]| {
            let loads = case.loads(places);
            let ranks: Vec<Vec<Vec<u64>>> =
                (0..case.ranks).map(|rank| loads.iter().map(|slot| slot[rank].clone()).collect()).collect();
            let mut meetings: Vec<Vec<Range<usize>>> = vec![Vec::new(); case.slots];
            for (slot, first, size, _) in places {
                meetings[*slot].push(*first..first + size);
            }
            context_pipeline_ns(&ranks, &meetings, &config).unwrap()
        };
        assert_eq!(time(&places(&found)), found.makespan_ns);
        let shortest = case.shortest_ns(time);
        assert!(found.bound.ns <= shortest, "seed {seed}: bound {} above {shortest}", found.bound.ns);
        assert!(found.makespan_ns >= shortest, "seed {seed}: {} below {shortest}", found.makespan_ns);
        worst = worst.max(found.makespan_ns as f64 / shortest as f64);
        exact += usize::from(found.makespan_ns == shortest);
    }
    assert!(worst <= RATIO_MAX, "{worst}, {exact} of 25 exact");
    assert!(exact >= 20, "{exact} of 25");
}

/// A long item among short ones: no order of whole items comes near the split one.
#[test]
fn a_long_item_is_split_and_no_result_is_longer_than_whole_items() {
    let mut random = SplitMix64::new(3);
    for (seed, stages) in [vec![1, 3], vec![2, 4], vec![1, 2]].into_iter().enumerate() {
        let (ranks, slots, count) = (8, 4, 64);
        let mut own = items(&mut random, count, 3, 1);
        if seed == 2 {
            // Every slice takes as long as the whole item.
            for item in &mut own {
                let whole = item.slices[0];
                item.slices.fill(whole);
            }
        } else {
            own[0].slices =
                (0..=3).map(|log| ContextSlice { ns: 20_000 >> log, ..own[0].slices[0] }).collect();
        }
        let times = own.iter().flat_map(|item| [item.media_ns[0][0], item.slices[0].ns]).collect();
        let instance = Instance::new(ranks * slots, 2, times).unwrap();
        let config = PipelineConfig::new(ranks, stages.clone());
        let mut budget = Budget::work(WORK);
        let whole =
            balance_pipeline(&instance, &config, Strategy::SEARCH, &Caps::default(), &mut budget).unwrap();
        let (caps, latencies) = (Caps::default(), Vec::new());
        let case =
            Case { ranks, slots, encoders: 1, shard_ranks: 1, group_max: 8, items: own, caps, latencies };
        let problem = problem(&case, &stages);
        for work in [0, WORK] {
            let found = balance_context(&problem, Some(&whole.ranks), &mut Budget::work(work)).unwrap();
            assert!(found.makespan_ns <= whole.makespan_ns, "{stages:?}, work {work}");
            assert!(found.bound.ns <= found.makespan_ns);
            if seed < 2 {
                assert!(found.places[0].ranks.len() > 1);
                assert!(found.makespan_ns < whole.makespan_ns * 3 / 4, "{found:?} for {}", whole.makespan_ns);
            }
            if work > 0 {
                let again = balance_context(&problem, Some(&whole.ranks), &mut Budget::work(work)).unwrap();
                assert_eq!(found, again);
            }
        }
    }
}

/// Few long samples among many short ones, with budgets from none to large: no fixed degree is much shorter.
#[test]
fn no_fixed_degree_is_shorter() {
    let mut worst = 1.0_f64;
    for seed in 0..12 {
        let mut random = SplitMix64::new(seed);
        let (ranks, slots, count) = (8, 8, 64);
        let mut item = |_| {
            let length = 1.0 / (0.01 + random.below(1000) as f64 / 1000.0);
            let ns = (length * 400.0 + length * length * 30.0) as u64;
            let slice =
                |log: u32| ContextSlice { ns: (ns >> log) + 20 * u64::from(log), ..Default::default() };
            ContextItem { media_ns: Vec::new(), slices: (0..=3).map(slice).collect() }
        };
        let items: Vec<ContextItem> = (0..count).map(&mut item).collect();
        let times = items.iter().map(|item| item.slices[0].ns).collect();
        let instance = Instance::new(ranks * slots, 1, times).unwrap();
        let config = PipelineConfig::new(ranks, vec![4]);
        for work in [10, 400, 4_000] {
            let mut budget = Budget::work(work);
            let whole = balance_pipeline(&instance, &config, Strategy::SEARCH, &Caps::default(), &mut budget)
                .unwrap();
            let solve = |groups: [usize; 2], whole: Option<&[Vec<Vec<u32>>]>, work: u64| {
                let problem = ContextProblem::new([ranks, slots], 0, items.clone()).unwrap();
                let problem = problem.pipeline(&config).unwrap().group_ranks(groups).unwrap();
                balance_context(&problem, whole, &mut Budget::work(work)).unwrap().makespan_ns
            };
            let split = solve([1, 8], Some(&whole.ranks), work);
            for degree in [2, 4, 8] {
                let fixed = solve([degree; 2], None, work / 2);
                worst = worst.max(split as f64 / fixed as f64);
            }
        }
    }
    assert!(worst <= 1.005, "{worst}");
}

#[test]
fn pipelines_that_do_not_fit_are_refused() {
    let item = ContextItem { media_ns: vec![vec![1]], slices: vec![ContextSlice::default(); 2] };
    let problem = || ContextProblem::new([4, 2], 1, vec![item.clone(); 8]).unwrap();
    let config = |dp_size: usize, stages: &[usize]| PipelineConfig::new(dp_size, stages.to_vec());
    let shared = config(4, &[1, 2]).module_dp_sizes(vec![2, 4]);
    for (config, name) in
        [(config(3, &[1, 2]), "dp_size"), (config(4, &[2]), "stages"), (shared, "module_dp_sizes")]
    {
        let error = problem().pipeline(&config).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    let meeting = problem().shard_ranks(NonZeroUsize::new(4).unwrap()).unwrap();
    assert!(meeting.pipeline(&config(4, &[1, 2])).is_err());
    assert!(problem().pipeline(&config(4, &[1, 2])).is_ok());
    assert!(context_pipeline_ns(&[vec![vec![1]]], &[], &config(1, &[1, 1])).is_err());
}
