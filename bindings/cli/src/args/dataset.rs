//! Arguments for dataset shards, stores, index and splits.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use dflop_loader::index::{Index, IndexOptions, TokenCounts};
use dflop_loader::shard::{Shard, ShardAccess, expand_shards_in};
use dflop_loader::store::{ReadMode, ShardCache, Stores};
use dflop_loader::{Dataset, Splits};

use crate::args::video::VideoArgs;
use crate::failure::Failure;
use crate::progress::Bars;

/// Dataset shards, read without an index.
#[derive(Debug, Args)]
pub(crate) struct DatasetArgs {
    /// Shards: a directory, files, patterns such as `shards/{000..019}.tar`, or a shard list of wids
    /// (`NAME.json`); URLs such as `s3://bucket/directory/`, also gs, az, abfs, http and https; `-` and, with
    /// `--allow-pipe`, `pipe:COMMAND` for commands that need no index.
    #[arg(value_name = "DATASET", required = true)]
    shards: Vec<String>,
    /// Let names `pipe:COMMAND` run shell commands that print the shard.
    #[arg(long)]
    allow_pipe: bool,
    #[command(flatten)]
    stores: StoreArgs,
}

/// Read method for local shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ReadArg {
    /// Map shards of file systems that nobody can write, such as SquashFS; else read by system calls.
    Auto,
    /// Map shards: no copy, but a shard that is shortened meanwhile ends the process.
    Mmap,
    /// Read by system calls: a shard that is shortened or changed meanwhile is an error.
    Pread,
}

impl From<ReadArg> for ReadMode {
    fn from(read: ReadArg) -> Self {
        match read {
            ReadArg::Auto => Self::Auto,
            ReadArg::Mmap => Self::Mmap,
            ReadArg::Pread => Self::Pread,
        }
    }
}

/// Access to local and remote shards.
#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    /// Directory that keeps whole remote shards for all processes of this machine [default: shards are not
    /// kept].
    #[arg(long, value_name = "DIR", help_heading = "Remote shards")]
    cache: Option<PathBuf>,
    /// Maximum cache size in bytes.
    #[arg(long, value_name = "N", default_value_t = 64 << 30, requires = "cache", help_heading = "Remote shards")]
    cache_bytes: u64,
    /// Maximum number of requests in flight, over all shards.
    #[arg(long, value_name = "N", default_value_t = 256, help_heading = "Remote shards")]
    requests_max: usize,
    /// Seconds for which a store that fails or does not answer is asked again, for each 16 MiB of a read; 0
    /// for never.
    #[arg(long, value_name = "N", default_value_t = 300, help_heading = "Remote shards")]
    retry_seconds: u64,
    /// Read local and cached shards by system calls or through memory maps.
    #[arg(long, value_name = "MODE", value_enum, default_value_t = ReadArg::Auto)]
    read: ReadArg,
    /// Let shard lists name remote shards and shards outside the list's directory.
    #[arg(long)]
    allow_outside: bool,
}

impl StoreArgs {
    pub(crate) fn stores(&self) -> Result<Stores, Failure> {
        let mut builder = Stores::builder()
            .requests_max(self.requests_max)
            .retry_seconds(self.retry_seconds)
            .read(self.read.into());
        if let Some(directory) = &self.cache {
            builder = builder.cache(ShardCache { directory: directory.clone(), bytes_max: self.cache_bytes });
        }
        Ok(builder.build()?)
    }

    /// Returns the locations that shard names may reach through `stores`.
    pub(crate) fn access(&self, stores: &Stores) -> ShardAccess {
        ShardAccess::new(stores).allow_outside(self.allow_outside)
    }
}

impl DatasetArgs {
    pub(crate) fn shards(&self) -> Result<Vec<Shard>, Failure> {
        let access = self.stores.access(&self.stores.stores()?).allow_pipe(self.allow_pipe);
        Ok(expand_shards_in(&self.shards, &access)?)
    }
}

/// Index location, split choice and shard access.
#[derive(Debug, Args)]
pub(crate) struct IndexLocationArgs {
    /// Directory of the index [default: `.dflop` next to the shards, or the user's cache directory].
    #[arg(long, value_name = "DIR")]
    index: Option<PathBuf>,
    /// Read only the samples in this split; in a mixture given by flags, in every dataset.
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

    /// Returns the locations that shard names may reach through `stores`.
    pub(crate) fn access(&self, stores: &Stores) -> ShardAccess {
        self.stores.access(stores)
    }

    /// Opens the index of some shards, builds it if it is missing, and selects the split.
    pub(crate) fn open<S: AsRef<str>>(
        &self,
        shards: &[S],
        stores: &Stores,
        token_counts: TokenCounts,
    ) -> Result<Dataset, Failure> {
        // The index rejects a stream before the stream starts, with advice that fits better.
        let shards = expand_shards_in(shards, &self.access(stores).allow_pipe(true))?;
        let options = IndexOptions { directory: self.index.clone(), ..self.index_options(token_counts)? };
        open_dataset(shards, &options, self.split.as_deref(), self.splits.as_deref())
    }

    /// Returns the options for building an index, without the index directory.
    pub(crate) fn index_options(&self, token_counts: TokenCounts) -> Result<IndexOptions, Failure> {
        Ok(IndexOptions { video_sampling: self.video.index_sampling()?, token_counts, ..index_options() })
    }
}

/// Opens the index for a shard list and selects a split.
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

/// Dataset that is read through an index.
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
