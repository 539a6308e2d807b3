//! Packs sources into shards in a single run.

use std::path::Path;

use dflop_loader::error::{Error, OutputError, Result};
use dflop_loader::files::replace;
use dflop_loader::store::is_remote;
use dflop_loader::write::WrittenShards;

use super::options::{PackOptions, SourceFormat};
use super::packer::Packer;
use super::record::{Packed, SkippedSource};
use super::source::Source;

/// File next to the shards with the class names for the labels, a JSON list.
pub const CLASSES_FILE: &str = "classes.json";

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
pub(super) fn finish(packer: Packer<'_>, out: &Path, source: &Path, format: SourceFormat) -> Result<Packed> {
    let (WrittenShards { shards, samples, bytes, index, .. }, skipped, taken) = packer.finish()?;
    if samples == 0 {
        let reason = no_samples(&skipped, format);
        return Err(Error::Output(OutputError::Pack { path: source.display().to_string(), reason }));
    }
    write_classes(out, &taken.classes)?;
    Ok(Packed { shards, samples, bytes, index, skipped, taken })
}

/// Writes the class names next to local shards, as a JSON list in label order.
pub(super) fn write_classes(out: &Path, classes: &[String]) -> Result<()> {
    if classes.is_empty() || out.to_str().is_some_and(is_remote) {
        return Ok(());
    }
    let path = out.join(CLASSES_FILE);
    let text = serde_json::to_vec(classes).unwrap_or_default();
    replace(&path, &text).map_err(|source| Error::file(&path, source))
}

/// Rejects an output inside the source, where this run or the next would pack the shards themselves.
pub(super) fn check_apart(source: &Path, out: &Path) -> Result<()> {
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

pub(super) fn no_samples(skipped: &[SkippedSource], format: SourceFormat) -> String {
    let first = skipped.first().map(|first| {
        let (all, SkippedSource { path, reason }) = (skipped.len(), first);
        format!("; {all} skipped, the first: `{path}`: {reason}")
    });
    format!("no samples; looked for {}{}", format.sample_description(), first.unwrap_or_default())
}
