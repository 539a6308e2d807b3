//! `dflop demo`: runs the whole path, from shards to training and a report, on a dataset that it creates.
//!
//! Fills the `dflop demo` report: simulated steps for a large model, measured steps for a small model.
//!
//! Writes a small multimodal dataset with synthetic samples, in the WebDataset layout. A seed gives the same
//! bytes for any number of threads.

use super::simulate::{
    ABOUT_STATED_RATES, ABOUT_STRATEGIES, COMPARED, StrategyReport, compare, print_strategies,
};
use super::train::{CpuTimes, Trained, train_demo};
use crate::args::dataset::index_options;
use crate::args::{PREVIEWS, ReportArgs};
use crate::failure::Failure;
use crate::output::{Bars, Output, bar, format_bytes, place_file, runtime, write_json};
use crate::report::collect::PlannedSteps;
use crate::report::{Basis, Origin, RunReport, Study, Verdict, compare_steps, write_report};
use clap::Args;
use dflop_balancer::schedule::ScheduleKind;
use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
use dflop_loader::flow::{Progress, on_threads};
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::expand_shards;
use dflop_loader::{BalancedLoader, StepPlanner};
use dflop_synthetic::{Field, Rng, make_sample};
use futures::StreamExt;
use serde::Serialize;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

/// Number of samples in the dataset, a multiple of the global batch.
const SAMPLES: usize = 512;
const GLOBAL_BATCH: u64 = 128;
const DP_SIZE: usize = 4;
const MICROBATCHES: usize = 8;
/// Number of pipeline stages for the vision encoder, the audio encoder and the LLM.
const STAGES: [usize; 3] = [1, 1, 4];
const MODEL: &str = "omni-7b";
const DEVICE: &str = "h100";
/// Search effort per step in work units: tens of milliseconds, overlapped with a step that takes seconds.
const WORK: u64 = 200_000;

/// Create a small multimodal dataset, index, plan, stream and balance it, train on it, and write a report.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Directory for the dataset and the report.
    #[arg(long, value_name = "DIR", default_value = "dflop-demo")]
    out: PathBuf,
    /// Seed for the dataset and the sample order.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    report: ReportArgs,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct DemoReport {
    steps: u64,
    samples: u64,
    /// Mean measured step time for the small model that is trained.
    data_blind_seconds: f64,
    /// Mean measured step.
    balanced_seconds: f64,
    /// Measured step time ratio.
    speedup: f64,
    is_simulated: bool,
    /// Mean step by CPU pass time, as if every rank had a core to itself.
    cpu_data_blind_seconds: f64,
    /// Mean balanced step by CPU pass time.
    cpu_balanced_seconds: f64,
    /// Median ratio over step pairs on the same batch.
    cpu_speedup: f64,
    /// Tenth and ninetieth percentile of these ratios.
    cpu_speedup_range: [f64; 2],
    /// Pass wall time over pass CPU time.
    busy_factor: f64,
    /// Whether other work on the machine leaves the measured steps without meaning.
    is_machine_busy: bool,
    /// Number of timed steps per strategy.
    trained_steps: u64,
    first_loss: f64,
    last_loss: f64,
    /// Largest relative difference between the losses with both strategies at the same step.
    loss_difference: f64,
    /// Mean simulated step for a large model on the demo data.
    simulated_data_blind_seconds: f64,
    /// Mean simulated step.
    simulated_balanced_seconds: f64,
    simulated_speedup: f64,
    stream_seconds: f64,
    report: String,
}

