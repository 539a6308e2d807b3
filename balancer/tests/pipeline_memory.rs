//! Pipeline assignments keep the limits of memory, on random instances.

mod step_passes;

use dflop_balancer::{
    Budget, Caps, Instance, PipelineConfig, PipelineMemoryLimits, PipelineObjective, StageMemoryLimit,
    Strategy, balance_pipeline,
};
use proptest::prelude::*;
use step_passes::simulated;

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

/// Draws an instance of two modules with limits that some assignment keeps; `slack` more percent are allowed.
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

/// Finds the least makespan of the assignments without empty microbatches that keep the limits.
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
fn measure() {
    let work: u64 = std::env::var("WORK").map_or(2_000, |w| w.parse().unwrap());
    let count: u64 = std::env::var("CASES").map_or(200, |w| w.parse().unwrap());
    for slack in [0, 5, 20] {
        let (mut unfit, mut far, mut bound) = (0, 0, 0);
        let mut worst = 0.0_f64;
        for seed in 0..count {
            let (instance, config) = case(seed * 7919 + 3, 5 + (seed % 3) as usize, slack);
            let best = brute_force(&instance, &config).unwrap();
            let found = balance_pipeline(
                &instance,
                &config,
                Strategy::Search,
                &Caps::default(),
                &mut Budget::work(work),
            )
            .unwrap();
            assert_eq!(found.memory_excess, excess(&config, &found.ranks));
            let mut free = config.clone();
            free.memory = None;
            let free = balance_pipeline(
                &instance,
                &free,
                Strategy::Search,
                &Caps::default(),
                &mut Budget::work(work),
            )
            .unwrap();
            bound += u64::from(free.makespan_ns < best);
            if found.memory_excess > 0 {
                unfit += 1;
                println!("slack {slack} seed {seed} unfit {}", found.memory_excess);
            } else if found.makespan_ns * 20 > best * 21 {
                far += 1;
                worst = worst.max(found.makespan_ns as f64 / best as f64);
            }
        }
        println!("slack {slack}: {count} cases, {bound} binding, {unfit} unfit, {far} far, worst {worst}");
    }
}

/// Generates a batch of texts and images and limits on four stages; `percent` of what the free answer needs.
fn large(seed: u64, encoder_dp: usize) -> (Instance, PipelineConfig) {
    let mut rng = Rng(seed);
    let (mut times, mut units) = (Vec::new(), Vec::new());
    for _ in 0..512 {
        let tiles = if rng.below(5) == 0 {
            0
        } else if rng.below(4) > 0 {
            1 + rng.below(10)
        } else {
            8 + rng.below(24)
        };
        let text = 60 + rng.below(400);
        let tokens = (text + 200 * tiles) as u64;
        units.extend([tiles as u64, tokens]);
        times.extend([tiles as u64 * 120_000, tokens * 600 + tokens * tokens / 40]);
    }
    let config = PipelineConfig::new(4, vec![1, 3]).module_dp_sizes(vec![encoder_dp, 4]);
    let limit = |stage: usize| {
        let (kept, working) =
            if stage == 0 { (vec![2_000, 0], vec![3_000, 0]) } else { (vec![0, 10], vec![0, 12]) };
        StageMemoryLimit { in_flight: 4 - stage, kept, working, bytes_max: u64::MAX }
    };
    let limits = PipelineMemoryLimits { units, stages: (0..4).map(limit).collect() };
    (Instance::new(64, 2, times).unwrap(), config.memory(limits))
}

#[test]
fn measure_large() {
    for (seed, encoder_dp) in [(1, 4), (2, 4), (3, 2), (4, 8), (5, 4), (6, 3)] {
        let (instance, config) = large(seed, encoder_dp);
        let mut free = config.clone();
        free.memory = None;
        let run = |config: &PipelineConfig, work| {
            let start = std::time::Instant::now();
            let found = balance_pipeline(
                &instance,
                config,
                Strategy::Search,
                &Caps::default(),
                &mut Budget::work(work),
            )
            .unwrap();
            (found, start.elapsed().as_millis())
        };
        for work in [20_000, 200_000] {
            let (best, ms) = run(&free, work);
            let (loose, loose_ms) = run(&config, work);
            println!(
                "seed {seed} dp {encoder_dp} work {work}: free {} gap {:.4} {ms} ms, loose {} {loose_ms} ms",
                best.makespan_ns,
                best.gap(),
                loose.makespan_ns
            );
            let limits = config.memory.as_ref().unwrap();
            for limit in &limits.stages {
                let most = needed(&free, &limits.units, limit, &best.ranks).into_iter().max().unwrap() as f64;
                let total = |module: usize| limits.units.iter().skip(module).step_by(2).sum::<u64>() as f64;
                let mean = |factors: &[u64]| (0..2).map(|m| factors[m] as f64 * total(m) / 64.0).sum::<f64>();
                let w = limit.in_flight as f64;
                if false {
                    print!("")
                } else if limit.in_flight == 3 {
                    println!("   bound {:.3}", (mean(&limit.kept) * w + mean(&limit.working)) / most);
                }
            }
            for percent in [99, 95, 85, 75, 70] {
                let mut config = config.clone();
                let limits = config.memory.as_mut().unwrap();
                let units = limits.units.clone();
                let bare = free.clone();
                for limit in &mut limits.stages {
                    limit.bytes_max =
                        needed(&bare, &units, limit, &best.ranks).into_iter().max().unwrap() * percent / 100;
                }
                let (found, ms) = run(&config, work);
                println!(
                    "  {percent} %: excess {} makespan +{:.4} in {ms} ms work {}",
                    found.memory_excess,
                    found.makespan_ns as f64 / best.makespan_ns as f64 - 1.0,
                    found.work_spent
                );
            }
        }
    }
}
