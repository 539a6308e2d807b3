//! Items that ranks share: placements against all placements of small problems, bounds, caps, determinism.

use dflop_balancer::{
    Budget, Caps, ContextAssignment, ContextItem, ContextProblem, ContextSlice, Error, balance_context,
    balance_lockstep, context_step_ns,
};
use dflop_balancer::{Instance, Strategy, balance};
use dflop_costmodel::random::SplitMix64;
use dflop_costmodel::{MessageLatency, MicrobatchConstants, ModelConstants};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;

/// Slot, first rank and number of ranks of an item, and the rank of every medium.
pub(crate) type Place = (usize, usize, usize, Vec<Vec<usize>>);

pub(crate) const WORK: u64 = 20_000;
/// Longest placement found over the shortest of all, on small problems.
const RATIO_MAX: f64 = 1.01;

/// Problem with the settings that the placements here are checked against.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) ranks: usize,
    pub(crate) slots: usize,
    pub(crate) encoders: usize,
    pub(crate) shard_ranks: usize,
    pub(crate) group_max: usize,
    pub(crate) items: Vec<ContextItem>,
    pub(crate) caps: Caps,
    pub(crate) latencies: Vec<MessageLatency>,
}

impl Case {
    pub(crate) fn problem(&self) -> ContextProblem {
        ContextProblem::new([self.ranks, self.slots], self.encoders, self.items.clone())
            .unwrap()
            .shard_ranks(NonZeroUsize::new(self.shard_ranks).unwrap())
            .unwrap()
            .group_ranks([1, self.group_max])
            .unwrap()
            .caps(self.caps)
            .latencies(self.latencies.clone())
            .unwrap()
    }

    fn solve(&self) -> ContextAssignment {
        balance_context(&self.problem(), None, &mut Budget::work(WORK)).unwrap()
    }

    /// Computes the times of every slot, rank and module from their definition.
    ///
    /// - `places`: slot, first rank and number of ranks of every item, and the rank of every medium
    pub(crate) fn loads(&self, places: &[Place]) -> Vec<Vec<Vec<u64>>> {
        let modules = self.encoders + 1;
        let mut loads = vec![vec![vec![0_u64; modules]; self.ranks]; self.slots];
        let mut groups: BTreeMap<(usize, usize, usize), i64> = BTreeMap::new();
        for (item, (slot, first, size, _)) in self.items.iter().zip(places) {
            let message_ns = item.slices[size.ilog2() as usize].message_ns;
            *groups.entry((*slot, *first, *size)).or_default() += message_ns;
        }
        for ((slot, first, size), message_ns) in groups {
            let latency = self.latencies.get(size.ilog2() as usize).copied().unwrap_or_default();
            let wait_ns = latency.exposed_ns + (latency.hidden_ns as i64 + message_ns).max(0) as u64;
            for loads in loads[slot][first..first + size].iter_mut().filter(|_| size > 1) {
                loads[modules - 1] += wait_ns;
            }
        }
        for (item, (slot, first, size, media)) in self.items.iter().zip(places) {
            for loads in &mut loads[*slot][*first..first + size] {
                loads[modules - 1] += item.slices[size.ilog2() as usize].ns;
            }
            for (encoder, ranks) in media.iter().enumerate() {
                for (medium, rank) in ranks.iter().enumerate() {
                    assert!((*first..first + size).contains(rank), "a medium outside of its group");
                    loads[*slot][*rank][encoder] += item.media_ns[encoder][medium];
                }
            }
        }
        loads
    }

    /// Finds a leader for every rank in a slot: ranks that share an item have the same, by joining all ranks
    /// of the item.
    pub(crate) fn leaders(&self, places: &[Place], slot: usize) -> Vec<usize> {
        let mut leader: Vec<usize> = (0..self.ranks).collect();
        for (own, first, size, _) in places {
            if *own == slot {
                let joined: Vec<usize> = leader[*first..first + size].to_vec();
                let least = *joined.iter().min().unwrap();
                for rank in &mut leader {
                    *rank = if joined.contains(rank) { least } else { *rank };
                }
            }
        }
        leader
    }

