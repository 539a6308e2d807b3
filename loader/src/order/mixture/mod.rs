//! Draws from a weighted dataset mixture, in a fixed order that is computed for any position.
//!
//! Position `p` in a run draws from a dataset: by weights, which every period of positions meets exactly
//! (`shares`), or by a repeated pattern. The `k`-th draw from a dataset is offset `k % n` in epoch `k / n`,
//! in the dataset's [`super::Order`]. Weights change only at stated steps and where a dataset is exhausted
//! (`segments`). Nothing here depends on ranks.

mod segments;
mod weighted;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub(crate) use self::segments::{Draw, POSITION_MAX, Segments, SegmentsInput};
use segments::Shares;

use crate::dataset::{Dataset, make_unique};
use crate::error::{Error, Result};
use crate::index::Index;

/// Weights are rounded to multiples of `1 / WEIGHT_UNITS`.
const WEIGHT_UNITS: f64 = 10_000.0;
/// Largest weight.
const WEIGHT_MAX: f64 = 1e6;
/// Maximum number of datasets in a mixture and entries in a pattern.
const ENTRIES_MAX: usize = 1 << 16;

/// End of a mixture whose datasets have epoch limits ([`Dataset::repeat`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// Ends with the last sample in the dataset that is exhausted first.
    #[default]
    FirstExhausted,
    /// Ends when all datasets are exhausted; the weight of an exhausted dataset is divided among the rest.
    /// Without end if any dataset is.
    AllExhausted,
}

/// A weighted dataset mixture; checked when a planner is built on it.
///
/// # Examples
/// ```no_run
/// # use std::sync::Arc;
/// # use dflop_loader::{Dataset, Mixture, Stop};
/// # use dflop_loader::index::Index;
/// # fn mixture(images: Arc<Index>, clips: Arc<Index>) -> Mixture {
/// Mixture::new()
///     .dataset(images, 0.7)
///     .dataset(Dataset::from(clips).repeat(2), 0.3)
///     .weights_from(10_000, &[0.5, 0.5])
///     .stop(Stop::AllExhausted)
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Mixture {
    datasets: Vec<Dataset>,
    weights: Vec<f64>,
    changes: Vec<(u64, Vec<f64>)>,
    pattern: Option<Vec<u32>>,
    stop: Stop,
}

impl From<Arc<Index>> for Mixture {
    fn from(index: Arc<Index>) -> Self {
        Dataset::from(index).into()
    }
}

impl From<Dataset> for Mixture {
    fn from(dataset: Dataset) -> Self {
        Self::new().dataset(dataset, 1.0)
    }
}

impl Mixture {
    /// Creates a mixture without datasets.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a dataset; the first has number 0. Weights need not add up to 1; they are rounded to four
    /// decimals.
    #[must_use]
    pub fn dataset(mut self, dataset: impl Into<Dataset>, weight: f64) -> Self {
        self.datasets.push(dataset.into());
        self.weights.push(weight);
        self
    }

    /// Replaces every dataset, by number, for example by a filtered dataset.
    ///
    /// # Errors
    /// Any error that `change` returns.
    pub fn map_datasets(mut self, mut change: impl FnMut(usize, Dataset) -> Result<Dataset>) -> Result<Self> {
        let datasets = self.datasets.into_iter().enumerate();
        self.datasets = datasets.map(|(number, dataset)| change(number, dataset)).collect::<Result<_>>()?;
        Ok(self)
    }

    /// Returns the datasets, in number order.
    #[must_use]
    pub fn datasets(&self) -> &[Dataset] {
        &self.datasets
    }

    /// Sets different weights from a step on, per dataset.
    #[must_use]
    pub fn weights_from(mut self, step: u64, weights: &[f64]) -> Self {
        self.changes.push((step, weights.to_vec()));
        self
    }

    /// Draws by a repeated dataset number pattern, instead of by weights.
    #[must_use]
    pub fn choose(mut self, pattern: Vec<u32>) -> Self {
        self.pattern = Some(pattern);
        self
    }

    /// Sets when the mixture ends. Default: [`Stop::FirstExhausted`].
    #[must_use]
    pub fn stop(mut self, stop: Stop) -> Self {
        self.stop = stop;
        self
    }

    /// Sets the epoch limit for every dataset without a limit.
    pub(crate) fn epochs(mut self, epochs: u64) -> Self {
        let set = |dataset: Dataset| {
            if dataset.epochs().is_some() { dataset } else { dataset.repeat(epochs) }
        };
        self.datasets = self.datasets.into_iter().map(set).collect();
        self
    }

