//! `dflop profile`: measures the modules of a model on this machine's CPU or GPU, and checks profiles.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use dflop_costmodel::measure::MEDIAN_BOUND;
use dflop_costmodel::{CostModel, ErrorSummary, Module, Profile, ProfileOptions};
use dflop_executor::device::{Cpu, Device};
use dflop_executor::profile::check::{CheckOptions, CheckReport, CheckedMicrobatch, check};
use dflop_executor::profile::{MeasureOptions, MeasuredModel, MeasuredProfile, ModuleReport, measure};
use serde::Serialize;

use crate::args::model::{model_spec, warn};
use crate::failure::Failure;
use crate::output::{Output, format_bytes, place_file, write_json};
use dflop_executor::run::ComputeDevice;
use dflop_loader::model::{ModelDirectory, checkpoint_path, read_profile};

/// Number of runs per microbatch in the check.
const CHECK_REPEATS: usize = 7;

/// Measure the modules of a model on this machine's CPU or GPU, through the executor, into a profile that
/// `--profile` reads.
///
/// Runs forward, backward and optimizer for every module at shapes that are chosen until predictions between
/// them are within the error bound. With one thread CPU time is measured, with several wall time; a GPU
/// computes in bf16 and measures GPU time.
#[derive(Debug, Args)]
pub(crate) struct ProfileArgs {
    /// Model preset, or checkpoint directory with a `config.json`; an unknown name lists the presets.
    #[arg(long, value_name = "NAME|DIR")]
    model: String,
    /// Directory for the profile, one file per model; created if it does not exist.
    #[arg(long, value_name = "DIR", required_unless_present = "profile")]
    out: Option<PathBuf>,
    /// Measure nothing, check this measured profile instead.
    #[arg(long, value_name = "DIR_OR_FILE", conflicts_with = "out", requires = "check")]
    profile: Option<PathBuf>,
    /// Device to measure: `cpu`, or `cuda:N` in builds with CUDA devices.
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: ComputeDevice,
    /// Number of threads that compute on a CPU.
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,
    /// Maximum sequence length and maximum microbatch tokens inside a module.
    #[arg(long, value_name = "N", default_value_t = 4096)]
    tokens_max: u32,
    /// Relative interpolation error below which no further shapes are measured.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.05)]
    error_bound: f64,
    /// Time to measure for, in seconds, of all modules together; no shape and no round begins that would end
    /// later.
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0)]
    seconds_max: f64,
    /// Layers of each module to run, for models that do not fit into memory; times are scaled to all layers
    /// [default: all].
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Seed for weights and for the check's microbatches.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Compare the profile with N random microbatches from mixed samples that run, 48 without a number; fails
    /// if errors are out of bounds.
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, conflicts_with = "layers")]
    #[arg(default_missing_value = "48")]
    check: Option<usize>,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct ProfileJson<'a> {
    model: &'a str,
    /// Number of CPU threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<usize>,
    device: String,
    #[serde(flatten)]
    measured: Option<MeasuredJson>,
    #[serde(skip_serializing_if = "Option::is_none")]
    check: Option<&'a CheckReport>,
}

#[derive(Debug, Serialize)]
struct MeasuredJson {
    profile: String,
    clock: &'static str,
    points: usize,
    seconds: f64,
    peak_flops: f64,
    modules: Vec<ModuleJson>,
}

#[derive(Debug, Serialize)]
struct ModuleJson {
    module: Module,
    layers: usize,
    shapes: usize,
    attention_lengths: usize,
    rounds: usize,
    /// Maximum known interpolation error between measured shapes.
    error_max: Option<f64>,
    intervals_open: usize,
    tokens: u32,
    kept_bytes_per_token: u64,
    flops: f64,
    peak_share: f64,
}

pub(crate) fn run(args: &ProfileArgs, out: &mut Output) -> Result<(), Failure> {
    check_arguments(args)?;
    match args.device {
        ComputeDevice::Cpu => run_on(&Cpu::new(args.threads)?, args, out),
        #[cfg(feature = "cuda")]
        ComputeDevice::Cuda(ordinal) => {
            let storage = dflop_executor::device::Dtype::Bf16;
            let attention = dflop_executor::run::AttentionName::Own;
            run_on(&dflop_executor::run::open_cuda(ordinal, 0, storage, None, attention)?, args, out)
        }
        #[cfg(not(feature = "cuda"))]
        ComputeDevice::Cuda(_) => Err(dflop_executor::run::unsupported().into()),
    }
}

