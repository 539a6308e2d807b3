//! Uses the files that other tools keep about shards: Energon, wids, webshart.
//!
//! Their files are hints, not the truth. Numbers of samples and lengths of files are compared with the
//! headers; a difference is a warning with both numbers. Header locations let a shard be read in many
//! parallel ranges instead of header by header ([`walk`]), which pays off where every range is a request; the
//! rows are the same, because every header is still read and grouped by this crate's own rules. If a file
//! does not match its shard, there is a warning and the shard is read from its start.
//!
//! The parsers take bytes, so that files outside of a local disk can be read by the same code.

pub mod energon;
pub mod walk;
pub mod webshart;

mod beside;
mod yaml;

pub(super) use self::beside::{Claims, HeaderLayout, claims, layout};

use super::build::BuiltShard;
use super::schema::IndexedShard;
use crate::error::Skipped;
use crate::shard::Shard;

/// Use of other tools' files when an index is built.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ForeignIndexes {
    /// Nothing.
    Ignore,
    /// Compares numbers of samples and lengths; a difference is a warning.
    #[default]
    Check,
    /// Also reads headers at the locations in those files; the rows are the same. Useful where every read has
    /// a high latency.
    Follow,
}

/// Compares the claims of other tools about a shard with its headers.
pub(super) fn differences(
    shard: &Shard,
    indexed: &IndexedShard,
    skipped: &[Skipped],
    claims: &Claims,
) -> Vec<String> {
    let bad = skipped.iter().filter(|skipped| skipped.key.is_some()).count() as u64;
    let samples = indexed.samples + bad;
    let url = &shard.url;
    let mut warnings = Vec::new();
    for (source, claimed) in &claims.bytes {
        if *claimed != indexed.bytes {
            let found = indexed.bytes;
            warnings
                .push(format!("`{source}` claims that shard `{url}` has {claimed} bytes; it has {found}"));
        }
    }
    for (source, claimed) in &claims.samples {
        if *claimed != samples {
            let warning = format!("`{source}` claims that shard `{url}` has {claimed} samples");
            warnings.push(format!("{warning}; its headers show {samples}, which are used"));
        }
    }
    warnings.extend(claims.warnings.iter().cloned());
    warnings
}

/// Compares the starts of samples according to another tool with those in the headers.
pub(super) fn grouping_difference(
    shard: &Shard,
    built: &BuiltShard,
    layout: &HeaderLayout,
) -> Option<String> {
    let begins = layout.samples.as_ref()?;
    let bad = built.skipped.iter().filter(|skipped| skipped.key.is_some()).count();
    let found = built.columns.offsets.len() + bad;
    let elsewhere = built.columns.offsets.iter().find(|offset| begins.binary_search(offset).is_err());
    let (source, url, claimed) = (&layout.source, &shard.url, begins.len());
    let warning = format!("`{source}` groups shard `{url}` otherwise");
    match elsewhere {
        Some(offset) => Some(format!("{warning}: no sample starts at offset {offset}; the headers show one")),
        None if claimed != found => Some(format!("{warning}: {claimed} samples; the headers show {found}")),
        None => None,
    }
}
