//! Fluid pipeline relaxation: a lower bound for all cuts into microbatches, a cut close to it, and a start
//! for the search that comes close to the cut.
//!
//! Every path through a step's passes is a lower bound on the makespan, and so is every mean over paths.
//! Suppose a mean over paths takes, from each microbatch `j`, at least the share `u_c` of the microbatch's
//! time in a stage of module `c`, for every `j`. Then a rank takes at least `sum of u_c * (its load in c)`,
//! for any cut into microbatches, and the slowest rank at least the same sum over the mean loads. A
//! microbatch's constant time counts as often as the paths visit its passes.
//!
//! The best mean over paths solves a game: the first player cuts the mean loads into microbatches, the second
//! answers with the longest path. Regret matching improves the cuts, and the answers, weighted by round, are
//! the mean. It is a bound after any number of rounds; more rounds make it tighter. Shares are floating-point
//! numbers, added, multiplied and divided in a fixed order: all machines choose the same paths. The bound
//! itself is computed from path counts, in integers.
//!
//! The start assigns items to slots, the longest processing time first, with targets for each slot: each item
//! goes to the slot with the smallest resulting maximum excess.
//!
//! # Source
//! Regret matching with positive regrets and linear weights: Tammelin et al., "Solving heads-up limit Texas
//! hold'em", IJCAI 2015.

use std::cmp::Reverse;

use super::config::PipelineConfig;
use super::pass_graph::PassShape;
use super::timeline::Timeline;
use crate::budget::Budget;
use crate::instance::Instance;
use crate::partition::{Partition, Problem};
use crate::simulate::split_time;

/// Minimum number of rounds, regardless of passes.
const ROUNDS_MIN: u64 = 16;

/// A module's part in the game.
struct Cut {
    module: usize,
    modules: usize,
    /// Mean load per stage.
    load_ns: u64,
    /// Microbatch time in addition to the load.
    base_ns: u64,
    /// Mean load from a pipeline's items: equal to `load_ns` if the module has the pipelines' DP size.
    items_ns: u64,
    /// Regret for each microbatch for not taking the whole load, at least 0, `[microbatches]`.
    regrets: Vec<f64>,
    /// Load shares, in proportion to the regrets, `[microbatches]`.
    shares: Vec<f64>,
    /// Shares summed over rounds, weighted by round.
    share_sums: Vec<f64>,
    /// Thirds of a stage's time on the paths, weighted by round, `[microbatches]`.
    taken: Vec<u64>,
}

/// Fluid relaxation result: a lower bound and the target profile.
pub(crate) struct Relaxation {
    /// Lower bound on the makespan for any cut, nanoseconds.
    pub(crate) bound_ns: u64,
    /// Target load for every microbatch on a rank, `[microbatches * modules]` nanoseconds: the mean over all
    /// rounds' cuts.
    profile_ns: Vec<u64>,
}

impl Relaxation {
    /// Plays rounds with about `passes_max` passes in total; `config` fits the instance.
    pub(crate) fn new(instance: &Instance, config: &PipelineConfig, passes_max: u64) -> Self {
        let (modules, microbatches) = (instance.modules(), instance.groups() / config.dp_size);
        let (rows, is_shared) = (config.rows(), vec![false; modules]);
        let step = config.step_shape(microbatches);
        let shape = PassShape { step, rows: &rows, is_shared: &is_shared, ranks: 1 };
        let timeline = Timeline::new(shape);
        let mut rank = timeline.times();
        let mut cuts: Vec<Cut> = (0..modules).map(|module| Cut::new(instance, config, module)).collect();
        let (mut weights, mut forward) = (0, 0);
        for round in 1..=(passes_max / timeline.passes()).max(ROUNDS_MIN) {
            for cut in &cuts {
                cut.write(&mut rank.times_ns);
            }
            timeline.find_longest_path(&mut rank);
            for cut in &mut cuts {
                forward += round * cut.learn(&rank.critical, round);
            }
            weights += round;
        }
        let sum: u128 = cuts.iter().map(Cut::taken_ns).sum();
        // A forward pass takes a third, rounded down: up to two thirds of a nanosecond are lost.
        let sum = sum.saturating_sub(2 * u128::from(forward));
        let cells = (0..microbatches).flat_map(|at| cuts.iter().map(move |cut| cut.items_ns(at, weights)));
        Self { bound_ns: (sum / (3 * u128::from(weights))) as u64, profile_ns: cells.collect() }
    }
}