    /// Computes the step time of a placement from its definition.
    fn step_ns(&self, places: &[Place]) -> u64 {
        let (modules, loads) = (self.encoders + 1, self.loads(places));
        if self.shard_ranks > 1 {
            let shard = |shard: usize| -> u64 {
                let ranks = shard * self.shard_ranks..(shard + 1) * self.shard_ranks;
                let slot = |loads: &Vec<Vec<u64>>| -> u64 {
                    let slowest =
                        |module: usize| ranks.clone().map(|rank| loads[rank][module]).max().unwrap();
                    (0..modules).map(slowest).sum()
                };
                loads.iter().map(slot).sum()
            };
            return (0..self.ranks / self.shard_ranks).map(shard).max().unwrap();
        }
        let mut done = vec![0; self.ranks];
        for (slot, loads) in loads.iter().enumerate() {
            let leader = self.leaders(places, slot);
            for first in 0..self.ranks {
                let group: Vec<usize> = (0..self.ranks).filter(|rank| leader[*rank] == first).collect();
                let start = group.iter().map(|rank| done[*rank]).max().unwrap_or(0);
                let longest = group.iter().map(|rank| loads[*rank].iter().sum::<u64>()).max().unwrap_or(0);
                for rank in group {
                    done[rank] = start + longest;
                }
            }
        }
        done.into_iter().max().unwrap()
    }

    /// Tries every group, slot, number of ranks and rank of media; items have a medium per encoder at most.
    pub(crate) fn shortest_ns(&self, step_ns: impl Fn(&[Place]) -> u64) -> u64 {
        let mut choices: Vec<Vec<Place>> = Vec::new();
        for item in &self.items {
            let mut own = Vec::new();
            for slot in 0..self.slots {
                for size in [1, 2, 4].into_iter().filter(|size| *size <= self.group_max) {
                    for first in (0..self.ranks).step_by(size) {
                        let media = item.media_ns.iter().map(Vec::len).sum::<usize>();
                        assert!(media <= 1, "one medium");
                        for rank in first..first + if media == 0 { 1 } else { size } {
                            let ranks = item.media_ns.iter().map(|media| vec![rank; media.len()]).collect();
                            own.push((slot, first, size, ranks));
                        }
                    }
                }
            }
            choices.push(own);
        }
        let fills = self.items.len() >= self.ranks * self.slots;
        let mut at = vec![0; self.items.len()];
        let mut best = u64::MAX;
        loop {
            let places: Vec<_> = at.iter().zip(&choices).map(|(at, own)| own[*at].clone()).collect();
            if !fills || self.is_full(&places) {
                best = best.min(step_ns(&places));
            }
            let Some(next) = at.iter().zip(&choices).position(|(at, own)| at + 1 < own.len()) else { break };
            at[..next].fill(0);
            at[next] += 1;
        }
        best
    }

    /// Whether every rank has an item in every slot.
    fn is_full(&self, places: &[(usize, usize, usize, Vec<Vec<usize>>)]) -> bool {
        let has = |slot: usize, rank: usize| {
            places.iter().any(|(own, first, size, _)| *own == slot && (*first..first + size).contains(&rank))
        };
        (0..self.slots).all(|slot| (0..self.ranks).all(|rank| has(slot, rank)))
    }
}

pub(crate) fn places(found: &ContextAssignment) -> Vec<Place> {
    let place = |place: &dflop_balancer::ContextPlace| {
        (place.slot, place.ranks.start, place.ranks.len(), place.media.clone())
    };
    found.places.iter().map(place).collect()
}

/// Draws items whose slices take some percent more than their share.
pub(crate) fn items(random: &mut SplitMix64, count: usize, logs: u32, media: usize) -> Vec<ContextItem> {
    let mut item = || {
        // Few long items, as in real data.
        let ns = if random.below(3) == 0 { 500 + random.below(1500) } else { 50 + random.below(400) } as u64;
        let extra = random.below(12) as u64;
        let slice = |log: u32| {
            let ns = (ns * (100 + extra * u64::from(log))).div_ceil(100 << log);
            // Short slices hide few messages.
            let message_ns = 60 - (ns / 4) as i64;
            ContextSlice { ns, message_ns, tokens: (ns / 4).max(1), bytes: 0 }
        };
        let media_ns = (0..media).map(|_| vec![20 + random.below(300) as u64]).collect();
        ContextItem { media_ns, slices: (0..=logs).map(slice).collect() }
    };
    (0..count).map(|_| item()).collect()
}