    /// Checks the mixture and returns the datasets and draw rules.
    ///
    /// # Errors
    /// [`Error::Config`] if there is no dataset, if weights or the pattern do not fit the datasets or draw
    /// nothing, or if a dataset is drawn for zero epochs.
    pub(crate) fn check(self) -> Result<(Vec<Dataset>, MixRules)> {
        let invalid = |setting, reason: String| Err(Error::Config { setting, reason });
        let count = self.datasets.len();
        if count == 0 || count > ENTRIES_MAX {
            return invalid("mixture", format!("has {count} datasets; 1 to {ENTRIES_MAX} are possible"));
        }
        if let Some(at) = self.datasets.iter().position(|dataset| dataset.epochs() == Some(0)) {
            return invalid("repeat", format!("dataset {at} is drawn for no epoch; leave it out"));
        }
        if self.pattern.is_some() && !self.changes.is_empty() {
            return invalid("weights_from", "a pattern is drawn from without weights".into());
        }
        if let Some(pattern) = &self.pattern {
            if pattern.is_empty() || pattern.len() > ENTRIES_MAX {
                return invalid("choose", format!("has {} entries, not 1 to {ENTRIES_MAX}", pattern.len()));
            }
            if let Some(unknown) = pattern.iter().find(|&&dataset| dataset as usize >= count) {
                return invalid("choose", format!("names dataset {unknown} of {count}, counted from 0"));
            }
        }
        let mut weights = vec![WeightsFrom { step: 0, weights: checked_weights(&self.weights, count)? }];
        for (step, changed) in &self.changes {
            if *step <= weights[weights.len() - 1].step {
                return invalid("weights_from", format!("step {step} is not after the one before it"));
            }
            weights.push(WeightsFrom { step: *step, weights: checked_weights(changed, count)? });
        }
        let repeat = self.datasets.iter().map(Dataset::epochs).collect();
        let rules = MixRules { weights, choose: self.pattern, repeat, stop: self.stop };
        // Metrics by name would add up datasets with equal names.
        let names = make_unique(self.datasets.iter().map(Dataset::name));
        let datasets = self.datasets.into_iter().zip(names).map(|(dataset, name)| dataset.named(name));
        Ok((datasets.collect(), rules))
    }
}

/// Returns weights in units of 1/10,000; drawing reduces them by the greatest common divisor.
fn checked_weights(weights: &[f64], count: usize) -> Result<Vec<u64>> {
    let invalid = |reason: String| Err(Error::Config { setting: "weights", reason });
    if weights.len() != count {
        return invalid(format!("{} weights for {count} datasets", weights.len()));
    }
    let mut units = Vec::with_capacity(count);
    for &weight in weights {
        if !(0.0..=WEIGHT_MAX).contains(&weight) {
            return invalid(format!("{weight} is not between 0 and {WEIGHT_MAX}"));
        }
        let rounded = (weight * WEIGHT_UNITS).round() as u64;
        if rounded == 0 && weight > 0.0 {
            return invalid(format!("{weight} is less than the unit of {}", 1.0 / WEIGHT_UNITS));
        }
        units.push(rounded);
    }
    if units.iter().all(|&weight| weight == 0) {
        return invalid("all are 0".into());
    }
    Ok(units)
}

/// Draw rules for a mixture; part of a saved state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixRules {
    /// Dataset weights in units of 1/10,000, from step 0 and from every step at which they change.
    weights: Vec<WeightsFrom>,
    /// The pattern, if there is one: it replaces the weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    choose: Option<Vec<u32>>,
    /// Number of epochs per dataset; `null` for no end.
    repeat: Vec<Option<u64>>,
    stop: Stop,
}

/// Weights from a step on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct WeightsFrom {
    step: u64,
    weights: Vec<u64>,
}

impl MixRules {
    /// Returns the rules for one dataset without end.
    pub(crate) fn one() -> Self {
        let weights = vec![WeightsFrom { step: 0, weights: vec![1] }];
        Self { weights, choose: None, repeat: vec![None], stop: Stop::default() }
    }

    /// Returns whether weights change at a step.
    pub(crate) fn changes_weights(&self) -> bool {
        self.weights.len() > 1
    }

    /// Returns the number of epochs per dataset.
    pub(crate) fn repeat(&self) -> &[Option<u64>] {
        &self.repeat
    }

    /// Returns whether all numbers fit `datasets` datasets, as they do unless somebody edited them.
    pub(crate) fn fits(&self, datasets: usize) -> bool {
        let has_weights = |change: &WeightsFrom| change.weights.len() == datasets;
        let is_known = |pattern: &Vec<u32>| pattern.iter().all(|&at| (at as usize) < datasets);
        let most = (WEIGHT_MAX * WEIGHT_UNITS) as u64;
        !self.weights.is_empty()
            && self.weights.iter().all(has_weights)
            && self.weights.iter().flat_map(|change| &change.weights).all(|&weight| weight <= most)
            && self.choose.as_ref().is_none_or(is_known)
            && self.repeat.len() == datasets
    }

    /// Returns the dataset shares, without exhausted datasets; `None` if all are exhausted.
    fn shares(&self, in_force: usize, is_active: &[bool], key: u64) -> Option<Shares> {
        if let Some(pattern) = &self.choose {
            let kept = pattern.iter().copied().filter(|&dataset| is_active[dataset as usize]);
            return Shares::cyclic(kept.collect(), is_active.len());
        }
        let weights = self.weights[in_force].weights.iter().zip(is_active);
        let weights: Vec<u64> =
            weights.map(|(weight, is_active)| if *is_active { *weight } else { 0 }).collect();
        Shares::weighted(&weights, key)
    }
}

/// Origin from which positions count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// The step that starts at position 0.
    pub(crate) step: u64,
    /// Number of earlier draws per dataset, counted from the first epoch.
    pub(crate) draws: Vec<u64>,
    /// Phase in the period or the pattern.
    pub(crate) phase: u64,
}

impl Origin {
    /// Returns the origin at the first sample of an epoch in every dataset, at step 0.
    pub(crate) fn at_epoch(epoch: u64, sizes: &[u64]) -> Self {
        let draws = sizes.iter().map(|samples| epoch.saturating_mul(*samples)).collect();
        Self { step: 0, draws, phase: 0 }
    }
}

#[cfg(test)]
mod tests;
