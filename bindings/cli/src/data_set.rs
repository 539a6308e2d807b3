//! The arguments that name a data set and its index.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use dflop_loader::data_set::DataSet;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::{Shard, expand_shards};
use dflop_loader::split::Splits;

use crate::output::Failure;
use crate::progress::Bars;

/// A data set.
#[derive(Debug, Args)]
pub(crate) struct DataSetArgs {
    /// Shards: a folder, files, or patterns such as `shards/{000..019}.tar`; `-` and `pipe:COMMAND` where no
    /// index is needed.
    #[arg(value_name = "DATASET", required = true)]
    shards: Vec<String>,
}

impl DataSetArgs {
    pub(crate) fn shards(&self) -> Result<Vec<Shard>, Failure> {
        Ok(expand_shards(&self.shards)?)
    }
}

/// Where the index lies, and the split.
#[derive(Debug, Args)]
pub(crate) struct IndexPlaceArgs {
    /// Folder of the index [default: `.dflop` beside the shards, or the user's cache directory].
    #[arg(long, value_name = "DIR")]
    index: Option<PathBuf>,
    /// Take the samples of this split; of a mixture by flags, from every data set.
    #[arg(long, value_name = "NAME")]
    split: Option<String>,
    /// File that states the splits [default: `splits.json` beside the shards].
    #[arg(long, value_name = "FILE", requires = "split")]
    splits: Option<PathBuf>,
}

impl IndexPlaceArgs {
    /// Opens the index of some shards, making it on first use, and takes the split.
    pub(crate) fn open<S: AsRef<str>>(&self, shards: &[S]) -> Result<DataSet, Failure> {
        open_data_set(shards, self.index.clone(), self.split.as_deref(), self.splits.as_deref())
    }
}

/// Opens the index of some shards and takes a split.
pub(crate) fn open_data_set<S: AsRef<str>>(
    shards: &[S],
    index: Option<PathBuf>,
    split: Option<&str>,
    splits: Option<&Path>,
) -> Result<DataSet, Failure> {
    let options = IndexOptions { folder: index, ..index_options() };
    let index = Arc::new(Index::open_or_build(expand_shards(shards)?, &options)?);
    let Some(split) = split else { return Ok(index.into()) };
    let splits = splits.map_or_else(|| Splits::beside(&index), Splits::read)?;
    Ok(DataSet::from(index).split(&splits, split)?)
}

/// A data set that is read through its index.
#[derive(Debug, Args)]
pub(crate) struct IndexedArgs {
    #[command(flatten)]
    data_set: DataSetArgs,
    #[command(flatten)]
    place: IndexPlaceArgs,
}

impl IndexedArgs {
    /// Opens the index; makes it on first use.
    pub(crate) fn open(&self) -> Result<DataSet, Failure> {
        self.place.open(&self.data_set.shards)
    }
}

/// Index options that draw progress.
pub(crate) fn index_options() -> IndexOptions {
    IndexOptions { progress: Arc::new(Bars::default()), ..IndexOptions::default() }
}