pub(crate) fn latencies(is_slow: bool) -> Vec<MessageLatency> {
    let latency = |log: u64| MessageLatency { exposed_ns: 3 * log, hidden_ns: 40 * log };
    if is_slow { (0..4).map(latency).collect() } else { Vec::new() }
}

fn small(seed: u64) -> Case {
    let mut random = SplitMix64::new(seed);
    let [ranks, slots, count, encoders] =
        [[4, 1, 6, 0], [4, 1, 4, 1], [2, 2, 5, 1], [4, 2, 4, 0], [2, 1, 6, 1]][seed as usize % 5];
    let shard_ranks = if (seed / 5).is_multiple_of(3) { 1 } else { ranks };
    let group_max = ranks;
    let items = items(&mut random, count, 2, encoders);
    let latencies = latencies(seed.is_multiple_of(2));
    Case { ranks, slots, encoders, shard_ranks, group_max, items, caps: Caps::default(), latencies }
}

/// Six items on four ranks have 7 placements each, with every group of 1, 2 and 4 ranks.
#[test]
fn small_problems_are_solved() {
    let (mut worst, mut exact) = (1.0_f64, 0);
    for seed in 0..45 {
        let case = small(seed);
        let found = case.solve();
        assert_eq!(case.step_ns(&places(&found)), found.makespan_ns, "seed {seed}");
        let shortest = case.shortest_ns(|places| case.step_ns(places));
        assert!(found.bound.ns <= shortest, "seed {seed}: bound {} above {shortest}", found.bound.ns);
        assert!(found.makespan_ns >= shortest, "seed {seed}: {} below {shortest}", found.makespan_ns);
        worst = worst.max(found.makespan_ns as f64 / shortest as f64);
        exact += usize::from(found.makespan_ns == shortest);
    }
    assert!(worst <= RATIO_MAX, "{worst}");
    assert!(exact >= 43, "{exact} of 45");
}

/// With a whole placement, the result is at least as good, and it is that placement where splits only cost.
#[test]
fn no_result_is_longer_than_the_whole_placement() {
    for seed in 0..12 {
        let mut random = SplitMix64::new(100 + seed);
        let (ranks, slots, count) = (8, 1 + seed as usize % 2, 8 * (2 + seed as usize % 3));
        let mut items = items(&mut random, count, 3, 1);
        if seed % 3 == 0 {
            // Every slice takes as long as the whole item.
            for item in &mut items {
                let whole = item.slices[0];
                item.slices.fill(whole);
            }
        }
        let times = items.iter().flat_map(|item| [item.media_ns[0][0], item.slices[0].ns]).collect();
        let instance = Instance::new(ranks * slots, 2, times).unwrap();
        let whole = balance_lockstep(&instance, ranks, &Caps::default(), &mut Budget::work(WORK)).unwrap();
        let case = Case {
            ranks,
            slots,
            encoders: 1,
            shard_ranks: ranks,
            group_max: 8,
            items,
            caps: Caps::default(),
            latencies: Vec::new(),
        };
        let problem = case.problem();
        for work in [0, 100, WORK] {
            let found = balance_context(&problem, Some(&whole.ranks), &mut Budget::work(work)).unwrap();
            assert!(found.makespan_ns <= whole.makespan_ns, "seed {seed}, work {work}");
            assert!(found.bound.ns <= found.makespan_ns);
            assert_eq!(case.step_ns(&places(&found)), found.makespan_ns);
        }
    }
}

