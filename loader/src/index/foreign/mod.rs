//! Reads the index files of other tools, as hints: Energon, wids, webshart.
//!
//! Their files are hints, never truth. Numbers of samples and lengths of files are compared with what the
//! headers show; a difference is a warning that names both. Places of headers let a shard be read in many
//! ranges at once instead of header by header ([`walk`]), which pays where every range is a request; the rows
//! are the same, because every header is still read and grouped by this project's own rules. A file that does
//! not fit its shard is a warning, and the shard is read from its beginning.
//!
//! The parsers take bytes, so that files which lie elsewhere than on a local disk can be read by the same
//! code.

pub mod energon;
pub mod walk;
pub mod webshart;

mod beside;
mod yaml;

pub(super) use self::beside::{Claims, HeaderLayout, claims, layout};

use super::build::BuiltShard;
use crate::shard::Shard;

/// Use of the index files of other tools when an index is made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ForeignIndexes {
    /// Nothing.
    Ignore,
    /// Numbers of samples and lengths are compared; a difference is a warning.
    #[default]
    Check,
    /// The same, and headers are read where those files say that they are; the rows are the same. Worth its
    /// while where every read takes long.
    Follow,
}

/// Compares what other tools claim of a shard with what its headers have shown.
pub(super) fn differences(shard: &Shard, built: &BuiltShard, claims: &Claims) -> Vec<String> {
    let bad = built.skipped.iter().filter(|skipped| skipped.key.is_some()).count() as u64;
    let samples = built.shard.samples + bad;
    let url = &shard.url;
    let mut warnings = Vec::new();
    for (source, claimed) in &claims.bytes {
        if *claimed != built.shard.bytes {
            let found = built.shard.bytes;
            warnings.push(format!("`{source}` says that shard `{url}` has {claimed} bytes; it has {found}"));
        }
    }
    for (source, claimed) in &claims.samples {
        if *claimed != samples {
            let warning = format!("`{source}` says that shard `{url}` has {claimed} samples");
            warnings.push(format!("{warning}; its headers show {samples}, which is used"));
        }
    }
    warnings.extend(claims.warnings.iter().cloned());
    warnings
}

/// Compares where another tool lets samples begin with where the headers show them to begin.
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
        Some(offset) => Some(format!("{warning}: no sample begins at offset {offset}; the headers show one")),
        None if claimed != found => Some(format!("{warning}: {claimed} samples; the headers show {found}")),
        None => None,
    }
}
