//! `dflop pack`: writes shards from a directory or a manifest.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use dflop_loader::import::{PackOptions, SkippedSource, pack};
use dflop_loader::store::Stores;
use dflop_loader::write::SHARD_BYTES;
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{Output, format_bytes, write_json};
use crate::progress::Bars;

/// Write shards from a directory, a LLaVA-style JSON or JSONL file, or an audio manifest.
///
/// Files that cannot be packed are listed; they do not fail the command.
#[expect(clippy::struct_excessive_bools, reason = "one flag each")]
#[derive(Debug, Args)]
pub(crate) struct PackArgs {
    /// Directory, or JSON, JSONL or CSV manifest.
    source: PathBuf,
    /// Directory or URL of the shards, such as `s3://bucket/prefix/`; must not contain shards yet.
    out: PathBuf,
    /// Size in bytes at which the next shard starts, before compression.
    #[arg(long, value_name = "N", default_value_t = SHARD_BYTES)]
    shard_bytes: u64,
    /// Number of samples at which the next shard starts [default: no limit].
    #[arg(long, value_name = "N")]
    shard_samples: Option<u64>,
    /// Do not write the index; commands that need it build it on first use.
    #[arg(long)]
    no_index: bool,
    /// Compress shards with Zstandard; ranges of such shards cannot be read.
    #[arg(long)]
    zstd: bool,
    /// Directory that the paths of a manifest are relative to [default: the manifest's directory].
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// Pack files outside of the source: paths of a manifest that lead out of its root, and links that lead
    /// out of a directory.
    #[arg(long)]
    allow_outside: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct PackReport {
    shards: usize,
    samples: u64,
    bytes: u64,
    index: Option<String>,
    skipped: Vec<SkippedSource>,
}

pub(crate) fn run(args: &PackArgs, out: &mut Output) -> Result<(), Failure> {
    let options = PackOptions {
        shard_bytes: args.shard_bytes,
        shard_samples: args.shard_samples,
        is_indexed: !args.no_index,
        is_zstd: args.zstd,
        root: args.root.clone(),
        is_outside_allowed: args.allow_outside,
        stores: Stores::default(),
        progress: Arc::new(Bars::default()),
    };
    let packed = pack(&args.source, &args.out, &options)?;
    let report = PackReport {
        shards: packed.shards.len(),
        samples: packed.samples,
        bytes: packed.bytes,
        index: packed.index.map(|path| path.display().to_string()),
        skipped: packed.skipped,
    };
    if args.json {
        return write_json(out, &report);
    }
    let PackReport { shards, samples, bytes, index, skipped } = &report;
    writeln!(out, "{shards} shards, {samples} samples, {} in {}", format_bytes(*bytes), args.out.display())?;
    if let Some(index) = index {
        writeln!(out, "index  {index}")?;
    }
    for SkippedSource { path, reason } in skipped {
        writeln!(out, "skipped: {path}: {reason}")?;
    }
    Ok(())
}
