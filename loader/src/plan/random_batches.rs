//! Measures how unevenly random batches load data-parallel ranks.
//!
//! A trainer that deals samples without regard to cost gives every rank as many samples, and under FSDP every
//! module of a microbatch takes the slowest rank's time.

use dflop_balancer::lockstep_ns;
use dflop_costmodel::random::{SplitMix64, seed_from};
use dflop_costmodel::{ModelConstants, SampleCost};

/// Unevenness of random microbatches on ranks that meet in every module.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RandomBatches {
    /// Slowest rank's time over the mean rank's, with all modules, at least 1.
    pub slowest_over_mean: f64,
    /// Fraction of time in which ranks wait for slower ranks.
    pub idle_fraction: f64,
}

/// Draws microbatches at random, with repetition, and compares the slowest rank with the mean rank.
///
/// Equal arguments give equal results. `None` without samples, ranks or batches, or if no sample takes time.
///
/// - `costs`: sample costs to draw from
/// - `constants`: time of a microbatch in addition to the samples
/// - `ranks`, `samples`: number of ranks, and of samples in a microbatch
/// - `batches`: number of draws
///
/// # Examples
/// ```
/// use dflop_costmodel::{CostModel, DeviceRate, ModelSpec, SampleShape};
/// use dflop_loader::deal_random_batches;
///
/// let model = CostModel::new(ModelSpec::preset("tiny")?, DeviceRate::preset("h100")?);
/// let cost = |text_tokens| model.predict(&SampleShape { text_tokens, ..SampleShape::default() });
/// let costs = [cost(100)?, cost(2000)?];
/// let constants = model.microbatch_constants();
/// let found = deal_random_batches(&costs, &constants, [8, 4], 100, 0).expect("samples with costs");
/// assert!(found.slowest_over_mean > 1.3 && found.idle_fraction > 0.2);
/// # Ok::<(), dflop_costmodel::Error>(())
/// ```
#[must_use]
pub fn deal_random_batches(
    costs: &[SampleCost],
    constants: &ModelConstants,
    [ranks, samples]: [usize; 2],
    batches: usize,
    seed: u64,
) -> Option<RandomBatches> {
    let modules = costs.first()?.module_ns.as_slice().len();
    let mut random = SplitMix64::new(seed_from([seed, ranks as u64, samples as u64]));
    let mut microbatch = || {
        let mut added_ns = vec![0_u64; modules];
        for _ in 0..samples {
            let cost = &costs[random.below(costs.len())];
            for (sum, ns) in added_ns.iter_mut().zip(cost.module_ns.as_slice()) {
                *sum = sum.saturating_add(*ns);
            }
        }
        vec![constants.microbatch_ns(added_ns)]
    };
    let (mut slowest_ns, mut mean_ns) = (0.0, 0.0);
    for _ in 0..batches {
        let ranks_ns: Vec<Vec<Vec<u64>>> = (0..ranks).map(|_| microbatch()).collect();
        slowest_ns += lockstep_ns(&ranks_ns) as f64;
        let all_ns: u128 = ranks_ns.iter().flatten().flatten().copied().map(u128::from).sum();
        mean_ns += all_ns as f64 / ranks as f64;
    }
    (mean_ns > 0.0).then(|| RandomBatches {
        slowest_over_mean: slowest_ns / mean_ns,
        idle_fraction: 1.0 - mean_ns / slowest_ns,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_costmodel::{CostModel, DeviceRate, ModelSpec, SampleShape};

    fn costs(texts: &[u32]) -> Vec<SampleCost> {
        let model = CostModel::new(ModelSpec::preset("tiny").unwrap(), DeviceRate::preset("h100").unwrap());
        let cost = |&text_tokens: &u32| {
            model.predict(&SampleShape { text_tokens, ..SampleShape::default() }).unwrap()
        };
        texts.iter().map(cost).collect()
    }

    fn deal(texts: &[u32], ranks: usize) -> Option<RandomBatches> {
        deal_random_batches(&costs(texts), &ModelConstants::default(), [ranks, 1], 20_000, 7)
    }

    /// A rank has the long sample with probability 1/2, and the step is short only if no rank has it.
    #[test]
    fn unevenness_is_the_expected_maximum_over_the_mean() {
        let texts = [100, 1000];
        let [short, long] =
            [0, 1].map(|at| costs(&texts)[at].module_ns.as_slice().iter().map(|ns| *ns as f64).sum::<f64>());
        for ranks in [1, 2, 4] {
            let all_short = 0.5_f64.powi(ranks);
            let expected = (all_short * short + (1.0 - all_short) * long) / f64::midpoint(short, long);
            let found = deal(&texts, ranks as usize).unwrap();
            assert!((found.slowest_over_mean / expected - 1.0).abs() < 0.02, "{ranks}: {found:?} {expected}");
            assert!((found.idle_fraction - (1.0 - 1.0 / found.slowest_over_mean)).abs() < 1e-12);
        }
    }

    #[test]
    fn equal_samples_are_even_and_no_samples_are_nothing() {
        let even = deal(&[500, 500], 8).unwrap();
        assert!((even.slowest_over_mean - 1.0).abs() < 1e-12 && even.idle_fraction.abs() < 1e-12);
        assert_eq!(deal(&[], 8), None);
        assert_eq!(deal(&[500], 0), None);
    }
}
