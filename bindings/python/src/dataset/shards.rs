//! Lists the shards in a dataset.

use dflop_loader::error::SelectionError;
use dflop_loader::shard::{Shard, ShardAccess, expand_shards_in};
use dflop_loader::store::{ReadMode, ShardCache, Stores};
use pyo3::prelude::*;

use crate::error::DflopError;

/// Settings for the shard stores.
pub(super) struct ShardSettings {
    pub(super) cache: Option<ShardCache>,
    pub(super) requests_max: usize,
    pub(super) retry_seconds: u64,
    pub(super) read: ReadMode,
    pub(super) allow_pipe: bool,
    pub(super) allow_outside: bool,
}

impl ShardSettings {
    /// Lists the shards that patterns name.
    ///
    /// # Errors
    /// `ConfigError` if a pattern cannot be expanded or a local shard does not exist.
    pub(super) fn list(self, patterns: &[String]) -> Result<Vec<Shard>, DflopError> {
        let mut stores = Stores::builder()
            .requests_max(self.requests_max)
            .retry_seconds(self.retry_seconds)
            .read(self.read);
        if let Some(cache) = self.cache {
            stores = stores.cache(cache);
        }
        let access =
            ShardAccess::new(&stores.build()?).allow_pipe(self.allow_pipe).allow_outside(self.allow_outside);
        let shards = expand_shards_in(patterns, &access)?;
        check_present(&shards)?;
        Ok(shards)
    }
}

/// Checks that local shards exist; remote shards are not checked.
fn check_present(shards: &[Shard]) -> Result<(), DflopError> {
    let is_missing = |shard: &&Shard| shard.path().is_some_and(|path| !path.exists());
    let Some(missing) = shards.iter().find(is_missing) else { return Ok(()) };
    let (pattern, reason) = (missing.url.to_string(), "no such file or directory".to_owned());
    Err(dflop_loader::Error::from(SelectionError::ShardList { pattern, reason }).into())
}

/// Parses the access mode for local and cached shards.
pub(super) fn parse_read(name: &str) -> PyResult<ReadMode> {
    Ok(match name {
        "auto" => ReadMode::Auto,
        "mmap" => ReadMode::Mmap,
        "pread" => ReadMode::Pread,
        _ => {
            let reason = format!("expected auto, mmap or pread, found `{name}`");
            return Err(DflopError::config("read", reason).into());
        }
    })
}
