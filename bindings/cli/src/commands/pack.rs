//! `dflop pack`: writes shards from files, manifests and tables.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use dflop_import::{
    ColumnMap, ImportReport, LabelSource, PackOptions, Packed, SkippedSource, SourceFormat, pack_all,
};
use dflop_loader::store::Stores;
use dflop_loader::write::SHARD_BYTES;
use serde::Serialize;

use crate::failure::{Failure, escape_controls};
use crate::output::{Bars, Output, format_bytes, write_json};

/// Write shards from files, manifests, Parquet, Arrow or Hugging Face datasets.
///
/// The content determines each source format. Files and rows that cannot be packed are listed; they do not
/// fail the command.
#[expect(clippy::struct_excessive_bools, reason = "one flag each")]
#[derive(Debug, Args)]
pub(crate) struct PackArgs {
    /// Directories with files or tables, JSON, JSONL or CSV manifests, Parquet or Arrow files; without
    /// `--out` the last source names the output.
    #[arg(required = true, value_name = "SOURCE")]
    sources: Vec<PathBuf>,
    /// Directory or URL of the shards, such as `s3://bucket/prefix/`; must not contain shards yet.
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Format of the sources: files, jsonl, json, csv, parquet, arrow or huggingface [default: recognized].
    #[arg(long, value_name = "FORMAT")]
    format: Option<String>,
    /// Split to pack from tables with several, such as train.
    #[arg(long, value_name = "NAME")]
    split: Option<String>,
    /// Make a column a field: a field extension (`caption=txt`, `photo=jpg`), a column name that loaders know
    /// (`chat=messages`), or the key (`uid=__key__`). Repeat for more columns.
    #[arg(long, value_name = "COLUMN=FIELD")]
    map: Vec<String>,
    /// Source for class labels, which become the field `cls`.
    #[arg(long, value_name = "SOURCE")]
    label_from: Option<LabelFrom>,
    /// Size in bytes at which the next shard starts, before compression.
    #[arg(long, value_name = "N", default_value_t = SHARD_BYTES)]
    shard_bytes: u64,
    /// Number of samples at which the next shard starts [default: no limit].
    #[arg(long, value_name = "N")]
    shard_samples: Option<u64>,
    /// Do not write the index; commands that need it build it on first use.
    #[arg(long)]
    no_index: bool,
    /// Compress shards with Zstandard; such shards do not support range reads.
    #[arg(long)]
    zstd: bool,
    /// Directory that the paths in a manifest or table are relative to [default: the manifest's directory].
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Pack files outside the source: manifest paths that lead out of the root, and links that lead out of a
    /// directory.
    #[arg(long)]
    allow_outside: bool,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

/// Source for class labels.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum LabelFrom {
    /// The source's top directory that contains the file, numbered in name order.
    Directory,
}

#[derive(Debug, Serialize)]
struct PackReport {
    shards: usize,
    samples: u64,
    bytes: u64,
    index: Option<String>,
    #[serde(flatten)]
    taken: ImportReport,
    skipped: Vec<SkippedSource>,
}

pub(crate) fn run(args: &PackArgs, out: &mut Output) -> Result<(), Failure> {
    let (sources, destination) = args.paths()?;
    let packed = pack_all(sources, destination, &args.options()?)?;
    let Packed { shards, samples, bytes, index, skipped, taken } = packed;
    let index = index.map(|path| path.display().to_string());
    let report = PackReport { shards: shards.len(), samples, bytes, index, taken, skipped };
    if args.json { write_json(out, &report) } else { report.print(destination, out) }
}

impl PackArgs {
    /// Returns the sources and the output, which is the last path unless it is named.
    fn paths(&self) -> Result<(&[PathBuf], &Path), Failure> {
        match (&self.out, self.sources.split_last()) {
            (Some(out), _) => Ok((&self.sources, out)),
            (None, Some((out, sources))) if !sources.is_empty() => Ok((sources, out)),
            _ => {
                let reason = "expected `SOURCE OUT` or `SOURCE… --out DIR`, found one path";
                Err(Failure::Misuse(reason.to_owned()))
            }
        }
    }

    fn options(&self) -> Result<PackOptions, Failure> {
        let pair = |text: &String| match text.split_once('=') {
            Some((column, field)) => Ok((column.to_owned(), field.to_owned())),
            None => Err(Failure::Misuse(format!("`--map` expects COLUMN=FIELD, found `{text}`"))),
        };
        let pairs = self.map.iter().map(pair).collect::<Result<Vec<_>, _>>()?;
        let labels = match self.label_from {
            None => LabelSource::Source,
            Some(LabelFrom::Directory) => LabelSource::Directory,
        };
        Ok(PackOptions {
            shard_bytes: self.shard_bytes,
            shard_samples: self.shard_samples,
            is_indexed: !self.no_index,
            is_zstd: self.zstd,
            format: self.format.as_deref().map(str::parse::<SourceFormat>).transpose()?,
            split: self.split.clone(),
            map: ColumnMap::new(pairs)?,
            labels,
            root: self.root.clone(),
            is_outside_allowed: self.allow_outside,
            stores: Stores::default(),
            progress: Arc::new(Bars::default()),
        })
    }
}

impl PackReport {
    fn print(&self, destination: &Path, out: &mut Output) -> Result<(), Failure> {
        let Self { shards, samples, bytes, index, taken, skipped } = self;
        let bytes = format_bytes(*bytes);
        writeln!(out, "{shards} shards, {samples} samples, {bytes} in {}", destination.display())?;
        if let Some(index) = index {
            writeln!(out, "index   {index}")?;
        }
        let fields: Vec<String> =
            taken.fields.iter().map(|(extension, fields)| format!("{fields} {extension}")).collect();
        writeln!(out, "fields  {}", escape_controls(&fields.join(", ")))?;
        for (column, fields) in &taken.columns {
            let fields: Vec<&str> = fields.iter().map(String::as_str).collect();
            writeln!(out, "column  {}", escape_controls(&format!("{column} -> {}", fields.join(", "))))?;
        }
        if !taken.classes.is_empty() {
            writeln!(out, "classes {}", escape_controls(&taken.classes.join(", ")))?;
        }
        for SkippedSource { path, reason } in skipped {
            writeln!(out, "{}", escape_controls(&format!("skipped: {path}: {reason}")))?;
        }
        Ok(())
    }
}
