//! `dflop list`: prints a line per sample.

use std::collections::BTreeMap;
use std::io::Write;

use bytes::Bytes;
use clap::Args;
use dflop_costmodel::SampleShape;
use dflop_loader::error::Skipped;
use dflop_loader::shard::{RawSample, Shard, ShardItem, scan_shards};
use futures::StreamExt;
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::args::dataset::DatasetArgs;
use crate::args::set::{SetArgs, accepted};
use crate::failure::{Failure, escape_controls};
use crate::output::{Output, print_skipped, runtime, write_json};

/// List every sample with fields and shape, in shard order.
///
/// Prints the readable samples, then fails with the unreadable ones. Needs no index.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    dataset: DatasetArgs,
    #[command(flatten)]
    set: SetArgs<ListAccepted>,
    /// Print a JSON object per line.
    #[arg(long)]
    json: bool,
}

accepted!(ListAccepted: "store");

#[derive(Debug, Serialize)]
struct ListedSample<'a> {
    key: &'a str,
    url: &'a str,
    offset: u64,
    fields: BTreeMap<&'a str, ListedField>,
    /// `null` if a header cannot be read.
    shape: Option<SampleShape>,
}

#[derive(Debug, Serialize)]
struct ListedField {
    bytes: u64,
    sha256: String,
}

pub(crate) fn run(args: &ListArgs, out: &mut Output) -> Result<(), Failure> {
    let shards = args.dataset.shards(&args.set.settings()?)?;
    let runtime = runtime()?;
    let result = runtime.block_on(list(shards, out, args.json));
    // A thread may still block in a read of standard input, which cannot be canceled; do not wait for it.
    runtime.shutdown_background();
    let (samples, bad) = result?;
    if bad.is_empty() && samples > 0 {
        return Ok(());
    }
    let mut details = Vec::new();
    print_skipped(&mut details, &bad)?;
    let what = match (samples, bad.len()) {
        (0, 0) => "the dataset has no samples: no entry name has the form KEY.EXTENSION".into(),
        (0, _) => "the dataset has no sample that can be read".into(),
        (_, 1) => "1 bad entry".into(),
        (_, bad) => format!("{bad} bad entries"),
    };
    let details = String::from_utf8_lossy(&details);
    Err(Failure::Failed(format!("{what}\n{details}").trim_end().to_owned()))
}

/// Lists all shards; returns the number of samples, and the bad entries.
async fn list(shards: Vec<Shard>, out: &mut Output, is_json: bool) -> Result<(u64, Vec<Skipped>), Failure> {
    let (mut samples, mut bad) = (0u64, Vec::new());
    let mut items = scan_shards(shards);
    while let Some(item) = items.next().await {
        match item {
            Ok(ShardItem::Skipped(skipped)) => bad.push(skipped),
            Ok(ShardItem::Sample(sample)) => {
                samples += 1;
                list_sample(out, &sample, &mut bad, is_json)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok((samples, bad))
}

fn list_sample(
    out: &mut impl Write,
    sample: &RawSample,
    bad: &mut Vec<Skipped>,
    is_json: bool,
) -> Result<(), Failure> {
    let shape = match sample.shape() {
        Ok(shape) => Some(shape),
        Err(fault) => {
            bad.push(fault.in_sample(sample));
            None
        }
    };
    if !is_json {
        let fields: Vec<_> =
            sample.fields.iter().map(|field| format!("{}={}", field.extension, field.bytes)).collect();
        let fields = fields.join(" ");
        let [key, shard, fields] = [&*sample.key, &*sample.shard, &*fields].map(escape_controls);
        return Ok(writeln!(out, "{key}\t{shard}\t{fields}")?);
    }
    let fields = sample.fields.iter().map(|field| {
        let payload = field.payload.as_deref().unwrap_or_default();
        let sha256 = format!("{:x}", Bytes::copy_from_slice(&Sha256::digest(payload)));
        (&*field.extension, ListedField { bytes: field.bytes, sha256 })
    });
    let listed = ListedSample {
        key: &sample.key,
        url: &sample.shard,
        offset: sample.offset,
        fields: fields.collect(),
        shape,
    };
    write_json(out, &listed)
}
