//! Packs sources, or rows from a caller, into shards in a single run.
//!
//! A caller has rows in memory or creates them in sequence: record batches, and rows of values.

use crate::columnar::{declare, pack_batch};
use crate::options::{PackOptions, SourceFormat};
use crate::packer::Packer;
use crate::record::{Packed, SkippedSource};
use crate::row::{Columns, RowRules};
use crate::source::Source;
use arrow_array::RecordBatch;
use dflop_loader::error::{Error, OutputError, Result};
use dflop_loader::files::replace;
use dflop_loader::store::is_remote;
use dflop_loader::write::WrittenShards;
use serde::{Deserialize, Deserializer};
use std::path::Path;

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

/// Row that a caller decoded, for [`pack_rows`].
#[derive(Debug)]
pub struct Row {
    file: String,
    number: u64,
    columns: std::result::Result<Columns, String>,
}

impl Row {
    /// Reads the columns of a row: pairs of name and value, in order. Values are JSON values, and bytes where
    /// there is a medium.
    ///
    /// - `file`, `number`: file and row number in it, for the document and the account
    ///
    /// Columns that cannot be read are the reason for skipping the row.
    pub fn read<'de, D: Deserializer<'de>>(file: String, number: u64, columns: D) -> Self {
        let columns = Columns::deserialize(columns).map_err(|error| error.to_string());
        Self { file, number, columns }
    }

    /// Creates a row that is skipped for a reason.
    #[must_use]
    pub fn skipped(file: String, number: u64, reason: String) -> Self {
        Self { file, number, columns: Err(reason) }
    }
}

/// Packs rows into shards in the directory `out`. Columns become fields as in a table file.
///
/// - `source`: directory that the rows come from, named in messages; paths in the rows start from it, unless
///   a root is set
///
/// # Errors
/// The errors of [`pack`] that concern `out` and the rows; the first error from `rows`.
pub fn pack_rows(
    rows: impl Iterator<Item = Result<Row>>,
    source: &Path,
    out: &Path,
    options: &PackOptions,
) -> Result<Packed> {
    check_apart(source, out)?;
    let mut packer = Packer::new(out, options)?;
    packer.enter(source, options);
    packer.begin(0);
    let rules = RowRules::new(&options.map);
    let pack_each = || -> Result<()> {
        for row in rows {
            let Row { file, number, columns } = row?;
            packer.add_row(&file, number, || columns, &rules)?;
        }
        Ok(())
    };
    let outcome = pack_each();
    options.progress.end();
    outcome?;
    finish(packer, out, source, SourceFormat::Table)
}

/// Packs the rows of record batches, with equal schemas, into shards in the directory `out`.
///
/// Columns become fields as in a table file; `name` replaces the file in row documents and in messages.
/// Hugging Face `datasets` features in the schema metadata are read.
///
/// # Errors
/// The errors of [`pack`] that concern `out` and the rows; the first error from `batches`.
pub fn pack_batches(
    batches: impl Iterator<Item = Result<RecordBatch>>,
    name: &str,
    out: &Path,
    options: &PackOptions,
) -> Result<Packed> {
    let mut packer = Packer::new(out, options)?;
    packer.begin(0);
    let outcome = add_batches(batches, name, &mut packer, options);
    options.progress.end();
    outcome?;
    finish(packer, out, Path::new(name), SourceFormat::Table)
}

fn add_batches(
    batches: impl Iterator<Item = Result<RecordBatch>>,
    name: &str,
    packer: &mut Packer<'_>,
    options: &PackOptions,
) -> Result<()> {
    let mut rules = None;
    let mut row = 0;
    for batch in batches {
        let batch = batch?;
        let rules = rules.get_or_insert_with(|| {
            let mut rules = RowRules::new(&options.map);
            declare(batch.schema_ref(), &mut rules);
            packer.set_classes(rules.label_classes());
            rules
        });
        pack_batch(&batch, name, &mut row, rules, packer)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_loader::error::{Error, OutputError};

    fn row(file: &str, number: u64, columns: &str) -> Row {
        Row::read(file.to_owned(), number, &mut serde_json::Deserializer::from_str(columns))
    }

    #[test]
    fn rows_of_a_caller_are_samples_and_the_rest_is_skipped_with_a_reason() {
        let directory = tempfile::tempdir().unwrap();
        let (source, out) = (directory.path().join("source"), directory.path().join("out"));
        std::fs::create_dir(&source).unwrap();
        std::fs::write(source.join("a.jpg"), b"\xff\xd8\xff\xe0").unwrap();
        let rows = [
            row("a", 0, r#"[["id", "x.y"], ["text", "t"]]"#),
            row("a", 1, r#"[["path", "a.jpg"]]"#),
            row("b", 0, r#"[[1, "t"]]"#),
            Row::skipped("b".to_owned(), 1, "broken".to_owned()),
        ];
        let packed = pack_rows(rows.into_iter().map(Ok), &source, &out, &PackOptions::default()).unwrap();
        assert_eq!((packed.samples, packed.taken.fields["jpg"]), (2, 1));
        let skipped: Vec<String> =
            packed.skipped.iter().map(|skip| format!("{}: {}", skip.path, skip.reason)).collect();
        assert!(skipped[0].starts_with("b:0: invalid type: integer"), "{skipped:?}");
        assert_eq!(skipped[1..], ["b:1: broken"]);
    }

    #[test]
    fn a_caller_that_fails_ends_packing_and_shards_inside_the_source_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (source, out) = (directory.path().join("source"), directory.path().join("out"));
        std::fs::create_dir(&source).unwrap();
        let rows = || [Ok(row("a", 0, r#"[["text", "t"]]"#)), Err(Error::StageEnded { stage: "rows" })];
        let options = PackOptions::default();
        let error = pack_rows(rows().into_iter(), &source, &out, &options).unwrap_err();
        assert!(matches!(error, Error::StageEnded { .. }) && !out.join(".dflop").exists(), "{error}");
        let error = pack_rows(rows().into_iter(), &source, &source.join("out"), &options).unwrap_err();
        assert!(matches!(error, Error::Output(OutputError::Pack { .. })), "{error}");
    }
}