pub(crate) fn run(args: &DemoArgs, stdout: &mut Output) -> Result<(), Failure> {
    // With `--json` the lines for people are dropped, so that the object is the only output.
    let mut nowhere = std::io::sink();
    let out: &mut dyn Write = if args.json { &mut nowhere } else { stdout };
    let directory = args.out.join("shards");
    let data = write_demo_data(&directory, SAMPLES, args.seed, &Bars::default())?;
    let DemoData { shards, samples, bytes } = &data;
    writeln!(out, "made      {samples} samples in {} shards, {}", shards.len(), format_bytes(*bytes))?;
    let planner = planner(&data, args.seed)?;
    writeln!(
        out,
        "indexed   {} samples, fingerprint {}",
        planner.index().len(),
        planner.index().fingerprint()
    )?;
    let steps = planner.steps().per_epoch();
    let (delivered, stream_seconds) = stream_all_ranks(&planner, steps)?;
    writeln!(out, "streamed  {delivered} samples, decoded, to {DP_SIZE} ranks in {stream_seconds:.2} s")?;
    let strategies = compare(&planner, steps, ScheduleKind::OneForwardOneBackward)?;
    let previews = PREVIEWS;
    let (trained, study) = train_demo(args.seed, previews)?;
    let page = report(&planner, &data, &strategies, &trained, study, previews)?;
    // Beside the dataset unless a file is named.
    let path = args.report.path().map_or_else(|| args.out.join("report.html"), Path::to_owned);
    write_report(&path, &page)?;
    let (blind, balanced) = (&strategies[0], &strategies[COMPARED.len() - 1]);
    let report = DemoReport {
        steps,
        samples: delivered,
        data_blind_seconds: trained.data_blind_seconds,
        balanced_seconds: trained.balanced_seconds,
        speedup: trained.data_blind_seconds / trained.balanced_seconds,
        is_simulated: false,
        cpu_data_blind_seconds: trained.by_cpu.data_blind_seconds,
        cpu_balanced_seconds: trained.by_cpu.balanced_seconds,
        cpu_speedup: trained.by_cpu.speedup,
        cpu_speedup_range: trained.by_cpu.speedup_range,
        busy_factor: trained.by_cpu.busy_factor,
        is_machine_busy: trained.is_machine_busy(),
        trained_steps: trained.steps,
        first_loss: trained.losses[0],
        last_loss: trained.losses[1],
        loss_difference: trained.loss_difference,
        simulated_data_blind_seconds: blind.step_seconds,
        simulated_balanced_seconds: balanced.step_seconds,
        simulated_speedup: balanced.speedup,
        stream_seconds,
        report: path.display().to_string(),
    };
    if args.json {
        return write_json(stdout, &report);
    }
    writeln!(out, "\nSimulated 1F1B steps of {MODEL} on {DEVICE} (a stated rate), mean of {steps}:")?;
    print_strategies(out, &strategies)?;
    writeln!(
        out,
        "\nBalanced steps are {:.2} times as fast as data-blind ones, simulated.",
        report.simulated_speedup
    )?;
    print_trained(out, &trained)?;
    writeln!(out, "report    {}", report.report)?;
    Ok(())
}

/// Prints the measured steps: by CPU time, which other work changes little, then by wall time.
fn print_trained(out: &mut dyn Write, trained: &Trained) -> std::io::Result<()> {
    let Trained { ranks, steps, by_cpu, losses, loss_difference, .. } = trained;
    let [low, high] = by_cpu.speedup_range;
    writeln!(
        out,
        "\nTrained a small model on {ranks} ranks of one thread, {steps} timed steps each way, in turn:"
    )?;
    if trained.is_unclear() {
        writeln!(
            out,
            "this machine is too busy to tell which is faster: by CPU time balanced steps are {low:.2} to {high:.2} \
             times as fast."
        )?;
    } else {
        writeln!(
            out,
            "balanced steps are {:.2} times as fast by CPU time, measured ({low:.2} to {high:.2} in four of five \
             pairs of steps):\ndata-blind {:.3} s, balanced {:.3} s, if every rank has a core to itself.",
            by_cpu.speedup, by_cpu.data_blind_seconds, by_cpu.balanced_seconds
        )?;
    }
    let (blind, balanced) = (trained.data_blind_seconds, trained.balanced_seconds);
    write!(
        out,
        "On the clock data-blind {blind:.3} s, balanced {balanced:.3} s, {:.2} times as fast",
        blind / balanced
    )?;
    if trained.is_machine_busy() {
        write!(out, "; other work made passes {:.1} times as long", by_cpu.busy_factor)?;
    }
    writeln!(
        out,
        ".\nLoss {:.3} to {:.3}, the same both ways to {loss_difference:.0e}.",
        losses[0], losses[1]
    )
}

