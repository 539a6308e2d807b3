//! `dflop stream`: runs the loader at full speed and measures it.
//!
//! Prints the metrics of a loader's stages as a table, and warnings about stalls.
//!
//! Writes every skipped sample to a JSON Lines file.

mod input;
mod progress;

use crate::args::dataset::DatasetArgs;
use crate::args::set::{SetArgs, accepted};
use crate::failure::Failure;
use crate::output::{Output, format_bytes, print_skipped, runtime, write_json};
use clap::{Args, ValueEnum};
use dflop_loader::decode::{Batch, Decode};
use dflop_loader::error::Skipped;
use dflop_loader::flow::{MetricsSnapshot, SkipCount, SkipListener};
use dflop_loader::settings::{DecodeName, Settings};
use dflop_loader::{Loader, LoaderSettings, Stall, StallListener};
use futures::StreamExt;
use input::InputArgs;
use progress::{Expected, StreamBar};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

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
    #[command(flatten)]
    set: SetArgs<StreamAccepted>,
    /// Samples per batch.
    #[arg(long, value_name = "N", default_value_t = 32)]
    batch: usize,
    /// End after this many samples.
    #[arg(long, value_name = "N")]
    samples: Option<u64>,
    /// Number of passes over the shards.
    #[arg(long, value_name = "N", default_value_t = 1)]
    epochs: u64,
    /// Write every skipped sample to this file, one JSON object per line; the report lists the first 1,000,
    /// each once.
    #[arg(long, value_name = "FILE")]
    skipped_out: Option<PathBuf>,
    #[command(flatten)]
    input: InputArgs,
    /// Print the metrics for every stage; with `--json` under `metrics`.
    #[arg(long)]
    metrics: bool,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

accepted!(StreamAccepted: "read.fields", "read.decode", "read.workers", "read.buffered_bytes",
    "read.error_budget", "read.stall_seconds", "read.stall_log_seconds", "read.field_bytes", "read.scaled_decode",
    "augment", "order", "index.directory", "index.videos", "store");

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
    check_decoded(args)?;
    let skipped_file = args.skipped_out.as_deref().map(SkippedFile::create).transpose()?.map(Arc::new);
    let settings = args.set.settings()?;
    if settings.read.decode == DecodeName::Raw {
        args.set.refuse(&["read.decode"], "is the option `--decode raw` of this command")?;
    }
    args.input.check(&args.set, &settings)?;
    let loader = loader(args, &settings, skipped_file.clone())?;
    let expected = expected(args, &settings, &loader)?;
    let runtime = runtime()?;
    let result = runtime.block_on(drain(&loader, expected));
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
    if let Some(fields) = settings.read.fields.filter(|_| report.samples > 0 && report.fields == 0) {
        let fields = fields.0.join(",");
        return Err(Failure::Failed(format!("none of {} samples has a field `{fields}`", report.samples)));
    }
    report.metrics = args.metrics.then(|| loader.metrics());
    if args.json { write_json(out, &report) } else { print(out, &report) }
}

/// Rejects settings for media that are not decoded.
fn check_decoded(args: &StreamArgs) -> Result<(), Failure> {
    if args.decode == DecodeArg::Raw {
        args.set.refuse(&["read.decode"], "has no effect with `--decode raw`; leave it out")?;
    }
    if args.decode != DecodeArg::Media {
        args.set.refuse(&["index.videos"], "has no effect without `--decode media`; leave it out")?;
    }
    Ok(())
}

fn loader(
    args: &StreamArgs,
    settings: &Settings,
    skipped_file: Option<Arc<SkippedFile>>,
) -> Result<Loader, Failure> {
    let decode = match args.decode {
        DecodeArg::Raw => Decode::Raw,
        DecodeArg::Media => Decode::Media,
        DecodeArg::Rgb224 => Decode::Pixels { side: const { NonZeroU32::new(224).unwrap() } },
    };
    let mut read = settings.read.apply(LoaderSettings::default())?.decode(decode);
    if let Some(augment) = settings.augment.augment()? {
        read = read.augment(augment);
    }
    if let Some(file) = skipped_file {
        read = read.skip_listener(file);
    }
    let mut builder = args
        .input
        .source(&args.dataset, &args.set, settings)?
        .settings(read.stall_listener(Arc::new(PrintStalls)))
        .scaled_decode(settings.read.scaled_decode)
        .batch_size(args.batch)
        .epochs(args.epochs)
        .field_bytes_max(settings.read.field_bytes);
    if let Some(sampling) = settings.index.video_sampling()? {
        builder = builder.video_sampling(sampling);
    }
    if let Some(samples) = args.samples {
        builder = builder.samples_max(samples);
    }
    Ok(args.input.apply(builder, &args.set)?.build()?)
}