fn run_on<D: Device>(device: &D, args: &ProfileArgs, out: &mut Output) -> Result<(), Failure> {
    let model = model(&args.model)?;
    let (measured, profile) = match (&args.out, &args.profile) {
        (Some(directory), _) => {
            let (measured, profile) = measure_into(args, &model, device, directory)?;
            (Some(measured), profile)
        }
        (None, Some(path)) => (None, read_profile(path)?),
        (None, None) => return Err(Failure::Misuse("give a directory with `--out`".to_owned())),
    };
    let check = |microbatches| run_check(args, &model, device, (&profile, microbatches));
    let report = args.check.map(check).transpose()?;
    let json = ProfileJson {
        model: &args.model,
        threads: device.host_threads(),
        device: device.name(),
        measured,
        check: report.as_ref(),
    };
    if args.json {
        write_json(out, &json)?;
    } else {
        print(out, &json)?;
    }
    let outside = report.iter().flat_map(|report| &report.modules).filter(|module| !module.is_within);
    match outside.map(|module| module.module.to_string()).collect::<Vec<_>>() {
        modules if modules.is_empty() => Ok(()),
        modules => Err(Failure::Failed(format!("predictions of {} are out of bounds", modules.join(", ")))),
    }
}

fn check_arguments(args: &ProfileArgs) -> Result<(), Failure> {
    for (is_good, problem) in [
        (args.threads > 0, "`threads`: must be at least 1"),
        (args.tokens_max >= 16, "`tokens-max`: must be at least 16"),
        (args.error_bound > 0.0, "`error-bound`: must be above 0"),
        (args.seconds_max > 0.0, "`seconds-max`: must be above 0"),
        (args.layers != Some(0), "`layers`: must be at least 1"),
        (args.check.is_none_or(|microbatches| microbatches >= 2), "`check`: must be at least 2"),
    ] {
        if !is_good {
            return Err(Failure::Misuse(format!("invalid {problem}")));
        }
    }
    Ok(())
}

/// Returns the model to run and predict: a preset, or the model of a directory.
fn model(name: &str) -> Result<MeasuredModel, Failure> {
    let spec = model_spec(&[name.to_owned()])?;
    Ok(match checkpoint_path(name).map(ModelDirectory::open).transpose()? {
        Some(directory) => MeasuredModel::from_config(&directory.documents().config, spec)?,
        None => MeasuredModel::from_spec(spec)?,
    })
}

fn measure_into<D: Device>(
    args: &ProfileArgs,
    model: &MeasuredModel,
    device: &D,
    directory: &Path,
) -> Result<(MeasuredJson, Profile), Failure> {
    let start = Instant::now();
    std::fs::create_dir_all(directory).map_err(|error| Failure::from(error).in_file(directory))?;
    let options = MeasureOptions {
        tokens_max: args.tokens_max,
        error_bound: args.error_bound,
        seconds_max: args.seconds_max,
        layers: args.layers,
        seed: args.seed,
        ..MeasureOptions::default()
    };
    let measured = measure(model, device, &options, say)?;
    let path = directory.join(format!("{}.csv", file_stem(&model.spec.name)));
    let text = measured.file.to_csv();
    place_file(&path, |file| Ok(file.write_all(text.as_bytes())?))?;
    let name = path.display().to_string();
    let profile = Profile::parse([(name.as_str(), text.as_str())])?;
    let json = MeasuredJson::new(&measured, name, profile.points().len(), start.elapsed().as_secs_f64());
    Ok((json, profile))
}

fn run_check<D: Device>(
    args: &ProfileArgs,
    model: &MeasuredModel,
    device: &D,
    (profile, microbatches): (&Profile, usize),
) -> Result<CheckReport, Failure> {
    // A profile that its microbatches refute is checked like any other.
    let options = ProfileOptions::default().unchecked();
    let predictor = CostModel::from_profile(model.spec.clone(), profile, options)?;
    warn(predictor.profile_warnings());
    let options =
        CheckOptions { microbatches, repeats: CHECK_REPEATS, tokens_max: args.tokens_max, seed: args.seed };
    Ok(check(model, &predictor, device, &options, say)?)
}

/// Prints a progress line on standard error.
#[expect(clippy::print_stderr, reason = "progress goes to standard error")]
fn say(line: &str) {
    eprintln!("{line}");
}