fn planner(data: &DemoData, seed: u64) -> Result<StepPlanner, Failure> {
    let names: Vec<String> = data.shards.iter().map(|path| path.display().to_string()).collect();
    let options = IndexOptions { is_rebuilt: true, ..index_options() };
    let index = Arc::new(Index::open_or_build(expand_shards(&names)?, &options)?);
    let model = CostModel::new(ModelSpec::preset(MODEL)?, DeviceRate::preset(DEVICE)?);
    let builder = StepPlanner::builder(index, model).global_batch(GLOBAL_BATCH).dp_size(DP_SIZE);
    let builder = builder.microbatches(MICROBATCHES).stages(STAGES.to_vec()).work(WORK).seed(seed);
    Ok(builder.build()?)
}

/// Runs the loaders for all ranks in turn; returns samples and seconds.
fn stream_all_ranks(planner: &StepPlanner, steps: u64) -> Result<(u64, f64), Failure> {
    let started = Instant::now();
    let bar = bar("streaming", Some(planner.index().len()));
    let delivered = runtime()?.block_on(async {
        let mut delivered = 0;
        for dp_rank in 0..DP_SIZE {
            let loader = BalancedLoader::builder(planner.clone(), dp_rank).steps(steps).build()?;
            let mut stream = loader.stream();
            while let Some(step) = stream.next().await {
                let microbatches = step?.microbatches;
                delivered +=
                    microbatches.iter().map(|microbatch| microbatch.samples.len() as u64).sum::<u64>();
                bar.set_position(delivered);
            }
        }
        Ok::<_, Failure>(delivered)
    })?;
    bar.finish_and_clear();
    Ok((delivered, started.elapsed().as_secs_f64()))
}

/// Returns the report.
///
/// - `study`: the measured steps
fn report(
    planner: &StepPlanner,
    data: &DemoData,
    strategies: &[StrategyReport],
    trained: &Trained,
    study: Study,
    previews: usize,
) -> Result<RunReport, Failure> {
    let steps = planner.steps().per_epoch();
    let results = strategies.iter().map(|strategy| strategy.to_result(steps));
    let planned = PlannedSteps {
        planner,
        strategies: COMPARED.iter().map(|(strategy, _)| *strategy).zip(results).collect(),
        schedule: ScheduleKind::OneForwardOneBackward,
        steps: 0..steps,
        previews,
    };
    let (simulated, note) = planned.study(&format!("{MODEL} on {DEVICE}"), ABOUT_STRATEGIES)?;
    let title = "dflop demo: balanced microbatches for a multimodal model";
    let mut report = RunReport::new("demo", title, Origin::for_this_process());
    report.verdict = compare_steps(&simulated);
    report.verdict.push(measured(trained));
    report.fact("Model", MODEL);
    report.fact("Device", format!("{DEVICE}, a stated rate"));
    report.fact("Cluster", format!("{DP_SIZE} DP ranks × {} stages", STAGES.iter().sum::<usize>()));
    report.fact("Schedule", format!("1F1B, {MICROBATCHES} microbatches per rank"));
    report.fact("Global batch", format!("{GLOBAL_BATCH} samples"));
    report.fact("Data", format!("{} samples, {}", data.samples, format_bytes(data.bytes)));
    report.notes.push(ABOUT_STATED_RATES.to_owned());
    report.notes.push(format!(
        "The small model was trained on this machine, on {} ranks of one thread, {} timed steps each way; losses agree to \
         {:.0e}.",
        trained.ranks, trained.steps, trained.loss_difference
    ));
    report.notes.push(format!(
        "On the clock, passes took {:.1} times their CPU time: 1 is a machine without other work.",
        trained.by_cpu.busy_factor
    ));
    report.notes.push(
        "Sizes of images, audio clips and texts follow published datasets; their content is synthetic."
            .to_owned(),
    );
    report.notes.extend(note);
    report.studies.extend([simulated, study]);
    Ok(report)
}