/// One long item among short ones: whole, it is the step; split, the step is near the mean.
#[test]
fn a_long_item_is_split_down_to_the_mean() {
    let slices = |ns: u64| -> Vec<ContextSlice> {
        let slice = |log: u32| ContextSlice {
            ns: (ns >> log) + u64::from(log),
            tokens: 1,
            ..ContextSlice::default()
        };
        (0..=3).map(slice).collect()
    };
    let item = |ns| ContextItem { media_ns: Vec::new(), slices: slices(ns) };
    let items: Vec<ContextItem> =
        std::iter::once(8_000).chain(std::iter::repeat_n(1_000, 24)).map(item).collect();
    for shard_ranks in [1, 16] {
        let case = Case {
            ranks: 16,
            slots: 1,
            encoders: 0,
            shard_ranks,
            group_max: 8,
            items: items.clone(),
            caps: Caps::default(),
            latencies: Vec::new(),
        };
        let found = case.solve();
        assert_eq!(found.bound.ns, 2_000);
        assert!(found.makespan_ns < 2_100, "{}", found.makespan_ns);
        assert!(found.places[0].ranks.len() >= 4);
    }
}

/// A token cap is a reason to split, and every rank keeps it.
#[test]
fn an_item_above_the_cap_is_split() {
    let mut random = SplitMix64::new(9);
    let mut case = small(0);
    case.items = items(&mut random, 12, 2, 0);
    case.shard_ranks = 4;
    for item in &mut case.items {
        // Splitting never shortens anything.
        let ns = item.slices[0].ns;
        item.slices.iter_mut().for_each(|slice| slice.ns = ns);
    }
    let tokens =
        [4_000, 2_000, 1_000].map(|tokens| ContextSlice { ns: 500, tokens, bytes: 7, message_ns: 0 });
    case.items[5].slices = tokens.to_vec();
    case.caps = Caps { tokens_max: Some(2_200), bytes_max: Some(1_000) };
    let found = case.solve();
    assert_eq!(found.places[5].ranks.len(), 2);
    for rank in 0..4 {
        let held = found.places.iter().zip(&case.items).filter(|(place, _)| place.ranks.contains(&rank));
        let tokens: u64 =
            held.map(|(place, item)| item.slices[place.ranks.len().ilog2() as usize].tokens).sum();
        assert!(tokens <= 2_200, "{tokens}");
    }
    case.caps.tokens_max = Some(900);
    let refused = balance_context(&case.problem(), None, &mut Budget::work(WORK)).unwrap_err();
    assert!(
        matches!(refused, Error::CapItem { item: 5, unit: "tokens", value: 1_000, max: 900 }),
        "{refused}"
    );
    case.caps.tokens_max = Some(1_001);
    let refused = balance_context(&case.problem(), None, &mut Budget::work(WORK)).unwrap_err();
    assert!(matches!(refused, Error::CapUnmet { .. }), "{refused}");
}

#[test]
fn equal_problems_have_equal_results() {
    let mut random = SplitMix64::new(4);
    for shard_ranks in [1, 8, 16] {
        let items = items(&mut random, 40, 3, 2);
        let case = Case {
            ranks: 16,
            slots: 2,
            encoders: 2,
            shard_ranks,
            group_max: 8,
            items,
            caps: Caps::default(),
            latencies: Vec::new(),
        };
        let found = case.solve();
        assert_eq!(found, case.solve());
        assert_eq!(case.step_ns(&places(&found)), found.makespan_ns);
        assert!(found.is_reproducible && found.work_spent <= WORK + 600);
        // Groups are aligned, and inside of shard groups.
        for place in &found.places {
            assert!(place.ranks.start.is_multiple_of(place.ranks.len()));
            assert!(
                shard_ranks == 1 || place.ranks.start / shard_ranks == (place.ranks.end - 1) / shard_ranks
            );
        }
        assert!(case.is_full(&places(&found)));
    }
}

