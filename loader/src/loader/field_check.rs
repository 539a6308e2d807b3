//! Checks that named fields exist, so that a misspelled name does not go unnoticed.
//!
//! With an index the names are checked before anything is read. A stream without an index is checked after
//! the first epoch.

use std::collections::BTreeSet;

use futures::StreamExt;

use crate::dataset::Dataset;
use crate::decode::Transforms;
use crate::error::{Error, Result, SelectionError};
use crate::shard::{FieldSelection, Shard, ShardItem, is_rereadable, scan_shards};

/// Number of samples whose fields a message names.
const LISTED_SAMPLES: usize = 16;

/// Checks that the datasets have every selected field and the fields for every transform.
///
/// # Errors
/// [`Error::Selection`].
pub(super) fn check_indexed(
    datasets: &[Dataset],
    fields: &FieldSelection,
    transforms: &Transforms,
) -> Result<()> {
    let found: BTreeSet<&str> = datasets.iter().flat_map(|dataset| dataset.index().extensions()).collect();
    let samples = datasets.iter().map(Dataset::len).sum();
    let missing = |setting, names: &FieldSelection| {
        let unmatched = names.unmatched(&found.iter().copied())?;
        Some(no_field(setting, &unmatched, samples, &found))
    };
    let of_transforms = transforms.selections().find_map(|names| missing("transforms", names));
    missing("fields", fields).or(of_transforms).map_or(Ok(()), Err)
}

/// Returns the error for a stream in which no sample had any of the named fields; reads the first samples
/// again to list the available fields.
pub(super) async fn no_field_in_stream(
    setting: &'static str,
    names: &FieldSelection,
    samples: u64,
    shards: &[Shard],
) -> Error {
    let shards = shards.iter().filter(|shard| is_rereadable(shard)).take(1).cloned().collect();
    let first: Vec<_> = scan_shards(shards).take(LISTED_SAMPLES).collect().await;
    let good = first.iter().filter_map(|item| match item {
        Ok(ShardItem::Sample(sample)) => Some(sample),
        _ => None,
    });
    let found = good.flat_map(|sample| sample.fields.iter().map(|field| &*field.extension)).collect();
    no_field(setting, names, samples, &found)
}

fn no_field(setting: &'static str, names: &FieldSelection, samples: u64, found: &BTreeSet<&str>) -> Error {
    let found = found.iter().map(|&extension| extension.to_owned()).collect();
    Error::Selection(SelectionError::NoField { setting, fields: names.to_string(), samples, found })
}