/// Returns the measurement of the small model, by CPU time, which other work on the machine changes little.
fn measured(trained: &Trained) -> Verdict {
    let CpuTimes { data_blind_seconds, balanced_seconds, speedup, speedup_range: [low, high], .. } =
        trained.by_cpu;
    let range = format!("{low:.2} to {high:.2} in four of five pairs of steps");
    let (figure, text) = if trained.is_unclear() {
        (String::new(), format!("This machine is too busy to tell which is faster ({range})."))
    } else {
        let text = format!(
            "A small model on this machine: by CPU time, a balanced step takes {balanced_seconds:.2} s instead of \
             {data_blind_seconds:.2} s with data-blind ({range})."
        );
        (format!("{speedup:.2}×"), text)
    };
    Verdict { basis: Basis::Measured, figure, text }
}

/// Maximum number of shards in a dataset.
const SHARDS_MAX: usize = 8;

/// Written shards with paths and size.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DemoData {
    /// Shard paths, in order.
    shards: Vec<PathBuf>,
    /// Number of samples in all shards.
    samples: u64,
    /// Size of all shards in bytes.
    bytes: u64,
}

/// Writes `samples` samples into the directory, as up to 8 shards `demo-000.tar`, `demo-001.tar`, ….
///
/// The directory is created if it does not exist. Shards of these names are replaced, each atomically; other
/// files are not touched. 512 samples are about 37 MB.
///
/// # Errors
/// If the directory or a shard cannot be written.
fn write_demo_data(
    directory: &Path,
    samples: usize,
    seed: u64,
    progress: &dyn Progress,
) -> Result<DemoData, Failure> {
    std::fs::create_dir_all(directory).map_err(|error| Failure::from(error).in_file(directory))?;
    progress.begin("samples", samples as u64);
    let written = write_shards(directory, &cut(samples), seed, progress);
    progress.end();
    let (shards, bytes): (Vec<PathBuf>, Vec<u64>) = written?.into_iter().unzip();
    Ok(DemoData { shards, samples: samples as u64, bytes: bytes.iter().sum() })
}

/// Returns the sample range for each shard, as even as possible.
fn cut(samples: usize) -> Vec<Range<usize>> {
    let shards = samples.min(SHARDS_MAX);
    (0..shards).map(|shard| samples * shard / shards..samples * (shard + 1) / shards).collect()
}