impl Cut {
    /// Starts with even microbatches.
    fn new(instance: &Instance, config: &PipelineConfig, module: usize) -> Self {
        let microbatches = instance.groups() / config.dp_size;
        let total_ns: u64 = instance.module_ns(module).sum();
        Self {
            module,
            modules: instance.modules(),
            load_ns: total_ns / config.module_dp_size(module) as u64,
            base_ns: instance.common_constants(module).base_ns,
            items_ns: total_ns / config.dp_size as u64,
            regrets: vec![0.0; microbatches],
            shares: vec![1.0 / microbatches as f64; microbatches],
            share_sums: vec![0.0; microbatches],
            taken: vec![0; microbatches],
        }
    }

    /// Returns the cell for a microbatch's forward pass; the backward pass is in the next cell.
    fn cell(&self, microbatch: usize) -> usize {
        2 * (microbatch * self.modules + self.module)
    }

    /// Writes all microbatch times.
    fn write(&self, times_ns: &mut [u64]) {
        for (microbatch, share) in self.shares.iter().enumerate() {
            let (forward_ns, backward_ns) = split_time(self.base_ns + (share * self.load_ns as f64) as u64);
            let cell = self.cell(microbatch);
            (times_ns[cell], times_ns[cell + 1]) = (forward_ns, backward_ns);
        }
    }

    /// Updates the regrets from a path, given as counts by cell; returns the forward passes on it.
    fn learn(&mut self, path: &[u32], round: u64) -> u64 {
        let passes = |microbatch: usize| {
            let cell = self.cell(microbatch);
            (u64::from(path[cell]), u64::from(path[cell + 1]))
        };
        let (mut mean, mut forward_passes) = (0.0, 0);
        for (microbatch, share) in self.shares.iter().enumerate() {
            let (forward, backward) = passes(microbatch);
            mean += share * (forward + 2 * backward) as f64;
            forward_passes += forward;
        }
        for microbatch in 0..self.shares.len() {
            let cell = self.cell(microbatch);
            let thirds = u64::from(path[cell]) + 2 * u64::from(path[cell + 1]);
            let regret = &mut self.regrets[microbatch];
            // Regrets never fall below 0, so a cut recovers from a bad past in a single round.
            *regret = (*regret + mean - thirds as f64).max(0.0);
            self.taken[microbatch] += round * thirds;
            self.share_sums[microbatch] += round as f64 * self.shares[microbatch];
        }
        let sum: f64 = self.regrets.iter().sum();
        if sum > 0.0 {
            for (share, regret) in self.shares.iter_mut().zip(&self.regrets) {
                *share = regret / sum;
            }
        }
        forward_passes
    }

    /// Returns a microbatch's target load, the mean over all rounds.
    fn items_ns(&self, microbatch: usize, weights: u64) -> u64 {
        (self.share_sums[microbatch] / weights as f64 * self.items_ns as f64) as u64
    }

    /// Returns the minimum path time over all cuts: thirds of nanoseconds, weighted by round.
    fn taken_ns(&self) -> u128 {
        let least = self.taken.iter().copied().min().unwrap_or(0);
        let all: u128 = self.taken.iter().map(|taken| u128::from(*taken)).sum();
        u128::from(self.load_ns) * u128::from(least) + u128::from(self.base_ns) * all
    }
}

/// Fills the slots on all ranks, rank by rank; `None` if that would take most of the budget, if a cap forbids
/// it or if there are too few items.
pub(crate) fn assign(
    problem: &Problem<'_>,
    relaxation: &Relaxation,
    budget: &mut Budget,
) -> Option<Partition> {
    let steps = problem.items as u64 * problem.groups as u64;
    if steps > budget.steps_left() / 8 * 7 || problem.items < problem.groups {
        return None;
    }
    budget.spend(steps);
    let mut order: Vec<u32> = (0..problem.items as u32).collect();
    order.sort_by_key(|&item| Reverse(problem.value(problem.row(item))));
    let mut slots = Partition::empty(problem);
    for item in order {
        let with_room = (0..problem.groups).filter(|&slot| slots.has_room(problem, slot, item));
        let slot = with_room.min_by_key(|&slot| excess(problem, relaxation, &slots, slot, item))?;
        slots.add(problem, slot, item);
    }
    fill_empty(problem, &mut slots);
    Some(slots)
}

