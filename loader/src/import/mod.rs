//! Packs local files and manifests into shards.
//!
//! The kind of a source is detected from the path and its first bytes, never configured:
//!
//! | source | samples |
//! | --- | --- |
//! | a directory | files that share their path without extension, such as `a/b.jpg` and `a/b.txt` |
//! | JSON Lines, or a JSON array of objects | one object each: LLaVA-style conversations, captions, `NeMo` manifests |
//! | a JSON object of id → object | one entry each: `SpeechBrain` manifests |
//! | CSV with a header | one row each |
//!
//! Everything that is not packed is in [`Packed::skipped`] with its reason; nothing is lost silently. Samples
//! are read and written one at a time, in an order that depends on the source alone, so equal sources give
//! equal shards. An entry of a manifest becomes a sample of its media, of `txt` with the transcript if it is
//! a recording, and of `json` with the entry itself, verbatim. Shards are written by [`crate::write`].

mod directory;
mod document;
mod key;
mod lines;
mod medium;
mod packer;
mod parts;
mod record;
mod source;
mod table;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, OutputError, Result};
use crate::flow::{NoProgress, Progress};
use crate::store::{Stores, is_remote};
use crate::write::SHARD_BYTES;

use self::packer::Packer;
pub use self::parts::{PackedPart, SourcePart, finish_parts, list_parts, pack_part};
use self::source::ImportSource;

/// Settings of [`pack`].
#[derive(Debug, Clone)]
pub struct PackOptions {
    /// Limit of one shard in bytes, before compression. Default: [`SHARD_BYTES`].
    pub shard_bytes: u64,
    /// Most samples of one shard; `None` is unlimited. Default: `None`.
    pub shard_samples: Option<u64>,
    /// Whether the index is written, together with the shards. Default: true.
    pub is_indexed: bool,
    /// Whether shards are compressed with Zstandard. Default: false, so that they can be read by range.
    pub is_zstd: bool,
    /// Base directory of relative paths in a manifest, which also replaces a leading placeholder such as
    /// `{data_root}` or `$data_root`. Default: the directory of the manifest.
    pub root: Option<PathBuf>,
    /// Whether files outside of the source are packed: paths of a manifest that lead out of `root`, and links
    /// that lead out of a directory. Default: false, because manifests and directories come from others.
    pub is_outside_allowed: bool,
    /// Stores, for shards that go to one. Default: the default settings.
    pub stores: Stores,
    /// Listener that is notified of every sample. Default: none.
    pub progress: Arc<dyn Progress>,
}

impl Default for PackOptions {
    fn default() -> Self {
        Self {
            shard_bytes: SHARD_BYTES,
            shard_samples: None,
            is_indexed: true,
            is_zstd: false,
            root: None,
            is_outside_allowed: false,
            stores: Stores::default(),
            progress: Arc::new(NoProgress),
        }
    }
}

/// Summary of what [`pack`] wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    /// Paths of the shards, in order; URLs for shards in a store.
    pub shards: Vec<PathBuf>,
    /// Samples in all shards.
    pub samples: u64,
    /// Payload bytes of all fields, before compression.
    pub bytes: u64,
    /// Index file, unless disabled.
    pub index: Option<PathBuf>,
    /// Files and entries that were not packed, in the order of the source.
    pub skipped: Vec<SkippedSource>,
}

/// File, directory or entry of a source that was not packed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SkippedSource {
    /// Path of a file or directory, or `MANIFEST:NUMBER` of an entry: the line of JSON Lines or CSV,
    /// otherwise the position, from 1.
    pub path: String,
    /// Reason why it was not packed.
    pub reason: String,
}

/// Packs `source` into shards in the directory `out`, a path that is created if missing, or the URL of a
/// directory in a store.
///
/// A directory is packed recursively, links inside it are followed, each directory is packed once; the key of
/// a sample is the path of its files without extension, where dots in the base name become `_`, and the
/// extension follows the last dot, or the last but one before `gz` and similar suffixes. In a manifest the
/// key is the `id`, made safe in the same way, or the number of the entry in nine digits. A repeated key gets
/// the suffix `_1`, `_2` and so on, even if files of the first cannot be read: keys depend on the source
/// alone. A sample with an unreadable file is skipped as a whole.
///
/// # Errors
/// [`Error::Output`] if the kind of `source` is unknown, if it contains no sample, or if a syntax error
/// prevents reading the rest; [`Error::Storage`] if it or a shard cannot be accessed; [`Error::Output`] if
/// `out` contains shards; [`Error::Storage`] if a store rejects one; [`Error::Config`] if a setting is
/// invalid. Shards completed before the error are kept.
pub fn pack(source: &Path, out: &Path, options: &PackOptions) -> Result<Packed> {
    let kind = ImportSource::detect(source)?;
    check_apart(source, out)?;
    let mut packer = Packer::new(source, out, options)?;
    let outcome = pack_source(source, kind, &mut packer);
    options.progress.end();
    outcome?;
    let packed = packer.finish()?;
    if packed.samples == 0 {
        let reason = no_samples(&packed.skipped, kind);
        return Err(Error::Output(OutputError::Pack { path: source.display().to_string(), reason }));
    }
    Ok(packed)
}

/// Passes all entries of a source to a packer.
fn pack_source(source: &Path, kind: ImportSource, packer: &mut Packer<'_>) -> Result<()> {
    match kind {
        ImportSource::Directory => directory::pack_directory(source, packer),
        ImportSource::Lines => lines::pack_lines(source, packer),
        ImportSource::Document => document::pack_document(source, packer),
        ImportSource::Table => table::pack_table(source, packer),
    }
}

/// Rejects an output inside the source, where this run or the next would pack the shards themselves.
fn check_apart(source: &Path, out: &Path) -> Result<()> {
    if out.to_str().is_some_and(is_remote) {
        return Ok(());
    }
    let resolve = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path));
    let (Ok(source), Ok(inside)) = (resolve(source), resolve(out)) else { return Ok(()) };
    if source.is_dir() && inside.starts_with(&source) {
        let reason =
            format!("lies inside the source `{}`; choose a directory outside of it", source.display());
        return Err(Error::Output(OutputError::Pack { path: out.display().to_string(), reason }));
    }
    Ok(())
}

fn no_samples(skipped: &[SkippedSource], kind: ImportSource) -> String {
    let first = skipped.first().map(|first| {
        let (all, SkippedSource { path, reason }) = (skipped.len(), first);
        format!("; {all} skipped, the first: `{path}`: {reason}")
    });
    format!("no samples; looked for {}{}", kind.sample_description(), first.unwrap_or_default())
}

#[cfg(test)]
mod tests;
