//! `dflop stream`: runs the loader at full speed and measures it.

mod input;
mod metrics;
mod skipped_file;

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use dflop_loader::Loader;
use dflop_loader::decode::{Batch, Decode};
use dflop_loader::error::Skipped;
use dflop_loader::flow::{ErrorBudget, MetricsSnapshot, SkipCount};
use dflop_loader::shard::{FIELD_BYTES_MAX, FieldSelection};
use futures::StreamExt;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::args::augment::AugmentArgs;
use crate::args::dataset::DatasetArgs;
use crate::args::strict::StrictArgs;
use crate::args::video::VideoArgs;
use crate::failure::Failure;
use crate::output::{Output, format_bytes, print_skipped, runtime, write_json};
use crate::progress::bar;
use input::InputArgs;
use metrics::{PrintStalls, print_metrics};
use skipped_file::SkippedFile;

/// Time for the reader to end after the stream is dropped.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(200);

/// Run the loader at full speed and report the throughput. Needs no index.
#[derive(Debug, Args)]
pub(crate) struct StreamArgs {
    #[command(flatten)]
    dataset: DatasetArgs,
    /// Sample decoding.
    #[arg(long, value_enum, default_value_t = DecodeArg::Media)]
    decode: DecodeArg,
    /// Read only these fields, such as `jpg,txt`, `img_*.png`, `images`, `audio`, `text` [default: all;
    /// images with `rgb224`].
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    fields: Option<Vec<String>>,
    /// With `rgb224`, decode a JPEG at a half, a quarter or an eighth of its size if that is still large
    /// enough; pixels differ slightly. Needs a build with the feature `turbojpeg`.
    #[arg(long)]
    scaled_decode: bool,
    #[command(flatten)]
    augment: AugmentArgs,
    #[command(flatten)]
    strict: StrictArgs,
    #[command(flatten)]
    video: VideoArgs,
    /// Samples per batch.
    #[arg(long, value_name = "N", default_value_t = 32)]
    batch: usize,
    /// Number of decoder threads [default: one per core].
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// End after this many samples.
    #[arg(long, value_name = "N")]
    samples: Option<u64>,
    /// Number of passes over the shards.
    #[arg(long, value_name = "N", default_value_t = 1)]
    epochs: u64,
    /// Tolerated fraction of bad samples, 0 to 1.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.05)]
    error_budget: f64,
    /// Tolerated number of bad samples, regardless of the fraction [default: no limit].
    #[arg(long, value_name = "N")]
    error_count: Option<u64>,
    /// Write every skipped sample to this file, one JSON object per line; the report lists the first 1,000,
    /// each once.
    #[arg(long, value_name = "FILE")]
    skipped_out: Option<PathBuf>,
    /// Maximum field length; a sample with a longer field is bad.
    #[arg(long, value_name = "BYTES", default_value_t = FIELD_BYTES_MAX)]
    field_bytes_max: u64,
    /// Warn after this many seconds without progress.
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    stall_seconds: f64,
    /// Fail after this many seconds without progress [default: never].
    #[arg(long, value_name = "SECONDS")]
    stall_error_seconds: Option<f64>,
    /// Maximum payload bytes that wait for the decoders.
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    buffered_bytes_max: u64,
    #[command(flatten)]
    input: InputArgs,
    /// Print the metrics for every stage; with `--json` under `metrics`.
    #[arg(long)]
    metrics: bool,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DecodeArg {
    /// Group all fields and read every payload byte.
    Raw,
    /// Decode only the images, to normalized f32 tensors with 224 x 224 pixels.
    Rgb224,
    /// Decode every field to pixels, PCM, text, JSON or arrays.
    Media,
}

#[derive(Debug, Default, Serialize)]
struct StreamReport {
    samples: u64,
    fields: u64,
    bytes: u64,
    #[serde(rename = "pictures")]
    images: u64,
    seconds: f64,
    cpu_seconds: f64,
    kernel_cpu_seconds: f64,
    first_batch_seconds: Option<f64>,
    peak_rss_bytes: u64,
    skipped: Vec<Skipped>,
    /// Number of skipped samples, summed over epochs.
    skipped_samples: u64,
    skip_counts: Vec<SkipCount>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<MetricsSnapshot>,
}

pub(crate) fn run(args: &StreamArgs, out: &mut Output) -> Result<(), Failure> {
    let skipped_file = args.skipped_out.as_deref().map(SkippedFile::create).transpose()?.map(Arc::new);
    let loader = loader(args, skipped_file.clone())?;
    let runtime = runtime()?;
    let result = runtime.block_on(drain(&loader, args.samples));
    // Pipe commands are killed with the reader, but a read from standard input cannot be canceled: do not
    // wait for it longer than this.
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    let saved = args.input.save(&loader);
    let listed = skipped_file.map_or(Ok(()), |file| file.finish());
    let mut report = result?;
    saved?;
    listed?;
    if report.samples == 0 && !args.input.is_resumed() {
        return Err(no_samples(&report.skipped));
    }
    if let Some(fields) = args.fields.as_ref().filter(|_| report.samples > 0 && report.fields == 0) {
        let fields = fields.join(",");
        return Err(Failure::Failed(format!("none of {} samples has a field `{fields}`", report.samples)));
    }
    report.metrics = args.metrics.then(|| loader.metrics());
    if args.json { write_json(out, &report) } else { print(out, &report) }
}

fn loader(args: &StreamArgs, skipped_file: Option<Arc<SkippedFile>>) -> Result<Loader, Failure> {
    let decode = match args.decode {
        DecodeArg::Raw => Decode::Raw,
        DecodeArg::Media => Decode::Media,
        DecodeArg::Rgb224 => Decode::Pixels { side: const { NonZeroU32::new(224).unwrap() } },
    };
    let mut builder = Loader::builder(args.dataset.shards()?)
        .decode(decode)
        .scaled_decode(args.scaled_decode)
        .strictness(args.strict.strictness())
        .batch_size(args.batch)
        .epochs(args.epochs)
        .buffered_bytes_max(args.buffered_bytes_max)
        .field_bytes_max(args.field_bytes_max)
        .stall_seconds_max(args.stall_seconds)
        .stall_seconds_error(args.stall_error_seconds.unwrap_or(f64::INFINITY))
        .stall_listener(Arc::new(PrintStalls));
    if let Some(file) = skipped_file {
        builder = builder.skip_listener(file);
    }
    let budget = ErrorBudget::new(args.error_budget)?;
    builder = builder.error_budget(args.error_count.map_or(budget, |samples| budget.at_most(samples)));
    if let Some(fields) = &args.fields {
        builder = builder.fields(FieldSelection::new(fields)?);
    }
    if let Some(augment) = args.augment.augment()? {
        builder = builder.augment(augment);
    }
    if let Some(sampling) = args.video.sampling()? {
        builder = builder.video_sampling(sampling);
    }
    if let Some(workers) = args.workers {
        builder = builder.workers(workers);
    }
    if let Some(samples) = args.samples {
        builder = builder.samples_max(samples);
    }
    Ok(args.input.apply(builder)?.build()?)
}

async fn drain(loader: &Loader, samples: Option<u64>) -> Result<StreamReport, Failure> {
    let started = Instant::now();
    let bar = bar("samples", samples);
    let mut report = StreamReport::default();
    let mut batches = loader.stream();
    while let Some(batch) = batches.next().await {
        let batch: Batch = batch.inspect_err(|_| bar.abandon())?;
        report.first_batch_seconds.get_or_insert_with(|| started.elapsed().as_secs_f64());
        report.samples += batch.samples.len() as u64;
        report.bytes += batch.samples.iter().map(|sample| sample.bytes).sum::<u64>();
        report.fields += batch.samples.iter().map(|sample| sample.fields.len() as u64).sum::<u64>();
        report.images += batch.pixels.map_or(0, |pixels| pixels.tensor.rows() as u64);
        bar.set_position(report.samples);
    }
    bar.finish_and_clear();
    report.skipped = loader.skipped();
    report.skipped_samples = loader.skip_log().skipped_samples();
    report.skip_counts = loader.skip_log().counts();
    report.seconds = started.elapsed().as_secs_f64();
    report.kernel_cpu_seconds = loader.kernel_cpu().as_secs_f64();
    report.cpu_seconds = process_cpu().as_secs_f64();
    report.peak_rss_bytes = peak_rss_bytes().unwrap_or(0);
    Ok(report)
}

fn no_samples(skipped: &[Skipped]) -> Failure {
    let why = skipped.first().map_or("no entry name has the form KEY.EXTENSION".to_owned(), |first| {
        let Skipped { shard, offset, reason, .. } = first;
        format!("the first bad entry: shard `{shard}`, offset {offset}: {reason}")
    });
    Failure::Failed(format!("the dataset has no samples that can be delivered: {why}"))
}

/// Returns the user and system time that the process has used since the start.
fn process_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the peak resident set in bytes, mapped files included; Linux only.
fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024)
}

fn print(out: &mut impl std::io::Write, report: &StreamReport) -> Result<(), Failure> {
    let StreamReport { samples, bytes, seconds, cpu_seconds, kernel_cpu_seconds, .. } = report;
    let rate = *samples as f64 / seconds;
    writeln!(out, "{samples} samples, {} in {seconds:.3} s: {rate:.0} samples/s", format_bytes(*bytes))?;
    writeln!(out, "CPU         {cpu_seconds:.3} s, {kernel_cpu_seconds:.3} s of it in decoders")?;
    if let Some(first) = report.first_batch_seconds {
        writeln!(out, "first batch {first:.3} s")?;
    }
    writeln!(out, "peak memory {}, mapped files included", format_bytes(report.peak_rss_bytes))?;
    if let Some(metrics) = &report.metrics {
        print_metrics(out, metrics)?;
    }
    print_skipped(out, &report.skipped)?;
    let more = report.skipped_samples - report.skipped.len() as u64;
    if more > 0 {
        writeln!(out, "skipped: {more} more, or in later epochs; `--skipped-out` writes all of them")?;
    }
    Ok(())
}
