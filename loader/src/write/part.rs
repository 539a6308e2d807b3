//! Names the shards from parallel writers, so that they do not collide and sort by part.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::destination::{Destination, is_partial, remove_abandoned, shard_names};
use crate::error::{Error, OutputError, Result};
use crate::shard::Shard;
use crate::store::Stores;

/// Maximum number of parts in a dataset: part numbers have five digits.
const PARTS_MAX: u32 = 100_000;

/// Part number of a writer and total number of parts. The shards are named `shard-00003-of-00010-000000.tar`,
/// so that a directory lists all shards in part order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ShardPart {
    /// Part index, from 0.
    pub part: u32,
    /// Number of parts.
    pub parts: u32,
}

impl ShardPart {
    /// Checks that the part exists.
    ///
    /// # Errors
    /// [`Error::Config`] if `part` is not below `parts`, or if there are more than 100,000 parts.
    pub fn check(self) -> Result<()> {
        let Self { part, parts } = self;
        if part < parts && parts <= PARTS_MAX {
            return Ok(());
        }
        let reason = format!(
            "expected a part below the number of parts and at most {PARTS_MAX} parts, got part {part} of {parts}"
        );
        Err(Error::Config { setting: "part", reason })
    }

    /// Returns the shard name prefix for the part.
    pub(super) fn prefix(self) -> String {
        let Self { part, parts } = self;
        format!("shard-{part:05}-of-{parts:05}-")
    }

    /// Returns whether a shard with this name may be in the same directory as the shards of this part.
    fn has_sibling(self, name: &str) -> bool {
        let number = name.strip_prefix("shard-").and_then(|rest| rest.split_once("-of-"));
        number.is_some_and(|(number, rest)| {
            let part = number.parse().ok().filter(|&part| part < self.parts);
            part.is_some_and(|part| name.starts_with(&Self { part, ..self }.prefix()) && !rest.is_empty())
        })
    }

    /// Removes the files from an earlier run of this part. Finished shards on a store are kept and later
    /// overwritten.
    ///
    /// # Errors
    /// [`Error::Output`] if a second writer for this part is active, or if the directory contains shards
    /// without a part or with a different number of parts; [`Error::Storage`] if the directory cannot be
    /// listed or a file cannot be removed.
    pub(super) fn clear(self, destination: &Destination) -> Result<()> {
        for name in shard_names(destination)? {
            let shard = destination.shard(&name)?;
            let in_the_way = || Error::Output(OutputError::ShardExists { path: shard.url.to_string() });
            let visible = name.trim_start_matches('.');
            if !visible.starts_with(&self.prefix()) {
                if self.has_sibling(visible) {
                    continue;
                }
                return Err(in_the_way());
            }
            match shard.path() {
                Some(path) if is_partial(path) => remove_abandoned(path).map_err(|_| in_the_way())?,
                Some(path) => fs::remove_file(path).map_err(|source| Error::file(path, source))?,
                None => {}
            }
        }
        Ok(())
    }
}

/// Directory that all parts are written to.
#[derive(Debug)]
pub struct PartDirectory(Destination);

impl PartDirectory {
    /// Opens the directory.
    ///
    /// # Errors
    /// [`Error::Storage`] if it is missing and cannot be created.
    pub fn open(directory: &Path, stores: &Stores) -> Result<Self> {
        Destination::open(directory, stores).map(Self)
    }

    /// Lists the shards by name, including shards under construction.
    ///
    /// # Errors
    /// [`Error::Storage`] if the directory cannot be listed.
    pub fn shards(&self) -> Result<BTreeMap<String, Shard>> {
        shard_names(&self.0)?.into_iter().map(|name| Ok((name.clone(), self.0.shard(&name)?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_by_part_and_other_numbers_of_parts_are_told() {
        let part = |part| ShardPart { part, parts: 12 };
        assert_eq!(part(3).prefix(), "shard-00003-of-00012-");
        assert!(part(2).prefix() < part(10).prefix());
        assert!(part(3).has_sibling("shard-00011-of-00012-000000.tar"));
        for name in ["shard-000017.tar", "shard-00012-of-00012-000000.tar", "shard-00001-of-00010-000000.tar"]
        {
            assert!(!part(3).has_sibling(name), "{name}");
        }
        assert!(part(12).check().is_err() && part(11).check().is_ok());
    }
}
