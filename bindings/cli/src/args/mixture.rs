//! Arguments for a mixture of datasets, given by flags or by a JSON file.

use std::path::{Path, PathBuf};

use clap::Args;
use dflop_loader::index::{IndexOptions, TokenCounts};
use dflop_loader::settings::Settings;
use dflop_loader::shard::{ShardAccess, expand_shards_in};
use dflop_loader::store::redact_name;
use dflop_loader::{Dataset, Mixture, Stop};
use serde::Deserialize;

use crate::args::dataset::{SplitArgs, index_options_for, open_dataset};
use crate::failure::Failure;
use dflop_loader::store::file;

/// A dataset or a mixture, read through indexes.
#[derive(Debug, Args)]
pub(crate) struct MixtureArgs {
    /// Shards: a directory, files, or patterns such as `shards/{000..019}.tar`.
    #[arg(value_name = "DATASET", required_unless_present = "mix", conflicts_with = "mix")]
    shards: Vec<String>,
    /// Dataset mixture: `WEIGHT=DATASET` once per dataset, or a JSON file.
    #[arg(long, value_name = "WEIGHT=DATASET|FILE")]
    mix: Vec<String>,
    #[command(flatten)]
    split: SplitArgs,
}

impl MixtureArgs {
    /// Opens the indexes and builds missing ones.
    pub(crate) fn open(&self, settings: &Settings, token_counts: TokenCounts) -> Result<Mixture, Failure> {
        let stores = settings.store.stores()?;
        let place = (&stores, settings);
        match &self.mix[..] {
            [] => Ok(self.split.open(&self.shards, place, token_counts)?.into()),
            // A single value without a weight is the name of a mixture file.
            [file] if weighted(file).is_none() => {
                self.check_settings(settings)?;
                let access = settings.store.access(&stores).allow_pipe(false).keep_variables(true);
                read_mixture(Path::new(file), &access, &index_options_for(settings, token_counts)?)
            }
            list => list.iter().try_fold(Mixture::new(), |mixture, entry| {
                let (weight, dataset) = weighted(entry).ok_or_else(|| misuse(entry))?;
                Ok(mixture.dataset(self.split.open(&[dataset], place, token_counts.clone())?, weight))
            }),
        }
    }

    /// Rejects arguments that a mixture file has for each dataset.
    fn check_settings(&self, settings: &Settings) -> Result<(), Failure> {
        let arguments = [
            ("--split", self.split.is_given()),
            ("index.directory", settings.index.directory.is_some()),
            ("index.splits", settings.index.splits.is_some()),
        ];
        match arguments.into_iter().find(|(_, is_given)| *is_given) {
            None => Ok(()),
            Some((name, _)) => {
                let reason = "has no effect with a mixture file, which has it for each dataset; leave it out";
                Err(Failure::Misuse(format!("`{name}` {reason}")))
            }
        }
    }
}

/// Splits `WEIGHT=DATASET`; `None` if the weight is not a number.
fn weighted(entry: &str) -> Option<(f64, &str)> {
    let (weight, dataset) = entry.split_once('=')?;
    Some((weight.parse().ok()?, dataset))
}

fn misuse(entry: &str) -> Failure {
    let forms = "give `WEIGHT=DATASET` for each dataset, or one JSON file";
    Failure::Misuse(format!("invalid `--mix {}`: {forms}", redact_name(entry)))
}

/// Mixture file contents. Relative paths start at the file's directory.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MixtureFile {
    #[serde(rename = "data_sets")]
    datasets: Vec<MixtureEntry>,
    #[serde(default)]
    weights_from: Vec<WeightsFrom>,
    choose: Option<Vec<u32>>,
    #[serde(default)]
    stop: Stop,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MixtureEntry {
    shards: Vec<String>,
    #[serde(default = "one")]
    weight: f64,
    repeat: Option<u64>,
    split: Option<String>,
    splits: Option<PathBuf>,
    index: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WeightsFrom {
    step: u64,
    weights: Vec<f64>,
}

fn one() -> f64 {
    1.0
}

fn read_mixture(path: &Path, access: &ShardAccess, options: &IndexOptions) -> Result<Mixture, Failure> {
    let read = file::read_named_text(path).map_err(Failure::from).map_err(|error| error.in_file(path));
    let file: MixtureFile = serde_json::from_str(&read?)
        .map_err(|error| Failure::Misuse(format!("`{}` is not a mixture file: {error}", path.display())))?;
    let directory = path.parent().unwrap_or(Path::new(""));
    let mut mixture = Mixture::new().stop(file.stop);
    for entry in file.datasets {
        let weight = entry.weight;
        mixture = mixture.dataset(entry.open(directory, access, options)?, weight);
    }
    for WeightsFrom { step, weights } in file.weights_from {
        mixture = mixture.weights_from(step, &weights);
    }
    Ok(match file.choose {
        Some(pattern) => mixture.choose(pattern),
        None => mixture,
    })
}

impl MixtureEntry {
    fn open(
        self,
        directory: &Path,
        access: &ShardAccess,
        options: &IndexOptions,
    ) -> Result<Dataset, Failure> {
        let beside = |path: &PathBuf| directory.join(path);
        let shards: Vec<String> =
            self.shards.iter().map(|pattern| pattern_beside(directory, pattern)).collect();
        let splits = self.splits.as_ref().map(beside);
        let options = IndexOptions { directory: self.index.as_ref().map(beside), ..options.clone() };
        let shards = expand_shards_in(&shards, access)?;
        let dataset = open_dataset(shards, &options, self.split.as_deref(), splits.as_deref())?;
        Ok(match self.repeat {
            Some(epochs) => dataset.repeat(epochs),
            None => dataset,
        })
    }
}

/// Joins a pattern to a directory; patterns with a scheme or an environment variable are not changed.
fn pattern_beside(directory: &Path, pattern: &str) -> String {
    // A scheme, such as `s3:`, or a variable such as `${DATA}`.
    let stands_alone = pattern.contains(':') || pattern.starts_with("${");
    if stands_alone { pattern.to_owned() } else { directory.join(pattern).display().to_string() }
}
