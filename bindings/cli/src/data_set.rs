//! The arguments that name a data set and its index.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::{Shard, expand_shards_in};
use dflop_loader::store::{ShardCache, Stores};

use crate::output::Failure;
use crate::progress::Bars;

/// A data set.
#[derive(Debug, Args)]
pub(crate) struct DataSetArgs {
    /// Shards: a folder, files, or patterns such as `shards/{000..019}.tar`; URLs such as `s3://bucket/folder/`, also
    /// gs, az, abfs, http and https; `-` and `pipe:COMMAND` where no index is needed.
    #[arg(value_name = "DATASET", required = true)]
    shards: Vec<String>,
    #[command(flatten)]
    stores: StoreArgs,
}

/// How remote shards are reached.
#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    /// Folder in which whole remote shards are kept, for all processes of this machine [default: none are].
    #[arg(long, value_name = "DIR", help_heading = "Remote shards")]
    cache: Option<PathBuf>,
    /// Most bytes that the kept shards take.
    #[arg(long, value_name = "N", default_value_t = 64 << 30, requires = "cache", help_heading = "Remote shards")]
    cache_bytes: u64,
    /// Most requests in flight.
    #[arg(long, value_name = "N", default_value_t = 256, help_heading = "Remote shards")]
    requests_max: usize,
}

impl StoreArgs {
    fn stores(&self) -> Result<Stores, Failure> {
        let mut builder = Stores::builder().requests_max(self.requests_max);
        if let Some(folder) = &self.cache {
            builder = builder.cache(ShardCache { folder: folder.clone(), bytes_max: self.cache_bytes });
        }
        Ok(builder.build()?)
    }
}

impl DataSetArgs {
    pub(crate) fn shards(&self) -> Result<Vec<Shard>, Failure> {
        Ok(expand_shards_in(&self.shards, &self.stores.stores()?)?)
    }
}

/// A data set that is read through its index.
#[derive(Debug, Args)]
pub(crate) struct IndexedArgs {
    #[command(flatten)]
    data_set: DataSetArgs,
    /// Folder of the index [default: `.dflop` beside the shards, or the user's cache directory].
    #[arg(long, value_name = "DIR")]
    index: Option<PathBuf>,
}

impl IndexedArgs {
    /// Opens the index; makes it on first use.
    pub(crate) fn open(&self) -> Result<Arc<Index>, Failure> {
        let options = IndexOptions { folder: self.index.clone(), ..index_options() };
        Ok(Arc::new(Index::open_or_build(self.data_set.shards()?, &options)?))
    }
}

/// Index options that draw progress.
pub(crate) fn index_options() -> IndexOptions {
    IndexOptions { progress: Arc::new(Bars::default()), ..IndexOptions::default() }
}
