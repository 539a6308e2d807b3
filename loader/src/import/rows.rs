//! Packs record batches that a caller has in memory or creates in sequence.

use std::path::Path;

use arrow_array::RecordBatch;

use super::columnar::{declare, pack_batch};
use super::packer::Packer;
use super::row::RowRules;
use super::source::SourceFormat;
use super::{PackOptions, Packed, finish};
use crate::error::Result;

/// Packs the rows of record batches, with equal schemas, into shards in the directory `out`.
///
/// Columns become fields as in a table file; `name` replaces the file in row documents and in messages.
/// Hugging Face `datasets` features in the schema metadata are read.
///
/// # Errors
/// The errors of [`pack`](super::pack) that concern `out` and the rows; the first error from `batches`.
pub fn pack_batches(
    batches: impl Iterator<Item = Result<RecordBatch>>,
    name: &str,
    out: &Path,
    options: &PackOptions,
) -> Result<Packed> {
    let mut packer = Packer::new(out, options)?;
    packer.begin(0);
    let outcome = pack_rows(batches, name, &mut packer, options);
    options.progress.end();
    outcome?;
    finish(packer, out, Path::new(name), SourceFormat::Table)
}

fn pack_rows(
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
