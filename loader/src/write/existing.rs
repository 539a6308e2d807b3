//! Finds existing shards in a destination before a writer starts.

use std::fs;
use std::io;
use std::path::Path;

use super::destination::Destination;
use crate::error::{Error, OutputError, Result};
use crate::shard::{PARTIAL, Shard};
use crate::store::file;

/// Returns the first file that a writer would add to, or that a killed writer left.
pub(super) fn find_shard(destination: &Destination) -> Result<Option<Shard>> {
    let names = shard_names(destination)?;
    names.first().map(|name| destination.shard(name)).transpose()
}

/// Finished shards in a directory, and the next free number.
#[derive(Debug, Default)]
pub(super) struct Existing {
    /// Finished shards in name order.
    pub(super) shards: Vec<Shard>,
    /// First free number.
    pub(super) next_number: usize,
}

impl Existing {
    /// Lists the finished shards and removes the remains of killed writers.
    ///
    /// # Errors
    /// [`Error::Output`] if a second writer is active in the directory, or if a shard has a name that no
    /// writer assigns; [`Error::Storage`] if the directory cannot be listed.
    pub(super) fn scan(destination: &Destination) -> Result<Self> {
        let mut existing = Self::default();
        for name in shard_names(destination)? {
            let shard = destination.shard(&name)?;
            let in_the_way = || Error::Output(OutputError::ShardExists { path: shard.url.to_string() });
            if let Some(partial) = shard.path().filter(|path| is_partial(path)) {
                remove_abandoned(partial).map_err(|_| in_the_way())?;
                continue;
            }
            let number = shard_number(Path::new(&name)).ok_or_else(in_the_way)?;
            existing.next_number = existing.next_number.max(number + 1);
            existing.shards.push(shard);
        }
        Ok(existing)
    }
}

/// Returns the names of shards and partial shards, in order.
pub(super) fn shard_names(destination: &Destination) -> Result<Vec<String>> {
    let mut names = destination.names()?;
    names.retain(|name| name.trim_start_matches('.').starts_with("shard-") && name.contains(".tar"));
    names.sort_unstable();
    Ok(names)
}

pub(super) fn is_partial(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == PARTIAL)
}

/// Removes a file under construction unless the writer is alive and holds the file lock.
pub(super) fn remove_abandoned(partial: &Path) -> io::Result<()> {
    let file = file::open(partial)?;
    file.try_lock()?;
    fs::remove_file(partial)
}

/// Returns the number in `shard-000017.tar` or `shard-000017.tar.zst`.
fn shard_number(path: &Path) -> Option<usize> {
    let name = path.file_name()?.to_str()?;
    let (digits, ending) = name.strip_prefix("shard-")?.split_once('.')?;
    let is_number = digits.len() >= 6 && digits.bytes().all(|byte| byte.is_ascii_digit());
    if is_number && matches!(ending, "tar" | "tar.zst") { digits.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_a_writer_gives_have_a_number() {
        let number = |name: &str| shard_number(&Path::new("d").join(name));
        assert_eq!(number("shard-000017.tar"), Some(17));
        assert_eq!(number("shard-1000000.tar.zst"), Some(1_000_000));
        for name in ["shard-17.tar", "shard-+00017.tar", "shard-000017.tar.gz", "shard-.tar", "x-000017.tar"]
        {
            assert_eq!(number(name), None, "{name}");
        }
    }
}