/// All groups have one size if the smallest is the largest.
#[test]
fn a_fixed_degree_splits_every_item() {
    let mut random = SplitMix64::new(5);
    let items = items(&mut random, 24, 2, 1);
    let ranks = NonZeroUsize::new(8).unwrap();
    let problem = ContextProblem::new([8, 1], 1, items).unwrap().shard_ranks(ranks).unwrap();
    let problem = problem.group_ranks([4, 4]).unwrap();
    let found = balance_context(&problem, None, &mut Budget::work(WORK)).unwrap();
    assert!(found.places.iter().all(|place| place.ranks.len() == 4));
    assert!(found.bound.ns <= found.makespan_ns);
}

#[test]
fn microbatch_constants_count_once_per_microbatch() {
    let slices = vec![ContextSlice { ns: 100, tokens: 1, ..ContextSlice::default() }; 1];
    let items = vec![ContextItem { media_ns: vec![vec![10]], slices }; 4];
    let module = |base_ns| MicrobatchConstants { floor_ns: 0, base_ns };
    let apart = ModelConstants { modules: vec![module(5), module(7)], whole: None };
    let whole =
        ModelConstants { modules: vec![], whole: Some(MicrobatchConstants { floor_ns: 300, base_ns: 1 }) };
    for (constants, expected) in [(apart, 2 * 10 + 5 + 2 * 100 + 7), (whole, 300)] {
        for shard_ranks in [1, 2] {
            let ranks = NonZeroUsize::new(shard_ranks).unwrap();
            let problem = ContextProblem::new([2, 1], 1, items.clone()).unwrap().shard_ranks(ranks).unwrap();
            let problem = problem.constants(constants.clone());
            let found = balance_context(&problem, None, &mut Budget::work(WORK)).unwrap();
            assert_eq!(found.makespan_ns, expected);
        }
    }
}

#[test]
fn invalid_problems_are_refused() {
    let item = ContextItem { media_ns: vec![vec![1]], slices: vec![ContextSlice::default(); 2] };
    let problem = || ContextProblem::new([8, 1], 1, vec![item.clone(); 8]).unwrap();
    assert!(ContextProblem::new([0, 1], 1, vec![]).is_err());
    assert!(ContextProblem::new([1, 0], 1, vec![]).is_err());
    assert!(ContextProblem::new([1, 1], 2, vec![item.clone()]).is_err());
    assert!(ContextProblem::new([1, 1], 0, vec![ContextItem::default()]).is_err());
    let long = ContextSlice { ns: u64::MAX, ..ContextSlice::default() };
    let long = ContextItem { media_ns: Vec::new(), slices: vec![long] };
    assert!(matches!(ContextProblem::new([1, 1], 0, vec![long]), Err(Error::Overflow { item: 0, .. })));
    assert!(problem().shard_ranks(NonZeroUsize::new(3).unwrap()).is_err());
    for sizes in [[3, 4], [4, 2], [0, 2], [1, 128], [16, 16], [4, 4]] {
        assert!(problem().group_ranks(sizes).is_err(), "{sizes:?}");
    }
    assert!(problem().group_ranks([2, 8]).is_ok());
    let whole = vec![vec![vec![0]]; 8];
    let refused = balance_context(&problem(), Some(&whole), &mut Budget::work(1)).unwrap_err();
    assert!(refused.to_string().contains("each of 8 items once"), "{refused}");
    let refused = balance_context(&problem(), Some(&whole[..7]), &mut Budget::work(1)).unwrap_err();
    assert!(refused.to_string().contains("8 ranks"), "{refused}");
}

/// Whole placements of DDP ranks are as short as the sums of the plain partition.
#[test]
fn ranks_that_meet_at_the_end_take_sums() {
    let mut random = SplitMix64::new(6);
    let items = items(&mut random, 24, 0, 0);
    let times = items.iter().map(|item| item.slices[0].ns).collect();
    let instance = Instance::new(8, 1, times).unwrap();
    let plain = balance(&instance, Strategy::SEARCH, &Caps::default(), &mut Budget::work(WORK)).unwrap();
    let whole: Vec<Vec<Vec<u32>>> = plain.groups.iter().map(|group| vec![group.clone()]).collect();
    let problem = ContextProblem::new([8, 1], 0, items).unwrap();
    let found = balance_context(&problem, Some(&whole), &mut Budget::work(0)).unwrap();
    assert!(found.makespan_ns <= plain.makespan_ns);
}