/// Returns a slot's excess over the targets with an item added, in the worst module.
fn excess(problem: &Problem<'_>, relaxation: &Relaxation, slots: &Partition, slot: usize, item: u32) -> i64 {
    let modules = problem.modules;
    let start = slot * modules % relaxation.profile_ns.len();
    let loads = slots.load(problem, slot)[..modules].iter().zip(problem.row(item));
    let excesses = loads.zip(&relaxation.profile_ns[start..start + modules]);
    excesses.map(|((load, time), target)| (load + time) as i64 - *target as i64).max().unwrap_or(0)
}

/// Moves the shortest item from the slot with the most items to every empty slot.
fn fill_empty(problem: &Problem<'_>, slots: &mut Partition) {
    for empty in 0..problem.groups {
        if !slots.groups[empty].is_empty() {
            continue;
        }
        let Some(fullest) = (0..problem.groups).min_by_key(|&slot| Reverse(slots.groups[slot].len())) else {
            return;
        };
        let items = &slots.groups[fullest];
        let value = |&position: &usize| problem.value(problem.row(items[position]));
        let Some(position) = (0..items.len()).min_by_key(value) else { return };
        let item = slots.take(problem, fullest, position);
        slots.add(problem, empty, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caps, Instance};

    fn bound(stages: &[usize], microbatches: usize, row: [u64; 2]) -> u64 {
        let times_ns = (0..microbatches).flat_map(|_| row).collect();
        let instance = Instance::new(microbatches, 2, times_ns).unwrap();
        Relaxation::new(&instance, &PipelineConfig::new(1, stages.to_vec()), 1 << 18).bound_ns
    }

    #[test]
    fn one_microbatch_passes_every_stage() {
        let path = 2 * 300 + 3 * 600;
        assert!((path - 5..=path).contains(&bound(&[2, 3], 1, [300, 600])));
    }

    #[test]
    fn many_microbatches_take_little_more_than_the_slowest_stage() {
        let total = 200 * 3_000;
        let found = bound(&[1, 1], 200, [3_000, 300]);
        assert!((total * 99 / 100..=total).contains(&found), "{found}");
    }

    #[test]
    fn equal_modules_on_many_stages_cannot_hide_filling_and_draining() {
        // A linear program, solved separately, gives 1.2162 of the mean load.
        let found = bound(&[2, 6], 16, [30_000, 30_000]);
        assert!((576_000..=583_800).contains(&found), "{found}");
    }

    fn assigned(instance: &Instance, caps: Caps, profile_ns: &[u64]) -> Option<Vec<Vec<u32>>> {
        let problem = Problem::new(instance, &caps).unwrap();
        let relaxation = Relaxation { bound_ns: 0, profile_ns: profile_ns.to_vec() };
        Some(assign(&problem, &relaxation, &mut Budget::work(100))?.into_groups())
    }

    #[test]
    fn slots_of_every_rank_follow_the_profile() {
        let instance = Instance::new(4, 1, vec![10, 10, 30, 30]).unwrap();
        assert_eq!(assigned(&instance, Caps::default(), &[10, 30]).unwrap(), [[0], [2], [1], [3]]);
    }

    #[test]
    fn no_slot_stays_empty() {
        let instance = Instance::new(2, 1, vec![4, 5, 6]).unwrap();
        assert_eq!(assigned(&instance, Caps::default(), &[0, 100]).unwrap(), [vec![0], vec![1, 2]]);
    }

    #[test]
    fn a_cap_is_kept_or_nothing_is_assigned() {
        let instance = Instance::new(2, 1, vec![4, 5, 6, 7]).unwrap().tokens(vec![2, 2, 3, 3]).unwrap();
        let caps = |max| Caps { tokens_max: Some(max), bytes_max: None };
        assert_eq!(assigned(&instance, caps(6), &[0, 100]).unwrap(), [[0, 1], [2, 3]]);
        assert_eq!(assigned(&instance, caps(5), &[0, 100]).unwrap(), [[0, 2], [1, 3]]);
        let three = Instance::new(2, 1, vec![4, 5, 6]).unwrap().tokens(vec![2, 2, 2]).unwrap();
        assert_eq!(assigned(&three, caps(3), &[0, 100]), None);
    }
}
