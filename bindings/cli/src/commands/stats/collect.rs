//! Collects a dataset's data profile from the index, on all cores.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::commands::simulate::MICROBATCH_SAMPLES;
use dflop_costmodel::{CostModel, DatasetStatistics, KeyExchange, SampleCost, SampleShape};
use dflop_loader::flow::on_threads;
use dflop_loader::{Dataset, Permutation, RandomBatches, deal_random_batches};
use serde::Serialize;

/// Samples per part; parts are joined in order, so that results do not depend on the number of threads.
const PART_SAMPLES: u64 = 1 << 16;
/// Number of samples whose prediction uncertainty is evaluated.
const CERTAINTY_SAMPLES: u64 = 1000;
/// Number of samples that random batches are drawn from, and number of batches.
const DEALT_SAMPLES: u64 = 8192;
const DEALT_BATCHES: usize = 1000;
/// Number of GPUs that random batches are dealt to: a node.
const DEALT_GPUS: u64 = 8;
/// `sqrt(ln(2 / 0.05) / 2)`: the DKW bound at 95 %, times the square root of the number of samples.
const BOUND_95: f64 = 1.358_102;

/// Choice of the profiled samples.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Sampling {
    /// Number of samples that are profiled.
    pub(super) samples: u64,
    pub(super) of: u64,
    pub(super) seed: u64,
    /// Bound on the error of a quantile's rank with 95 % probability, as a fraction; 0 if all samples are
    /// profiled.
    pub(super) rank_error: f64,
}

/// A sample that the model does not support.
#[derive(Debug, Serialize)]
pub(super) struct Refused {
    pub(super) key: String,
    pub(super) reason: String,
}

/// Measured-profile uncertainty on samples from this dataset.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Certainty {
    /// Number of samples that were evaluated.
    pub(super) samples: u64,
    /// Mean half width of 90 % intervals over time, over all modules.
    pub(super) mean_uncertainty: f64,
    /// Fraction of samples with a prediction outside the measured shapes.
    pub(super) beyond_profile: f64,
}

/// Random microbatches on GPUs that run the whole model each, under FSDP.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct DealtBatches {
    pub(super) gpus: u64,
    pub(super) microbatch_samples: u64,
    /// Slowest GPU's time over the mean GPU's, summed over modules.
    pub(super) slowest_over_mean: f64,
    /// Fraction of time in which GPUs wait for slower GPUs.
    pub(super) idle_fraction: f64,
}

/// Samples that GPUs of a node can share (context parallelism) for at most a twentieth more work.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Divisible {
    /// GPUs that share a sample.
    pub(super) gpus: u32,
    /// Fraction that divides over as many GPUs, or more.
    pub(super) samples_fraction: f64,
    /// Tokens in the shortest such sample.
    pub(super) tokens_min: u32,
}

/// Data profile, rejected samples and uncertainty.
#[derive(Debug)]
pub(super) struct Collected {
    pub(super) profile: DatasetStatistics,
    pub(super) refused: Vec<Refused>,
    /// `None` without a measured profile.
    pub(super) certainty: Option<Certainty>,
    /// `None` if no sample has a cost.
    pub(super) dealt: Option<DealtBatches>,
    /// By GPU count; empty if the links between GPUs are unknown.
    pub(super) divisible: Vec<Divisible>,
}

impl Sampling {
    /// Selects all samples, or a random part.
    ///
    /// # Source
    /// Bound on ranks: Dvoretzky, Kiefer and Wolfowitz, 1956, with the constant of Massart, 1990. It also
    /// holds without replacement, where it is not tight.
    pub(super) fn new(of: u64, wanted: Option<u64>, seed: u64) -> Self {
        let samples = wanted.unwrap_or(of).min(of);
        let rank_error = if samples == of { 0.0 } else { BOUND_95 / (samples as f64).sqrt() };
        Self { samples, of, seed, rank_error }
    }

    /// Yields the sample indices for a range of draws.
    fn places(self, draws: Range<u64>) -> impl Iterator<Item = u64> {
        let permutation = Permutation::new(self.of, self.seed);
        draws.map(move |draw| if self.samples == self.of { draw } else { permutation.at(draw) })
    }

    /// Yields the indices of at most `samples_max` samples, spread evenly over the profiled ones.
    fn spread(self, samples_max: u64) -> impl Iterator<Item = u64> {
        let samples = self.samples.min(samples_max);
        (0..samples).flat_map(move |number| {
            let draw = (u128::from(number) * u128::from(self.samples) / u128::from(samples)) as u64;
            self.places(draw..draw + 1)
        })
    }
}