/// Replaces the characters in a model name that file names should not have.
fn file_stem(name: &str) -> String {
    name.chars()
        .map(|letter| if letter.is_alphanumeric() || "-_.".contains(letter) { letter } else { '-' })
        .collect()
}

impl MeasuredJson {
    fn new(measured: &MeasuredProfile, profile: String, points: usize, seconds: f64) -> Self {
        let module = |report: &ModuleReport| ModuleJson {
            module: report.module,
            layers: report.layers,
            shapes: report.whole.points.len(),
            attention_lengths: report.attention.as_ref().map_or(0, |lengths| lengths.points.len()),
            rounds: report.rounds,
            error_max: report.error_max(),
            intervals_open: report.whole.open + report.attention.as_ref().map_or(0, |lengths| lengths.open),
            tokens: report.tokens,
            kept_bytes_per_token: report.kept_bytes_per_token,
            flops: report.flops,
            peak_share: report.flops / measured.peak_flops,
        };
        let modules = measured.modules.iter().map(module).collect();
        Self {
            profile,
            clock: measured.clock.name(),
            points,
            seconds,
            peak_flops: measured.peak_flops,
            modules,
        }
    }
}

fn print(out: &mut impl Write, json: &ProfileJson<'_>) -> Result<(), Failure> {
    if let Some(measured) = &json.measured {
        let MeasuredJson { profile, clock, points, seconds, peak_flops, modules } = measured;
        writeln!(out, "{profile}: {points} points of {} in {seconds:.0} s, {clock}", json.model)?;
        let gigaflops = peak_flops / 1e9;
        writeln!(out, "matrix products reach {gigaflops:.1} GFLOP/s on {}", json.device)?;
        for module in modules {
            let error = module.error_max.map_or_else(|| "not known".to_owned(), percent);
            writeln!(
                out,
                "{}: {} layers, {} shapes, {} lengths of attention; largest error between them {error}, {} intervals left open; \
                 {} of the peak at {} tokens, which keep {} each",
                module.module,
                module.layers,
                module.shapes,
                module.attention_lengths,
                module.intervals_open,
                percent(module.peak_share),
                module.tokens,
                format_bytes(module.kept_bytes_per_token)
            )?;
        }
    }
    json.check.map_or(Ok(()), |report| print_check(out, report))
}

fn print_check(out: &mut impl Write, report: &CheckReport) -> Result<(), Failure> {
    writeln!(
        out,
        "{:<7} {:>5} {:>7} {:>7} {:>12} {:>12} {:>8} {:>7} {:>9}",
        "module", "micro", "samples", "tokens", "predicted ms", "measured ms", "error", "spread", "corrected"
    )?;
    for row in &report.microbatches {
        let CheckedMicrobatch {
            module, microbatch, samples, tokens, predicted_ns, measured_ns, spread, ..
        } = row;
        let error = |ns: u64| format!("{:+.1} %", 100.0 * (ns as f64 / (*measured_ns as f64).max(1.0) - 1.0));
        let [predicted, measured] = [predicted_ns, measured_ns].map(|ns| *ns as f64 / 1e6);
        writeln!(
            out,
            "{module:<7} {microbatch:>5} {samples:>7} {tokens:>7} {predicted:>12.2} {measured:>12.2} {:>8} {:>7} {:>9}",
            error(*predicted_ns),
            percent(*spread),
            row.corrected_ns.map(error).unwrap_or_default()
        )?;
    }
    for module in &report.modules {
        let ErrorSummary { count, p50: median, p95, bias, .. } = module.errors;
        writeln!(
            out,
            "{}: error of {count} microbatches median {} (bound {}), p95 {} (bound {}), bias {}; runs of one spread {} \
             (median), {} (p95): {}",
            module.module,
            percent(median),
            percent(MEDIAN_BOUND),
            percent(p95),
            percent(module.p95_bound),
            percent(bias),
            percent(module.spread_median),
            percent(module.spread_p95),
            if module.is_within { "within bounds" } else { "OUT OF BOUNDS" }
        )?;
        writeln!(
            out,
            "{}: second half, mean error {} as predicted, {} with the correction of the first half ({} bins)",
            module.module,
            percent(module.second_half.mape),
            percent(module.corrected.mape),
            module.corrected_bins
        )?;
    }
    Ok(())
}

fn percent(fraction: f64) -> String {
    format!("{:.1} %", 100.0 * fraction)
}