/// Returns what is known about the amount before anything is read.
fn expected(args: &StreamArgs, settings: &Settings, loader: &Loader) -> Result<Expected, Failure> {
    if let Some(samples) = args.samples {
        return Ok(Expected::Samples(samples));
    }
    if loader.is_drawn() {
        let batches = loader.batches().filter(|_| !args.input.is_resumed());
        return Ok(
            batches.map_or(Expected::Unknown, |batches| Expected::Samples(batches * args.batch as u64))
        );
    }
    // A resumed stream begins somewhere inside of the shards.
    let shards = args.input.shards_read(args.dataset.shards(settings)?).filter(|_| !args.input.is_resumed());
    Ok(shards.map_or(Expected::Unknown, |shards| Expected::Shards { shards, epochs: args.epochs }))
}

async fn drain(loader: &Loader, expected: Expected) -> Result<StreamReport, Failure> {
    let started = Instant::now();
    let mut bar = StreamBar::start(expected);
    let mut report = StreamReport::default();
    let mut batches = loader.stream();
    while let Some(batch) = batches.next().await {
        let batch: Batch = batch.inspect_err(|_| bar.abandon())?;
        report.first_batch_seconds.get_or_insert_with(|| started.elapsed().as_secs_f64());
        report.samples += batch.samples.len() as u64;
        report.bytes += batch.samples.iter().map(|sample| sample.bytes).sum::<u64>();
        report.fields += batch.samples.iter().map(|sample| sample.fields.len() as u64).sum::<u64>();
        report.images += batch.pixels.as_ref().map_or(0, |pixels| pixels.tensor.rows() as u64);
        bar.advance(&batch.samples, loader.skip_log().skipped_samples());
    }
    bar.finish();
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

/// Prints a line per stage.
pub(crate) fn print_metrics(out: &mut impl Write, metrics: &MetricsSnapshot) -> Result<(), Failure> {
    writeln!(
        out,
        "{:<13} {:>9} {:>10} {:>7} {:>6} {:>6} {:>9} {:>9} {:>9}",
        "stage", "items", "bytes", "errors", "depth", "most", "busy s", "no input", "no room"
    )?;
    for stage in &metrics.stages {
        let (name, bytes) = (stage.stage.name(), format_bytes(stage.bytes));
        let (busy, input, room) = (stage.busy_seconds, stage.input_wait_seconds, stage.output_wait_seconds);
        writeln!(
            out,
            "{name:<13} {:>9} {bytes:>10} {:>7} {:>6} {:>6} {busy:>9.3} {input:>9.3} {room:>9.3}",
            stage.items, stage.errors, stage.depth, stage.depth_max
        )?;
    }
    let bottleneck = metrics.bottleneck.map_or("none", |stage| stage.name());
    let (waited, retries) = (metrics.consumer_wait_seconds, metrics.retries);
    writeln!(out, "the consumer waited {waited:.3} s; bottleneck: {bottleneck}; retries: {retries}")?;
    let (undecoded, decoded) = (metrics.undecoded_bytes_max, metrics.decoded_bytes_max);
    writeln!(out, "at most {} undecoded, {} decoded", format_bytes(undecoded), format_bytes(decoded))?;
    Ok(())
}

/// Stall listener that warns on standard error.
#[derive(Debug)]
pub(crate) struct PrintStalls;

impl StallListener for PrintStalls {
    #[expect(clippy::print_stderr, reason = "warnings go to standard error")]
    fn stalled(&self, stall: &Stall) {
        let (stage, seconds) = (stall.stage.name(), stall.seconds);
        let counters = stall.metrics.stage(stall.stage);
        let (items, errors, depth) = (counters.items, counters.errors, counters.depth);
        let shard = stall.shard.as_ref().map_or_else(String::new, |shard| format!(" in shard `{shard}`"));
        eprintln!(
            "dflop: the {stage} stage is stuck{shard}: nothing has happened for {seconds:.0} s \
             ({items} items, {errors} errors, depth {depth})"
        );
    }
}

/// File that receives a line per skipped sample and epoch.
#[derive(Debug)]
pub(crate) struct SkippedFile {
    file: Mutex<(BufWriter<File>, Option<std::io::Error>)>,
}

impl SkippedFile {
    /// Creates the file, or empties it.
    pub(crate) fn create(path: &Path) -> Result<Self, Failure> {
        let file = File::create(path).map_err(|error| Failure::from(error).in_file(path))?;
        Ok(Self { file: Mutex::new((BufWriter::new(file), None)) })
    }

    /// Writes the buffered lines.
    ///
    /// # Errors
    /// The first write error.
    pub(crate) fn finish(&self) -> Result<(), Failure> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        match file.1.take() {
            Some(error) => Err(error.into()),
            None => Ok(file.0.flush()?),
        }
    }
}

impl SkipListener for SkippedFile {
    fn skipped(&self, skipped: &Skipped) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if file.1.is_some() {
            return;
        }
        let line = serde_json::to_vec(skipped).map_err(std::io::Error::from);
        let written = line.and_then(|line| file.0.write_all(&line)).and_then(|()| file.0.write_all(b"\n"));
        file.1 = written.err();
    }
}
