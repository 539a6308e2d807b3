//! `dflop index`: builds a dataset index.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use dflop_loader::error::Skipped;
use dflop_loader::index::{Index, IndexOptions, UnusedPart};
use dflop_loader::media::VideoSampling;
use serde::Serialize;

use crate::args::dataset::{DatasetArgs, index_options_for};
use crate::args::model::{TokenizerArgs, model_spec};
use crate::args::set::{SetArgs, accepted};
use crate::failure::Failure;
use crate::output::{Output, format_bytes, print_skipped, write_json};

/// Write the index: location and shape of every sample, from headers.
///
/// An index that fits the shards is kept. Bad samples and shards are listed; they do not fail the command.
#[derive(Debug, Args)]
pub(crate) struct IndexArgs {
    #[command(flatten)]
    dataset: DatasetArgs,
    /// Directory of the index [default: `.dflop` next to the shards, or the user's cache directory].
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Rebuild the index even if the existing index fits the shards.
    #[arg(long)]
    rebuild: bool,
    /// Also decode every field, so that every bad sample is known in advance; rebuilds the index.
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    /// Model whose chat format is counted with the texts [default: the bare text is counted].
    #[arg(long, value_name = "NAME|DIR", requires = "tokenizer")]
    model: Vec<String>,
    #[command(flatten)]
    set: SetArgs<IndexAccepted>,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

accepted!(IndexAccepted: "index.videos", "processor.chat_template", "processor.caption_prompt", "store");

#[derive(Debug, Serialize)]
struct IndexReport<'a> {
    shards: usize,
    samples: u64,
    bytes: u64,
    seconds: f64,
    fingerprint: &'a str,
    path: Option<String>,
    skipped: &'a [Skipped],
    warnings: &'a [String],
    /// Samples in which no token is a training target.
    samples_without_target: u64,
    /// Sample parts that nothing uses.
    unused: &'a [UnusedPart],
    /// Token counter digest, if counts were requested.
    #[serde(rename = "text_counts", skip_serializing_if = "Option::is_none")]
    token_counts: Option<&'a str>,
    /// Video frame sampling that the shapes in the index assume.
    #[serde(skip_serializing_if = "Option::is_none")]
    video_sampling: Option<VideoSampling>,
}

pub(crate) fn run(args: &IndexArgs, out: &mut Output) -> Result<(), Failure> {
    let started = Instant::now();
    let settings = args.set.settings()?;
    let model = if args.model.is_empty() { None } else { Some(model_spec(&args.model)?) };
    let options = IndexOptions {
        directory: args.out.clone(),
        is_rebuilt: args.rebuild,
        is_verified: args.verify,
        ..index_options_for(&settings, args.tokenizer.token_counts(model.as_ref(), &settings)?)?
    };
    let index = Index::open_or_build(args.dataset.shards(&settings)?, &options)?;
    let report = IndexReport {
        shards: index.shards().len(),
        samples: index.len(),
        bytes: index.payload_bytes(),
        seconds: started.elapsed().as_secs_f64(),
        fingerprint: index.fingerprint(),
        path: index.path().map(|path| path.display().to_string()),
        skipped: index.skipped(),
        warnings: index.warnings(),
        samples_without_target: index.samples_without_target(),
        unused: index.unused(),
        token_counts: index.token_counts(),
        video_sampling: index.video_sampling(),
    };
    if args.json { write_json(out, &report) } else { print(out, &report) }
}

fn print(out: &mut impl std::io::Write, report: &IndexReport<'_>) -> Result<(), Failure> {
    let IndexReport { shards, samples, bytes, seconds, .. } = report;
    writeln!(out, "{shards} shards, {samples} samples, {} in {seconds:.3} s", format_bytes(*bytes))?;
    writeln!(out, "fingerprint {}", report.fingerprint)?;
    match &report.path {
        Some(path) => writeln!(out, "index       {path}")?,
        None => writeln!(out, "index       not kept: no directory could be written; name one with --out")?,
    }
    if let Some(digest) = report.token_counts {
        writeln!(out, "texts       counted, column text_tokens:{digest}")?;
    }
    if let Some(sampling) = report.video_sampling {
        writeln!(out, "videos      {sampling}")?;
    }
    if report.samples_without_target > 0 {
        let without = report.samples_without_target;
        writeln!(out, "targets     {without} of {samples} samples have none")?;
    }
    for part in report.unused {
        writeln!(out, "not used    {}", part.described())?;
    }
    for warning in report.warnings {
        writeln!(out, "warning: {warning}")?;
    }
    print_skipped(out, report.skipped)
}
