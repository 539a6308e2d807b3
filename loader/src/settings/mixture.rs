//! Mixture of datasets, as files describe it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::dataset::{Dataset, Splits};
use crate::error::Result;
use crate::index::{Index, IndexOptions};
use crate::order::{Mixture, Stop};
use crate::shard::{Shard, ShardAccess, expand_shards_in};

/// Mixture of datasets.
///
/// # Examples
/// ```
/// use dflop_loader::settings::MixtureSettings;
///
/// # fn main() -> serde_json::Result<()> {
/// let mixture: MixtureSettings = serde_json::from_str(
///     r#"{"data_sets": [{"shards": ["photos/"], "weight": 0.7}, {"shards": ["clips/"], "weight": 0.3}]}"#,
/// )?;
/// assert_eq!(mixture.datasets[1].weight, 0.3);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MixtureSettings {
    /// Datasets, at least one.
    #[serde(rename = "data_sets")]
    pub datasets: Vec<DatasetSettings>,
    /// Weights that replace those of the datasets from a step on.
    #[serde(default)]
    pub weights_from: Vec<WeightsFrom>,
    /// Dataset numbers that are drawn one after another, repeated, instead of by weights.
    pub choose: Option<Vec<u32>>,
    /// End of the mixture.
    #[serde(default)]
    pub stop: Stop,
}

/// Dataset of a mixture.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatasetSettings {
    /// Shards, directories, patterns or URLs.
    pub shards: Vec<String>,
    /// Share of the samples that are drawn; weights need not add up to 1.
    #[serde(default = "one")]
    pub weight: f64,
    /// Number of epochs. Default: no limit.
    pub repeat: Option<u64>,
    /// Name of the split that is read. Default: all samples.
    pub split: Option<String>,
    /// File that defines the splits. Default: `splits.json` next to the shards.
    pub splits: Option<PathBuf>,
    /// Directory of the index. Default: `.dflop` next to the shards, or the user's cache directory.
    pub index: Option<PathBuf>,
}

/// Weights from a step on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightsFrom {
    /// First step with these weights.
    pub step: u64,
    /// Weight of each dataset.
    pub weights: Vec<f64>,
}

fn one() -> f64 {
    1.0
}

impl Default for DatasetSettings {
    /// Returns a dataset without shards, with weight 1.
    fn default() -> Self {
        Self { shards: Vec::new(), weight: one(), repeat: None, split: None, splits: None, index: None }
    }
}

impl From<DatasetSettings> for MixtureSettings {
    fn from(dataset: DatasetSettings) -> Self {
        Self { datasets: vec![dataset], weights_from: Vec::new(), choose: None, stop: Stop::default() }
    }
}

impl MixtureSettings {
    /// Joins relative paths to a directory; patterns with a scheme or an environment variable stay as they
    /// are.
    pub fn resolve(&mut self, directory: &Path) {
        self.datasets.iter_mut().for_each(|dataset| dataset.resolve(directory));
    }

    /// Opens the indexes, and builds missing ones.
    ///
    /// # Errors
    /// Those of [`DatasetSettings::open`].
    pub fn open(&self, access: &ShardAccess, options: &IndexOptions) -> Result<Mixture> {
        let mut mixture = Mixture::new().stop(self.stop);
        for dataset in &self.datasets {
            mixture = mixture.dataset(dataset.open(access, options)?, dataset.weight);
        }
        for WeightsFrom { step, weights } in &self.weights_from {
            mixture = mixture.weights_from(*step, weights);
        }
        Ok(match &self.choose {
            Some(pattern) => mixture.choose(pattern.clone()),
            None => mixture,
        })
    }
}

impl DatasetSettings {
    /// Joins relative paths to a directory.
    fn resolve(&mut self, directory: &Path) {
        self.shards.iter_mut().for_each(|pattern| *pattern = pattern_beside(directory, pattern));
        for path in [&mut self.splits, &mut self.index].into_iter().flatten() {
            *path = directory.join(&*path);
        }
    }

    /// Lists the shards.
    ///
    /// # Errors
    /// Those of [`expand_shards_in`].
    pub fn expand(&self, access: &ShardAccess) -> Result<Vec<Shard>> {
        expand_shards_in(&self.shards, access)
    }

    /// Returns the options for the index, in the directory that is set.
    #[must_use]
    pub fn index_options(&self, options: &IndexOptions) -> IndexOptions {
        IndexOptions { directory: self.index.clone(), ..options.clone() }
    }

    /// Opens the index, or builds it if it is missing, and selects the split.
    ///
    /// # Errors
    /// [`Error::Selection`](crate::Error::Selection) if a pattern has no shard or a split is unknown; errors
    /// for unreadable shards.
    pub fn open(&self, access: &ShardAccess, options: &IndexOptions) -> Result<Dataset> {
        let index = Arc::new(Index::open_or_build(self.expand(access)?, &self.index_options(options))?);
        let dataset = match &self.split {
            None => Dataset::from(index),
            Some(split) => {
                let splits = self.splits.as_deref().map_or_else(|| Splits::beside(&index), Splits::read)?;
                Dataset::from(index).split(&splits, split)?
            }
        };
        Ok(match self.repeat {
            Some(epochs) => dataset.repeat(epochs),
            None => dataset,
        })
    }
}

/// Joins a pattern to a directory; patterns with a scheme or an environment variable are not changed.
#[must_use]
pub fn pattern_beside(directory: &Path, pattern: &str) -> String {
    // A scheme, such as `s3:`, or a variable such as `${DATA}`.
    let stands_alone = pattern.contains(':') || pattern.starts_with("${");
    if stands_alone { pattern.to_owned() } else { directory.join(pattern).display().to_string() }
}
