//! Imports directories, tables and JSON documents of other tools into shards.
//!
//! A source is one of these, told by what it is and by its first bytes, never by a setting:
//!
//! | source | samples |
//! | --- | --- |
//! | a directory | files that share their path without extension, such as `a/b.jpg` and `a/b.txt` |
//! | JSON Lines, or a JSON array of objects | one object each: LLaVA-style conversations, captions, `NeMo` manifests |
//! | a JSON object of id → object | one entry each: `SpeechBrain` manifests |
//! | CSV with a header | one row each |
//!
//! Whatever is not packed is in [`Packed::skipped`] with its reason; nothing is lost silently. Samples are
//! read and written one at a time, in an order that depends on the source alone, so equal sources give equal
//! shards. An entry of a manifest becomes a sample of its media, `txt` with the words if it is a recording,
//! and `json` with the entry itself, word for word. Shards are written by [`crate::write`].

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

use crate::error::{Error, Result};
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
    /// Samples that a shard holds at most; `None` is any number. Default: `None`.
    pub shard_samples: Option<u64>,
    /// Whether the index is written as well, made while the shards are written. Default: yes.
    pub is_indexed: bool,
    /// Whether shards are compressed with Zstandard. Default: no, so that they can be read by range.
    pub is_zstd: bool,
    /// Directory that the paths in a manifest start from, and that stands for a placeholder such as
    /// `{data_root}` or `$data_root` in front of them. Default: the directory of the manifest.
    pub root: Option<PathBuf>,
    /// How the store is reached, where shards go to one. Default: the default settings.
    pub stores: Stores,
    /// Told of every sample. Default: nobody.
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
            stores: Stores::default(),
            progress: Arc::new(NoProgress),
        }
    }
}

/// What [`pack`] has done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    /// Paths of the shards, in order; the URLs of those on a store.
    pub shards: Vec<PathBuf>,
    /// Samples in all shards.
    pub samples: u64,
    /// Payload bytes of all fields, before compression.
    pub bytes: u64,
    /// The index file, if one was wanted.
    pub index: Option<PathBuf>,
    /// What was not packed, in the order met.
    pub skipped: Vec<SkippedSource>,
}

/// Something in a source that was not packed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SkippedSource {
    /// A file or directory, or an entry of a manifest as `MANIFEST:NUMBER`: the line of JSON Lines or CSV,
    /// otherwise the position, from 1.
    pub path: String,
    /// Why.
    pub reason: String,
}

/// Packs `source` into shards in the directory `out`, a path that is made where it is missing, or the URL of
/// a store's.
///
/// A directory is packed with everything below it, links followed, each directory once; the key of a sample
/// is the path of its files without extension, where dots in the base name become `_`, and the extension is
/// what follows the last dot, or the last but one in front of `gz` and its like. In a manifest the key is the
/// `id`, made safe in the same way, or the number of the entry in nine digits where it has none. A key that
/// comes again gets `_1`, `_2` and so on behind it, whether or not the files of the first could be read: keys
/// are those of the source. A sample of which a file cannot be read is skipped whole.
///
/// # Errors
/// [`Error::Pack`] if `source` is none of the known kinds, gives no sample at all, or has a syntax error
/// behind which nothing can be read; [`Error::File`] if it or a shard cannot be accessed;
/// [`Error::ShardExists`] if `out` holds shards; [`Error::Upload`] if a store refuses one; [`Error::Config`]
/// if a setting makes no sense. Whole shards that were written before stay.
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
        return Err(Error::Pack { path: source.display().to_string(), reason });
    }
    Ok(packed)
}

/// Gives all entries of a source to a packer.
fn pack_source(source: &Path, kind: ImportSource, packer: &mut Packer<'_>) -> Result<()> {
    match kind {
        ImportSource::Directory => directory::pack_directory(source, packer),
        ImportSource::Lines => lines::pack_lines(source, packer),
        ImportSource::Document => document::pack_document(source, packer),
        ImportSource::Table => table::pack_table(source, packer),
    }
}

/// Shards inside the source would be packed themselves, now or by the next run.
fn check_apart(source: &Path, out: &Path) -> Result<()> {
    if out.to_str().is_some_and(is_remote) {
        return Ok(());
    }
    let resolve = |path: &Path| path.canonicalize().or_else(|_| std::path::absolute(path));
    let (Ok(source), Ok(inside)) = (resolve(source), resolve(out)) else { return Ok(()) };
    if source.is_dir() && inside.starts_with(&source) {
        let reason = format!("lies inside the source `{}`; name a directory beside it", source.display());
        return Err(Error::Pack { path: out.display().to_string(), reason });
    }
    Ok(())
}

fn no_samples(skipped: &[SkippedSource], kind: ImportSource) -> String {
    let first = skipped.first().map(|first| {
        let (all, SkippedSource { path, reason }) = (skipped.len(), first);
        format!("; {all} skipped, the first: `{path}`: {reason}")
    });
    format!("no samples; looked for {}{}", kind.looked_for(), first.unwrap_or_default())
}

#[cfg(test)]
mod tests;
