//! Arguments for a mixture of datasets, given by flags or by a JSON file.

use std::path::Path;

use clap::Args;
use dflop_loader::Mixture;
use dflop_loader::index::{IndexOptions, TokenCounts};
use dflop_loader::settings::{MixtureSettings, Settings};
use dflop_loader::shard::ShardAccess;
use dflop_loader::store::{file, redact_name};

use crate::args::dataset::{SplitArgs, index_options_for};
use crate::failure::Failure;

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

/// Opens the mixture in a file, whose relative paths start at its directory.
fn read_mixture(path: &Path, access: &ShardAccess, options: &IndexOptions) -> Result<Mixture, Failure> {
    let read = file::read_named_text(path).map_err(Failure::from).map_err(|error| error.in_file(path));
    let mut mixture: MixtureSettings = serde_json::from_str(&read?)
        .map_err(|error| Failure::Misuse(format!("`{}` is not a mixture file: {error}", path.display())))?;
    mixture.resolve(path.parent().unwrap_or(Path::new("")));
    Ok(mixture.open(access, options)?)
}
