//! Reads the splits from a dataset prepared with Energon.

use std::path::Path;

use super::{CheckedSplit, Splits, invalid};
use crate::error::Result;
use crate::index::foreign::energon::{EnergonSplit, splits};

/// Number of directories searched for `.nv-meta`: the shard directory and the directories above it.
const DIRECTORIES_UP_MAX: usize = 4;

/// Finds the splits for the dataset that contains the shards in `directory`; `None` without Energon files.
pub(super) fn find(directory: &Path) -> Result<Option<Splits>> {
    let directory = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    for root in directory.ancestors().take(DIRECTORIES_UP_MAX) {
        if let Some(named) = splits(root)? {
            return of(root, named).map(Some);
        }
    }
    Ok(None)
}

fn of(root: &Path, named: Vec<EnergonSplit>) -> Result<Splits> {
    let checked = named.into_iter().map(|split| Ok((split.name.clone(), checked(root, split)?)));
    let splits = Splits {
        origin: root.join(".nv-meta").display().to_string(),
        by_name: checked.collect::<Result<_>>()?,
        overlap_hint: "Energon has no word for that; state them in a `splits.json` if that is meant",
    };
    splits.check_overlaps()?;
    Ok(splits)
}

fn checked(root: &Path, split: EnergonSplit) -> Result<CheckedSplit> {
    let excluded = split.excluded_samples.iter().map(|sample| {
        let parts = sample.rsplit_once('/').map(|(shard, key)| (shard.to_owned(), key.to_owned()));
        parts
            .ok_or_else(|| invalid(format!("split `{}` excludes `{sample}`, which is no sample", split.name)))
    });
    Ok(CheckedSplit {
        excluded: excluded.collect::<Result<_>>()?,
        shards: Some(split.shards.into_iter().collect()),
        directory: Some(root.to_owned()),
        ..CheckedSplit::default()
    })
}
