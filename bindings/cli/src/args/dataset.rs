//! Arguments for dataset shards, index and splits.

use std::sync::Arc;

use clap::Args;
use dflop_loader::Dataset;
use dflop_loader::index::{IndexOptions, TokenCounts};
use dflop_loader::settings::{DatasetSettings, Settings};
use dflop_loader::shard::{Shard, expand_shards_in};
use dflop_loader::store::Stores;

use crate::failure::Failure;
use crate::output::Bars;

/// Dataset shards, read without an index.
#[derive(Debug, Args)]
pub(crate) struct DatasetArgs {
    /// Shards: a directory, files, patterns such as `shards/{000..019}.tar`, or a shard list of wids
    /// (`NAME.json`); URLs such as `s3://bucket/directory/`, also gs, az, abfs, http and https; `-` and, with
    /// `store.allow=pipe`, `pipe:COMMAND` for commands that need no index.
    #[arg(value_name = "DATASET", required = true)]
    shards: Vec<String>,
}

impl DatasetArgs {
    pub(crate) fn shards(&self, settings: &Settings) -> Result<Vec<Shard>, Failure> {
        let store = &settings.store;
        Ok(expand_shards_in(&self.shards, &store.access(&store.stores()?))?)
    }

    /// Opens the index, or builds it if it is missing.
    pub(crate) fn open(&self, settings: &Settings) -> Result<Dataset, Failure> {
        let place = (&settings.store.stores()?, settings);
        SplitArgs { split: None }.open(&self.shards, place, TokenCounts::Estimated)
    }
}

/// Choice of a split.
#[derive(Debug, Args)]
pub(crate) struct SplitArgs {
    /// Read only the samples in this split; in a mixture given by flags, in every dataset.
    #[arg(long, value_name = "NAME")]
    split: Option<String>,
}

impl SplitArgs {
    pub(crate) const fn is_given(&self) -> bool {
        self.split.is_some()
    }

    /// Opens the index of some shards, builds it if it is missing, and selects the split.
    pub(crate) fn open<S: AsRef<str>>(
        &self,
        shards: &[S],
        (stores, settings): (&Stores, &Settings),
        token_counts: TokenCounts,
    ) -> Result<Dataset, Failure> {
        if self.split.is_none() && settings.index.splits.is_some() {
            return Err(Failure::Misuse("`index.splits` needs `--split`".into()));
        }
        // The index rejects a stream before the stream starts, with advice that fits better.
        let access = settings.store.access(stores).allow_pipe(true);
        let dataset = DatasetSettings {
            shards: shards.iter().map(|shard| shard.as_ref().to_owned()).collect(),
            split: self.split.clone(),
            splits: settings.index.splits.clone(),
            index: settings.index.directory.clone(),
            ..DatasetSettings::default()
        };
        Ok(dataset.open(&access, &index_options_for(settings, token_counts)?)?)
    }
}

/// Returns the options for building an index, without the index directory.
pub(crate) fn index_options_for(
    settings: &Settings,
    token_counts: TokenCounts,
) -> Result<IndexOptions, Failure> {
    let video_sampling = settings.index.video_sampling()?.unwrap_or_default();
    Ok(IndexOptions { video_sampling, token_counts, ..index_options() })
}

/// Dataset that is read through an index.
#[derive(Debug, Args)]
pub(crate) struct IndexedArgs {
    /// Shards: a directory, files, patterns such as `shards/{000..019}.tar`, or URLs such as
    /// `s3://bucket/directory/`.
    #[arg(value_name = "DATASET", required = true)]
    shards: Vec<String>,
    #[command(flatten)]
    split: SplitArgs,
}

impl IndexedArgs {
    /// Opens the index, or builds it if it is missing.
    pub(crate) fn open(&self, settings: &Settings, token_counts: TokenCounts) -> Result<Dataset, Failure> {
        self.split.open(&self.shards, (&settings.store.stores()?, settings), token_counts)
    }
}

/// Returns index options that draw progress bars.
pub(crate) fn index_options() -> IndexOptions {
    IndexOptions { progress: Arc::new(Bars::default()), ..IndexOptions::default() }
}
