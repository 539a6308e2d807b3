//! Searches the space: a sweep by estimates, then simulations for the promising plans.

mod halving;
pub(super) mod sweep;

use super::score::ScoredPlan;
use super::space::SearchSpace;
use dflop_balancer::Result;
use halving::Halving;

/// Maximum number of plans simulated in the first halving round.
const SWEEP_MAX: usize = 128;
/// Samples per GPU that the first round may simulate; large batches start with fewer plans.
const SWEEP_UNITS: u64 = 512;
/// Maximum number of samples, over all batches and plans, for which every plan is simulated.
const ALL_UNITS: u64 = 2_000_000;

/// Memory slack for microbatches above the mean, tried in sequence.
const SLACKS: [f64; 4] = [1.0, 1.15, 1.35, 1.7];

/// Search outcome.
pub(super) struct Search {
    pub(super) finals: Vec<ScoredPlan>,
    pub(super) bounded: u64,
    pub(super) simulated: u64,
    pub(super) is_exhaustive: bool,
    /// Whether most promising plans do not fit into memory.
    pub(super) is_tight: bool,
}

impl Search {
    /// Sweeps and halves; repeats with more memory slack while most plans turn out not to fit.
    pub(super) fn run(space: &SearchSpace<'_>) -> Result<Self> {
        let items = u64::from(space.workload.global_batch());
        let batches = space.workload.batches().len() as u64;
        let gpus = u64::from(space.cluster.gpus.max(64));
        let length = (SWEEP_UNITS * gpus / items).clamp(16, SWEEP_MAX as u64) as usize;
        let mut halving = Halving::new(space);
        let mut search =
            Self { finals: Vec::new(), bounded: 0, simulated: 0, is_exhaustive: false, is_tight: true };
        for slack in SLACKS {
            let with_slack = space.with_slack(slack);
            let swept = sweep::sweep(&with_slack, length, (ALL_UNITS / (items * batches)) as usize);
            search.bounded = swept.plans;
            // Several encoders have more GPU shares than the search covers.
            search.is_exhaustive = swept.is_all && space.encoders.len() == 1;
            if swept.is_all {
                search.finals = halving.run_all(swept.candidates)?;
                break;
            }
            let has_room = halving.run(swept.candidates, &mut search.finals)?;
            if has_room && !search.finals.is_empty() {
                search.is_tight = slack > SLACKS[0];
                break;
            }
        }
        search.simulated = halving.simulated();
        Ok(search)
    }
}
