//! A pipeline whose work is a fluid: what no cut into microbatches can beat, and the cut that comes near.
//!
//! Every path through the passes of a step is a lower bound of its makespan, so is every mean of paths.
//! Let a mean of paths take, of each microbatch `j`, at least the share `u_c` of its time in one stage of
//! module `c`, whichever `j`. Then a rank takes at least `sum of u_c * (its load in c)`, however the load is
//! cut into microbatches, and the slowest rank at least that of the mean loads.
//!
//! Which mean of paths is best is a game: one side cuts the mean loads into microbatches, the other
//! answers with the longest path. Regret matching makes the cuts better, and the paths answered, weighted
//! by round, are the mean. It is a bound whatever the rounds were; more of them make it tighter. Shares are
//! floating-point numbers, added, multiplied and divided in a fixed order: all machines choose the same
//! paths. The bound itself is worked out from their counts, in integers.
//!
//! # Source
//! Regret matching with positive regrets and linear weights: Tammelin et al., "Solving heads-up limit Texas
//! hold'em", IJCAI 2015.

use super::config::PipelineConfig;
use super::timeline::Timeline;
use crate::error::Result;
use crate::instance::Instance;
use crate::simulate::split_time;

/// Rounds at least, however many passes they take.
const ROUNDS_MIN: u64 = 16;

/// One module's side of the game.
struct Cut {
    module: usize,
    modules: usize,
    /// Mean time of a stage.
    load_ns: u64,
    /// Mean time of the items of a pipeline: the same, if the module has the pipelines' DP size.
    items_ns: u64,
    /// `[microbatches]`: how much better each would have done with all the load, if better.
    regrets: Vec<f64>,
    /// `[microbatches]`, the shares of the load, in proportion to that.
    shares: Vec<f64>,
    /// The sums of these, weighted by round.
    share_sums: Vec<f64>,
    /// `[microbatches]`, thirds of a stage's time that the paths took, weighted.
    taken: Vec<u64>,
}

/// What the game ends with.
pub(crate) struct Relaxation {
    /// What no cut can beat, nanoseconds.
    pub(crate) bound_ns: u64,
    /// `[microbatches * modules]`, the mean of one side's cuts: what the items of a rank's microbatches
    /// should add up to, nanoseconds.
    pub(crate) profile_ns: Vec<u64>,
}

impl Relaxation {
    /// Plays rounds that walk over `passes_max` passes together, about; `config` fits the instance.
    pub(crate) fn new(instance: &Instance, config: &PipelineConfig, passes_max: u64) -> Result<Self> {
        let (modules, microbatches) = (instance.modules(), instance.groups() / config.dp_size);
        let timeline = Timeline::new(&config.rows(), modules, microbatches)?;
        let mut rank = timeline.rank(2 * modules * microbatches);
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
        let sum: u128 = cuts.iter().map(|cut| u128::from(cut.load_ns) * u128::from(cut.least_taken())).sum();
        // A forward pass takes a third, rounded down: up to two thirds of a nanosecond less.
        let sum = sum.saturating_sub(2 * u128::from(forward));
        let cells = (0..microbatches).flat_map(|at| cuts.iter().map(move |cut| cut.items_ns(at, weights)));
        Ok(Self { bound_ns: (sum / (3 * u128::from(weights))) as u64, profile_ns: cells.collect() })
    }
}

impl Cut {
    /// Begins with even microbatches.
    fn new(instance: &Instance, config: &PipelineConfig, module: usize) -> Self {
        let microbatches = instance.groups() / config.dp_size;
        let total_ns: u64 = instance.module_ns(module).sum();
        Self {
            module,
            modules: instance.modules(),
            load_ns: total_ns / config.module_dp_size(module) as u64,
            items_ns: total_ns / config.dp_size as u64,
            regrets: vec![0.0; microbatches],
            shares: vec![1.0 / microbatches as f64; microbatches],
            share_sums: vec![0.0; microbatches],
            taken: vec![0; microbatches],
        }
    }

    /// The cell of a microbatch's forward pass; that of the backward pass follows.
    fn cell(&self, microbatch: usize) -> usize {
        2 * (microbatch * self.modules + self.module)
    }

    /// Writes the times of every microbatch.
    fn write(&self, times_ns: &mut [u64]) {
        for (microbatch, share) in self.shares.iter().enumerate() {
            let (forward_ns, backward_ns) = split_time((share * self.load_ns as f64) as u64);
            let cell = self.cell(microbatch);
            (times_ns[cell], times_ns[cell + 1]) = (forward_ns, backward_ns);
        }
    }

    /// Learns from a path, given as counts by cell; returns the forward passes on it.
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

    /// What the items of a microbatch took, in the mean of all rounds so far.
    fn items_ns(&self, microbatch: usize, weights: u64) -> u64 {
        (self.share_sums[microbatch] / weights as f64 * self.items_ns as f64) as u64
    }

    /// The least that the paths took of any microbatch.
    fn least_taken(&self) -> u64 {
        self.taken.iter().copied().min().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(stages: &[usize], microbatches: usize, row: [u64; 2]) -> u64 {
        let times_ns = (0..microbatches).flat_map(|_| row).collect();
        let instance = Instance::new(microbatches, 2, times_ns).unwrap();
        Relaxation::new(&instance, &PipelineConfig::new(1, stages.to_vec()), 1 << 18).unwrap().bound_ns
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
        // A linear program, solved apart, says 1.2162 of the mean load.
        let found = bound(&[2, 6], 16, [30_000, 30_000]);
        assert!((576_000..=583_800).contains(&found), "{found}");
    }
}
