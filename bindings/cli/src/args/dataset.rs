//! Arguments for the shards of a dataset, its stores, its index and its splits.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use dflop_loader::dataset::Dataset;
use dflop_loader::dataset::Splits;
use dflop_loader::index::{Index, IndexOptions, TokenCounts};
use dflop_loader::shard::{Shard, expand_shards_in};
use dflop_loader::store::{ShardCache, Stores};

use crate::args::video::VideoArgs;
use crate::failure::Failure;
use crate::progress::Bars;

/// Shards of a dataset, read without an index.
#[derive(Debug, Args)]
pub(crate) struct DatasetArgs {
    /// Shards: a directory, files, patterns such as `shards/{000..019}.tar`, or a shard list of wids
    /// (`NAME.json`); URLs such as `s3://bucket/directory/`, also gs, az, abfs, http and https; `-` and
    /// `pipe:COMMAND` for commands that need no index.
    #[arg(value_name = "DATASET", required = true)]
    shards: Vec<String>,
    #[command(flatten)]
    stores: StoreArgs,
}

/// Access to remote shards.
#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    /// Directory that keeps whole remote shards for all processes of this machine [default: shards are not
    /// kept].
    #[arg(long, value_name = "DIR", help_heading = "Remote shards")]
    cache: Option<PathBuf>,
    /// Maximum size of the kept shards in bytes.
    #[arg(long, value_name = "N", default_value_t = 64 << 30, requires = "cache", help_heading = "Remote shards")]
    cache_bytes: u64,
    /// Maximum number of requests in flight, over all shards.
    #[arg(long, value_name = "N", default_value_t = 256, help_heading = "Remote shards")]
    requests_max: usize,
}

impl StoreArgs {
    pub(crate) fn stores(&self) -> Result<Stores, Failure> {
        let mut builder = Stores::builder().requests_max(self.requests_max);
        if let Some(directory) = &self.cache {
            builder = builder.cache(ShardCache { directory: directory.clone(), bytes_max: self.cache_bytes });
        }
        Ok(builder.build()?)
    }
}

impl DatasetArgs {
    pub(crate) fn shards(&self) -> Result<Vec<Shard>, Failure> {
        Ok(expand_shards_in(&self.shards, &self.stores.stores()?)?)
    }
}

/// Location of the index, choice of a split, and access to shards.
#[derive(Debug, Args)]
pub(crate) struct IndexLocationArgs {
    /// Directory of the index [default: `.dflop` next to the shards, or the user's cache directory].
    #[arg(long, value_name = "DIR")]
    index: Option<PathBuf>,
    /// Read only the samples of this split; in a mixture given by flags, of every dataset.
    #[arg(long, value_name = "NAME")]
    split: Option<String>,
    /// File that defines the splits [default: `splits.json` next to the shards].
    #[arg(long, value_name = "FILE", requires = "split")]
    splits: Option<PathBuf>,
    #[command(flatten)]
    stores: StoreArgs,
    #[command(flatten)]
    video: VideoArgs,
}

impl IndexLocationArgs {
    /// Builds the stores that remote shards are read from.
    pub(crate) fn stores(&self) -> Result<Stores, Failure> {
        self.stores.stores()
    }

    /// Opens the index of some shards, builds it if it is missing, and selects the split.
    pub(crate) fn open<S: AsRef<str>>(
        &self,
        shards: &[S],
        stores: &Stores,
        token_counts: TokenCounts,
    ) -> Result<Dataset, Failure> {
        let shards = expand_shards_in(shards, stores)?;
        let options = IndexOptions { directory: self.index.clone(), ..self.index_options(token_counts)? };
        open_dataset(shards, &options, self.split.as_deref(), self.splits.as_deref())
    }

    /// Returns the options for building an index, without its directory.
    pub(crate) fn index_options(&self, token_counts: TokenCounts) -> Result<IndexOptions, Failure> {
        Ok(IndexOptions { video_sampling: self.video.index_sampling()?, token_counts, ..index_options() })
    }
}

/// Opens the index of some shards and selects a split.
pub(crate) fn open_dataset(
    shards: Vec<Shard>,
    options: &IndexOptions,
    split: Option<&str>,
    splits: Option<&Path>,
) -> Result<Dataset, Failure> {
    let index = Arc::new(Index::open_or_build(shards, options)?);
    let Some(split) = split else { return Ok(index.into()) };
    let splits = splits.map_or_else(|| Splits::beside(&index), Splits::read)?;
    Ok(Dataset::from(index).split(&splits, split)?)
}

/// Dataset that is read through its index.
#[derive(Debug, Args)]
pub(crate) struct IndexedArgs {
    /// Shards: a directory, files, patterns such as `shards/{000..019}.tar`, or URLs such as
    /// `s3://bucket/directory/`.
    #[arg(value_name = "DATASET", required = true)]
    shards: Vec<String>,
    #[command(flatten)]
    place: IndexLocationArgs,
}

impl IndexedArgs {
    /// Opens the index, or builds it if it is missing.
    pub(crate) fn open(&self, token_counts: TokenCounts) -> Result<Dataset, Failure> {
        self.place.open(&self.shards, &self.place.stores()?, token_counts)
    }
}

/// Returns index options that draw progress bars.
pub(crate) fn index_options() -> IndexOptions {
    IndexOptions { progress: Arc::new(Bars::default()), ..IndexOptions::default() }
}