/// Writes the shards on all cores; returns path and size of each, in order.
fn write_shards(
    directory: &Path,
    ranges: &[Range<usize>],
    seed: u64,
    progress: &dyn Progress,
) -> Result<Vec<(PathBuf, u64)>, Failure> {
    // Threads pick shards by a counter, because shards differ in cost.
    let next = AtomicUsize::new(0);
    let work = || {
        let mut written = Vec::new();
        loop {
            let shard = next.fetch_add(1, Ordering::Relaxed);
            let Some(range) = ranges.get(shard) else { return Ok(written) };
            let path = directory.join(format!("demo-{shard:03}.tar"));
            let bytes = write_shard(&path, range.clone(), seed, progress)?;
            written.push((path, bytes));
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(ranges.len());
    let results: Vec<Result<Vec<_>, Failure>> = on_threads(threads, work);
    let mut written = Vec::with_capacity(ranges.len());
    for result in results {
        written.extend(result?);
    }
    // Threads finish in any order; names sort in the order of shards.
    written.sort_unstable();
    Ok(written)
}

/// Writes a sample range to a tar file and returns the file size.
///
/// The file appears under its name only when complete. Times and owners are zero, so that equal samples give
/// equal files.
///
/// # Errors
/// If the file cannot be written, or an encoder rejects an input.
fn write_shard(
    path: &Path,
    samples: Range<usize>,
    seed: u64,
    progress: &dyn Progress,
) -> Result<u64, Failure> {
    place_file(path, |file| {
        let mut archive = tar::Builder::new(file);
        for sample in samples {
            let key = format!("{sample:06}");
            for field in make_sample(&key, &mut Rng::new(seed, sample))? {
                append(&mut archive, &key, &field)?;
            }
            progress.advance(1);
        }
        let file = archive.into_inner()?;
        file.flush()?;
        Ok(file.get_ref().metadata()?.len())
    })
}

fn append(archive: &mut tar::Builder<impl Write>, key: &str, field: &Field) -> io::Result<()> {
    let mut header = tar::Header::new_ustar();
    header.set_mode(0o644);
    header.set_size(field.payload.len() as u64);
    archive.append_data(&mut header, format!("{key}.{}", field.extension), field.payload.as_slice())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflop_loader::flow::NoProgress;
    use dflop_loader::media::{DecodeLimits, Media, decode};
    use dflop_loader::shard::{FIELD_BYTES_MAX, MappedSamples, RawSample, ShardItem};

    const SAMPLES: usize = 24;

    fn shard_bytes(seed: u64) -> Vec<Vec<u8>> {
        let directory = tempfile::tempdir().unwrap();
        let made = write_demo_data(&directory.path().join("new"), SAMPLES, seed, &NoProgress).unwrap();
        let shards: Vec<Vec<u8>> = made.shards.iter().map(|path| std::fs::read(path).unwrap()).collect();
        assert_eq!(made.samples, SAMPLES as u64);
        assert_eq!(made.bytes, shards.iter().map(|shard| shard.len() as u64).sum::<u64>());
        let files = std::fs::read_dir(directory.path().join("new")).unwrap().count();
        assert_eq!(files, made.shards.len(), "only shards remain");
        shards
    }

    fn shard_samples(shard: Vec<u8>) -> Vec<RawSample> {
        let items = MappedSamples::new("demo.tar".into(), shard.into(), FIELD_BYTES_MAX);
        items
            .map(|item| match item {
                ShardItem::Sample(sample) => sample,
                ShardItem::Skipped(skipped) => panic!("{skipped:?}"),
            })
            .collect()
    }

    #[test]
    fn the_seed_fixes_every_byte() {
        let first = shard_bytes(7);
        assert_eq!(first.len(), SHARDS_MAX);
        assert!(first == shard_bytes(7));
        assert!(first != shard_bytes(8));
    }

    #[test]
    fn every_field_of_every_sample_decodes() {
        let samples: Vec<RawSample> = shard_bytes(1).into_iter().flat_map(shard_samples).collect();
        assert_eq!(samples.len(), SAMPLES);
        let mut found = [0; 4];
        for field in samples.iter().flat_map(|sample| &sample.fields) {
            let bytes = field.payload.clone().unwrap();
            let kind = match decode(&field.extension, bytes, &DecodeLimits::default()).unwrap() {
                Media::Image(image) => {
                    assert!(!image.is_truncated && image.width >= 64 && image.height >= 64);
                    0
                }
                Media::Audio(clip) => {
                    assert!(!clip.is_truncated && clip.frames() >= 3 * 16_000);
                    1
                }
                Media::Text(text) => {
                    assert!(!text.is_empty());
                    2
                }
                Media::Json(json) => {
                    assert!(dflop_loader::sample::document::has_turns(&json));
                    3
                }
                other => panic!("{other:?}"),
            };
            found[kind] += 1;
        }
        assert!(found.iter().all(|&fields| fields > 0), "{found:?} of {SAMPLES} samples");
    }

    #[test]
    fn few_samples_make_few_shards_and_none_makes_none() {
        let sizes = |samples| cut(samples).iter().map(ExactSizeIterator::len).collect::<Vec<_>>();
        assert_eq!(sizes(0), [0; 0]);
        assert_eq!(sizes(3), [1; 3]);
        assert_eq!(sizes(20).iter().sum::<usize>(), 20);
    }
}