/// Ranks 0 and 1 begin the second slot together, when the slower is done with the first.
#[test]
fn ranks_that_share_an_item_wait_for_each_other() {
    let ranks_ns = [vec![vec![5], vec![2]], vec![vec![1], vec![3]], vec![vec![4], vec![4]]];
    let step = |meetings: &[Vec<std::ops::Range<usize>>], shard: usize| {
        context_step_ns(&ranks_ns, meetings, NonZeroUsize::new(shard).unwrap())
    };
    assert_eq!(step(&[], 1), 8);
    assert_eq!(step(&[vec![], vec![0..2]], 1), 8);
    assert_eq!(step(&[vec![0..2], vec![1..3, 0..3]], 1), 9);
    assert_eq!(step(&[], 3), 9);
}

/// Items on the same ranks wait once for latencies, and long items hide the messages of short ones.
#[test]
fn messages_of_a_group_go_together() {
    let item = |message_ns| {
        let slice = |ns| ContextSlice { ns, message_ns, tokens: 1, bytes: 0 };
        ContextItem { media_ns: vec![], slices: vec![slice(300), slice(100)] }
    };
    let latency = |exposed_ns, hidden_ns| MessageLatency { exposed_ns, hidden_ns };
    let step = |messages: &[i64], latencies: [MessageLatency; 2]| {
        let items = messages.iter().map(|message_ns| item(*message_ns)).collect();
        let ranks = NonZeroUsize::new(2).unwrap();
        let problem = ContextProblem::new([2, 1], 0, items).unwrap().shard_ranks(ranks).unwrap();
        let problem = problem.group_ranks([2, 2]).unwrap().latencies(latencies.to_vec()).unwrap();
        let found = balance_context(&problem, None, &mut Budget::work(100)).unwrap();
        assert_eq!(found.bound.ns, 100 * messages.len() as u64);
        found.makespan_ns
    };
    let none = MessageLatency::default();
    assert_eq!(step(&[30, 30], [none, latency(7, 20)]), 200 + 7 + 20 + 60);
    assert_eq!(step(&[30, -40], [none, latency(7, 20)]), 200 + 7 + 10);
    assert_eq!(step(&[-30, -40], [none, latency(7, 20)]), 200 + 7);
    assert_eq!(step(&[-30, -40], [latency(900, 900), none]), 200);
    let problem = ContextProblem::new([2, 1], 0, vec![item(0)]).unwrap();
    assert!(problem.latencies(vec![latency(u64::MAX, 0)]).is_err());
}

/// Without a budget, no start is longer than one number of ranks for all items, whether or not media divide.
#[test]
fn starts_need_no_budget() {
    for seed in 0..40 {
        let mut random = SplitMix64::new(300 + seed);
        let shard_ranks = if seed % 4 < 2 { 16 } else { 1 };
        let items = items(&mut random, 16 * (1 + seed as usize % 4), 3, (seed as usize / 4) % 2);
        let encoders = items[0].media_ns.len();
        let problem = |[least, most]: [usize; 2]| {
            let problem = ContextProblem::new([16, 1], encoders, items.clone()).unwrap();
            let problem = problem.shard_ranks(NonZeroUsize::new(shard_ranks).unwrap()).unwrap();
            let problem = problem.latencies(latencies(seed % 2 == 0)).unwrap();
            problem.group_ranks([least, most]).unwrap()
        };
        let solve = |ranks, work| balance_context(&problem(ranks), None, &mut Budget::work(work)).unwrap();
        let found = solve([1, 8], 0);
        assert_eq!(found.work_spent, 0);
        for ranks in [1, 2, 4, 8] {
            let alike = solve([ranks; 2], 0).makespan_ns;
            assert!(found.makespan_ns <= alike, "seed {seed}: {} {alike}", found.makespan_ns);
        }
        let searched = solve([1, 8], WORK).makespan_ns;
        let ratio = found.makespan_ns as f64 / searched as f64;
        assert!((1.0..1.25).contains(&ratio), "seed {seed}: {ratio}");
    }
}
