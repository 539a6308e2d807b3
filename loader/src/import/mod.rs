//! Packs local files, manifests, tables and rows into shards.
//!
//! The source format is detected from the path and the first bytes, unless it is set:
//!
//! | source | samples |
//! | --- | --- |
//! | a directory | files that share their path without extension, such as `a/b.jpg` and `a/b.txt` |
//! | JSON Lines, or a JSON array of objects | one object each: LLaVA-style conversations, captions, `NeMo` manifests |
//! | a JSON object of id → object | one entry each: `SpeechBrain` manifests |
//! | CSV with a header | one row each |
//! | Parquet and Arrow files, directories of them, datasets saved by Hugging Face `datasets` | one row each |
//!
//! Everything that is not packed is in [`Packed::skipped`] with a reason; nothing is lost silently. Samples
//! are read and written one at a time, in an order that depends only on the source, so equal sources produce
//! equal shards. A manifest entry becomes a sample with the media, `txt` with the transcript if it is a
//! recording, `cls` with the label, and `json` with the entry itself, verbatim unless it holds media as
//! base64. A row becomes the same, and the document names the file and the row number. Shards are written by
//! [`crate::write`].

mod account;
mod columnar;
mod directory;
mod document;
mod key;
mod lines;
mod medium;
mod packer;
mod parts;
mod record;
mod row;
mod rows;
mod source;
mod table;
mod tables;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, OutputError, Result};
use crate::files::replace;
use crate::flow::{NoProgress, Progress};
use crate::store::{Stores, is_remote};
use crate::write::{SHARD_BYTES, WrittenShards};

pub use self::account::Taken;
use self::columnar::{TableFile, pack_files};
pub use self::directory::LabelSource;
use self::medium::outside;
use self::packer::Packer;
pub use self::parts::{PackedPart, SourcePart, finish_parts, list_parts, pack_part};
pub use self::row::ColumnMap;
pub use self::rows::{Row, pack_batches, pack_rows};
pub use self::source::SourceFormat;
use self::tables::list_tables;

/// File next to the shards with the class names for the labels, a JSON list.
pub const CLASSES_FILE: &str = "classes.json";

/// Settings for [`pack`].
#[derive(Debug, Clone)]
pub struct PackOptions {
    /// Maximum number of bytes per shard, before compression. Default: [`SHARD_BYTES`].
    pub shard_bytes: u64,
    /// Maximum number of samples per shard; `None` is unlimited. Default: `None`.
    pub shard_samples: Option<u64>,
    /// Whether the index is written, together with the shards. Default: true.
    pub is_indexed: bool,
    /// Whether shards are compressed with Zstandard. Default: false, so that they can be read by range.
    pub is_zstd: bool,
    /// Source format. Default: detected.
    pub format: Option<SourceFormat>,
    /// Split to pack from a source with more than one split. Default: the only split.
    pub split: Option<String>,
    /// Fields for columns whose names and contents do not determine a field. Default: none.
    pub map: ColumnMap,
    /// Source of class labels. Default: the source itself.
    pub labels: LabelSource,
    /// Base directory for relative paths in a manifest, which also replaces a leading placeholder such as
    /// `{data_root}` or `$data_root`. Default: the directory with the manifest or the tables.
    pub root: Option<PathBuf>,
    /// Whether files outside the source are packed: manifest paths that lead out of `root`, and links that
    /// lead out of a directory. Default: false, because manifests and directories may come from third
    /// parties.
    pub is_outside_allowed: bool,
    /// Stores, for shards that are written to a store. Default: the default settings.
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
            format: None,
            split: None,
            map: ColumnMap::default(),
            labels: LabelSource::default(),
            root: None,
            is_outside_allowed: false,
            stores: Stores::default(),
            progress: Arc::new(NoProgress),
        }
    }
}

/// Summary of the shards that [`pack`] wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    /// Shard paths, in order; URLs for shards in a store.
    pub shards: Vec<PathBuf>,
    /// Samples in all shards.
    pub samples: u64,
    /// Payload bytes in all fields, before compression.
    pub bytes: u64,
    /// Index file, unless disabled.
    pub index: Option<PathBuf>,
    /// Files and entries that were not packed, in source order.
    pub skipped: Vec<SkippedSource>,
    /// Fields, columns and classes that were packed.
    pub taken: Taken,
}

/// File, directory or source entry that was not packed.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SkippedSource {
    /// Path of a file or directory, or `FILE:NUMBER` for an entry: the line in JSON Lines or CSV, the
    /// position in JSON, both from 1, the table row from 0.
    pub path: String,
    /// Reason why it was not packed.
    pub reason: String,
}

