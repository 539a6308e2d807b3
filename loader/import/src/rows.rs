//! Packs rows that a caller has in memory or creates in sequence: record batches, and rows of values.

use std::path::Path;

use arrow_array::RecordBatch;
use serde::{Deserialize, Deserializer};

use super::columnar::{declare, pack_batch};
use super::options::{PackOptions, SourceFormat};
use super::pack::{check_apart, finish};
use super::packer::Packer;
use super::record::Packed;
use super::row::{Columns, RowRules};
use dflop_loader::error::Result;

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
/// The errors of [`pack`](crate::pack) that concern `out` and the rows; the first error from `rows`.
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
/// The errors of [`pack`](crate::pack) that concern `out` and the rows; the first error from `batches`.
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
