//! The arguments that name a data set and its index.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::{Shard, expand_shards};

use crate::output::Failure;
use crate::progress::Bars;

/// A data set.
#[derive(Debug, Args)]
pub(crate) struct DataSetArgs {
    /// Shards: a folder, files, patterns such as `shards/{000..019}.tar`, or a shard list of wids (`NAME.json`); `-`
    /// and `pipe:COMMAND` where no index is needed.
    #[arg(value_name = "DATASET", required = true)]
    shards: Vec<String>,
}

impl DataSetArgs {
    pub(crate) fn shards(&self) -> Result<Vec<Shard>, Failure> {
        Ok(expand_shards(&self.shards)?)
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