/// Packs `source` into shards in the directory `out`, a path that is created if missing, or a directory URL
/// in a store.
///
/// A directory is packed recursively, links inside it are followed, each directory is packed once; the sample
/// key is the file path without extension, where dots in the base name become `_`, and the extension follows
/// the last dot, or the last but one before `gz` and similar suffixes. In a manifest the key is the `id`,
/// sanitized in the same way, or the entry number in nine digits. A repeated key has the suffix `_1`, `_2`
/// and so on, even if files for the first key cannot be read: keys depend only on the source. A sample with
/// an unreadable file is skipped entirely.
///
/// # Errors
/// [`Error::Output`] if the kind of `source` is unknown, if it contains no sample, or if a syntax error
/// prevents reading the rest; [`Error::Storage`] if it or a shard cannot be accessed; [`Error::Output`] if
/// `out` contains shards; [`Error::Storage`] if a store rejects a shard; [`Error::Config`] if a setting is
/// invalid. Shards completed before the error are kept.
pub fn pack(source: &Path, out: &Path, options: &PackOptions) -> Result<Packed> {
    pack_all(&[source], out, options)
}

/// Packs multiple sources in sequence into the same shards; see [`pack`].
///
/// # Errors
/// See [`pack`]; [`Error::Config`] without any source.
pub fn pack_all<P: AsRef<Path>>(sources: &[P], out: &Path, options: &PackOptions) -> Result<Packed> {
    let mut described = Vec::with_capacity(sources.len());
    for source in sources.iter().map(AsRef::as_ref) {
        described.push((source, Source::open(source, options)?));
        check_apart(source, out)?;
    }
    let Some((first, Source { format, .. })) = described.first() else {
        return Err(Error::Config { setting: "source", reason: "expected at least one source".to_owned() });
    };
    let mut packer = Packer::new(out, options)?;
    let mut pack_each =
        || described.iter().try_for_each(|(path, source)| source.pack(path, options, &mut packer));
    let outcome = pack_each();
    options.progress.end();
    outcome?;
    finish(packer, out, first, *format)
}

/// Completes the result of a packer for `source` and any further sources.
fn finish(packer: Packer<'_>, out: &Path, source: &Path, format: SourceFormat) -> Result<Packed> {
    let (WrittenShards { shards, samples, bytes, index, .. }, skipped, taken) = packer.finish()?;
    if samples == 0 {
        let reason = no_samples(&skipped, format);
        return Err(Error::Output(OutputError::Pack { path: source.display().to_string(), reason }));
    }
    write_classes(out, &taken.classes)?;
    Ok(Packed { shards, samples, bytes, index, skipped, taken })
}

/// Writes the class names next to local shards, as a JSON list in label order.
fn write_classes(out: &Path, classes: &[String]) -> Result<()> {
    if classes.is_empty() || out.to_str().is_some_and(is_remote) {
        return Ok(());
    }
    let path = out.join(CLASSES_FILE);
    let text = serde_json::to_vec(classes).unwrap_or_default();
    replace(&path, &text).map_err(|source| Error::file(&path, source))
}

/// Source with format and files, if files have to be found first.
struct Source {
    format: SourceFormat,
    tables: Vec<TableFile>,
}

impl Source {
    /// Detects the source format and finds tables.
    fn open(path: &Path, options: &PackOptions) -> Result<Self> {
        let format = options.format.map_or_else(|| SourceFormat::detect(path), Ok)?;
        let mut tables = Vec::new();
        if format == SourceFormat::Table {
            if path.is_dir() {
                tables = list_tables(path, options.split.as_deref())?;
                let is_checked = |_: &&TableFile| !options.is_outside_allowed;
                if let Some(reason) =
                    tables.iter().filter(is_checked).find_map(|table| outside(path, &table.path))
                {
                    return Err(Error::Output(OutputError::Pack {
                        path: path.display().to_string(),
                        reason,
                    }));
                }
            } else {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                tables.push(TableFile { path: path.to_owned(), name });
            }
        } else if options.split.is_some() {
            let reason = format!("a source of the format {format} has no splits; leave it out");
            return Err(Error::Config { setting: "split", reason });
        }
        Ok(Self { format, tables })
    }

    /// Passes all entries to a packer.
    fn pack(&self, path: &Path, options: &PackOptions, packer: &mut Packer<'_>) -> Result<()> {
        packer.enter(path, options);
        match self.format {
            SourceFormat::Files => directory::pack_directory(path, packer),
            SourceFormat::Jsonl => lines::pack_lines(path, packer),
            SourceFormat::Json => document::pack_document(path, packer),
            SourceFormat::Csv => table::pack_table(path, packer),
            SourceFormat::Table => pack_files(&self.tables, packer),
        }
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

fn no_samples(skipped: &[SkippedSource], format: SourceFormat) -> String {
    let first = skipped.first().map(|first| {
        let (all, SkippedSource { path, reason }) = (skipped.len(), first);
        format!("; {all} skipped, the first: `{path}`: {reason}")
    });
    format!("no samples; looked for {}{}", format.sample_description(), first.unwrap_or_default())
}

#[cfg(test)]
mod tests;