/// Collects a dataset's data profile.
///
/// - `exchange`: how GPUs that share a sample exchange keys and values
pub(super) fn collect(
    dataset: &Dataset,
    model: &CostModel,
    sampling: Sampling,
    exchange: Option<&KeyExchange>,
) -> Collected {
    let parts = sampling.samples.div_ceil(PART_SAMPLES).max(1);
    let next = AtomicU64::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(parts as usize);
    let work = || {
        let mut done = Vec::new();
        loop {
            let part = next.fetch_add(1, Ordering::Relaxed);
            if part >= parts {
                return done;
            }
            let draws = part * PART_SAMPLES..((part + 1) * PART_SAMPLES).min(sampling.samples);
            done.push((part, collect_part(dataset, model, sampling.places(draws))));
        }
    };
    let mut done: Vec<_> = on_threads(threads, work).into_iter().flatten().collect();
    // Merged in dataset order: float sums depend on it.
    done.sort_by_key(|(part, _)| *part);
    let mut profile = DatasetStatistics::new(model);
    let mut refused = Vec::new();
    for (_, (part, part_refused)) in done {
        profile.merge(part);
        refused.extend(part_refused);
    }
    let certainty = certainty(dataset, model, sampling);
    let costs = spread_costs(dataset, model, sampling);
    let divisible = exchange.map_or_else(Vec::new, |exchange| divisible(&costs, model, exchange));
    Collected { profile, refused, certainty, dealt: deal(&costs, model, sampling), divisible }
}

fn collect_part(
    dataset: &Dataset,
    model: &CostModel,
    places: impl Iterator<Item = u64>,
) -> (DatasetStatistics, Vec<Refused>) {
    let (mut profile, mut refused) = (DatasetStatistics::new(model), Vec::new());
    let mut shape = SampleShape::default();
    for place in places {
        let row = dataset.index().sample(dataset.sample_number(place));
        row.read_shape(&mut shape);
        match model.predict(&shape) {
            Ok(cost) => profile.add(place, &shape, &cost),
            Err(error) => refused.push(Refused { key: row.key().to_owned(), reason: error.to_string() }),
        }
    }
    (profile, refused)
}

/// Evaluates samples spread evenly over the profiled ones.
fn certainty(dataset: &Dataset, model: &CostModel, sampling: Sampling) -> Option<Certainty> {
    let (mut samples, mut uncertain, mut beyond) = (0_u64, 0.0, 0_u64);
    let mut shape = SampleShape::default();
    for place in sampling.spread(CERTAINTY_SAMPLES) {
        dataset.index().sample(dataset.sample_number(place)).read_shape(&mut shape);
        let Ok(prediction) = model.predict_with_uncertainty(&shape) else { continue };
        let prediction = prediction?;
        let total: u64 = prediction.modules.iter().map(|time| time.ns).sum();
        let open: u64 = prediction.modules.iter().map(|time| time.uncertainty_ns).sum();
        uncertain += open as f64 / (total as f64).max(1.0);
        beyond += u64::from(!prediction.warnings.is_empty());
        samples += 1;
    }
    let share = |value: f64| value / (samples as f64).max(1.0);
    model.rate().is_none().then(|| Certainty {
        samples,
        mean_uncertainty: share(uncertain),
        beyond_profile: share(beyond as f64),
    })
}

/// Predicts costs for samples spread evenly over the profiled ones.
fn spread_costs(dataset: &Dataset, model: &CostModel, sampling: Sampling) -> Vec<SampleCost> {
    let mut shape = SampleShape::default();
    let cost = |place| {
        dataset.index().sample(dataset.sample_number(place)).read_shape(&mut shape);
        model.predict(&shape).ok()
    };
    sampling.spread(DEALT_SAMPLES).filter_map(cost).collect()
}

/// Counts the samples that divide well over 2, 4, … GPUs in a node.
fn divisible(costs: &[SampleCost], model: &CostModel, exchange: &KeyExchange) -> Vec<Divisible> {
    let ranks = |cost: &SampleCost| {
        model.divisible_ranks(cost.tokens, cost.target_tokens, DEALT_GPUS as u32, exchange).unwrap_or(1)
    };
    let divided: Vec<(u32, u32)> = costs.iter().map(|cost| (ranks(cost), cost.tokens)).collect();
    let count = |log: u32| {
        let own = || divided.iter().filter(move |(ranks, _)| *ranks >= 1 << log);
        let samples_fraction = own().count() as f64 / divided.len() as f64;
        let tokens_min = own().map(|(_, tokens)| *tokens).min()?;
        Some(Divisible { gpus: 1 << log, samples_fraction, tokens_min })
    };
    (1..=DEALT_GPUS.ilog2()).filter_map(count).collect()
}

/// Deals samples to random microbatches.
fn deal(costs: &[SampleCost], model: &CostModel, sampling: Sampling) -> Option<DealtBatches> {
    let sizes = [DEALT_GPUS, MICROBATCH_SAMPLES].map(|size| size as usize);
    let constants = model.microbatch_constants();
    let found = deal_random_batches(costs, &constants, sizes, DEALT_BATCHES, sampling.seed)?;
    let RandomBatches { slowest_over_mean, idle_fraction } = found;
    Some(DealtBatches {
        gpus: DEALT_GPUS,
        microbatch_samples: MICROBATCH_SAMPLES,
        slowest_over_mean,
        idle_fraction,
    })
}
