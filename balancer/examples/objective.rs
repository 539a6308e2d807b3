//! Compares strategy gains on pipelines, in single-thread CPU time.
//!
//! `cargo run --release --example objective -- [--work N | --cpu-ms T] [--noise PERCENT] [--draws N]
//! [--cap FACTOR] [FILE@DP:STAGES,...[:ENCODER_DP]]...`
//!
//! A line per instance: makespan / floor for every strategy, where the floor is a rank's mean load in the
//! slowest module; how much lower the search ends than min-max with the best order; its bound; CPU
//! milliseconds for both. With noise, plans are computed on the predicted times and run on times that deviate
//! from them lognormally; figures are means over the draws. A cap limits a microbatch's tokens, as a multiple
//! of their mean. Without a file, a generated batch is used.
#![expect(clippy::print_stdout, reason = "an example prints its result")]

use dflop_balancer::schedule::ScheduleKind;
use dflop_balancer::{
    Budget, Caps, CompiledSchedule, Instance, PipelineAssignment, PipelineConfig, PipelineObjective,
    Strategy, balance_pipeline,
};
use std::error::Error;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Approximate work units per CPU millisecond, for planning a deadline.
const WORK_PER_MS: u64 = 14_000;

/// Compared settings, by column.
const COLUMNS: [(&str, Strategy, PipelineObjective); 5] = [
    ("blind", Strategy::ROUND_ROBIN, PipelineObjective::Makespan),
    ("lpt", Strategy::LPT, PipelineObjective::Makespan),
    ("mlpt", Strategy::MULTI_LPT, PipelineObjective::Makespan),
    ("minmax", Strategy::SEARCH, PipelineObjective::MinMax),
    ("search", Strategy::SEARCH, PipelineObjective::Makespan),
];

/// Command-line settings.
struct Settings {
    work: u64,
    cpu_ms: Option<u64>,
    noise: f64,
    draws: u64,
    cap: Option<f64>,
    cases: Vec<Case>,
}

/// Instance on a pipeline.
struct Case {
    name: String,
    /// Parsed file, to build instances with different times.
    file: serde_json::Value,
    instance: Instance,
    config: PipelineConfig,
}

fn main() -> Result<()> {
    let settings = read_arguments()?;
    let names: Vec<String> = COLUMNS.iter().map(|(name, ..)| format!("{name:>7}")).collect();
    println!("{:<28} {}  lower %   bound  CPU ms (minmax, search)", "makespan / floor", names.join(" "));
    let mut logarithms = Vec::new();
    for case in &settings.cases {
        logarithms.push(compare(&settings, case)?);
    }
    let mean = logarithms.iter().sum::<f64>() / logarithms.len() as f64;
    println!("geometric mean: {:.2} % lower than min-max with the best order", (1.0 - mean.exp()) * 100.0);
    Ok(())
}

/// Prints a line; returns the logarithm of search / min-max.
fn compare(settings: &Settings, case: &Case) -> Result<f64> {
    let Case { instance, config, .. } = case;
    let everything: Vec<u32> = (0..instance.items() as u32).collect();
    let total_ns = instance.load_ns(&everything).into_iter().max().unwrap_or(0);
    let floor_ns = total_ns as f64 / config.dp_size as f64;
    let (mut ratios, mut millis, mut bound) = (Vec::new(), Vec::new(), 0.0);
    for (_, strategy, objective) in COLUMNS {
        let begin = cpu_seconds();
        let config = config.clone().objective(objective);
        let found =
            balance_pipeline(instance, &config, strategy, &caps(settings, case)?, &mut budget(settings));
        let found = match found {
            Ok(found) => found,
            // Data-blind assignments ignore caps.
            Err(error) if strategy == Strategy::SEARCH => return Err(error.into()),
            Err(_) => {
                ratios.push(f64::NAN);
                continue;
            }
        };
        millis.push((cpu_seconds() - begin) * 1e3);
        ratios.push(run_on_truth(settings, case, &found)? / floor_ns);
        bound = found.bound.ns as f64 / floor_ns;
    }
    let shown: Vec<String> = ratios.iter().map(|ratio| format!("{ratio:>7.4}")).collect();
    let [.., min_max, search] = ratios[..] else { return Err("no strategies".into()) };
    let [.., min_max_ms, search_ms] = millis[..] else { return Err("no strategies".into()) };
    let lower = (1.0 - search / min_max) * 100.0;
    println!(
        "{:<28} {} {lower:>8.2} {bound:>8.4} {min_max_ms:>7.1} {search_ms:>7.1}",
        case.name,
        shown.join(" ")
    );
    Ok((search / min_max).ln())
}

/// Returns the slowest rank's makespan, nanoseconds: predicted, or the mean over draws of true times.
fn run_on_truth(settings: &Settings, case: &Case, plan: &PipelineAssignment) -> Result<f64> {
    if settings.noise == 0.0 {
        return Ok(plan.makespan_ns as f64);
    }
    let stages = case.config.stages.iter().sum();
    let rows: Vec<usize> = (0..stages).collect();
    let kind = ScheduleKind::OneForwardOneBackward;
    let mut compiled = CompiledSchedule::new(kind, &rows, plan.ranks[0].len())?;
    let mut sum = 0.0;
    for draw in 0..settings.draws {
        let times = case.config.ranks_times(&with_noise(case, settings.noise, draw)?, &plan.ranks)?;
        let makespans = times.iter().map(|times| compiled.makespan_ns(times));
        sum += makespans.max().unwrap_or(0) as f64;
    }
    Ok(sum / settings.draws as f64)
}

/// Multiplies every time by a lognormal factor with mean 1.
fn with_noise(case: &Case, sigma: f64, draw: u64) -> Result<Instance> {
    let (modules, items) = (case.instance.modules(), case.instance.items() as u32);
    let mut random = Random(0x5eed_0000 + draw);
    let times_ns = (0..items).flat_map(|item| case.instance.times_ns(item)).map(|&time_ns| {
        let normal = (0..12).map(|_| random.uniform()).sum::<f64>() - 6.0;
        (time_ns as f64 * (sigma * normal - sigma * sigma / 2.0).exp()).round() as u64
    });
    Ok(Instance::new(case.instance.groups(), modules, times_ns.collect())?)
}

fn caps(settings: &Settings, case: &Case) -> Result<Caps> {
    let Some(cap) = settings.cap else { return Ok(Caps::default()) };
    let tokens = case.file["tok"].as_array().ok_or("the instance has no tokens")?;
    let tokens: Vec<u64> = tokens.iter().filter_map(serde_json::Value::as_u64).collect();
    let mean = tokens.iter().sum::<u64>() as f64 / case.instance.groups() as f64;
    let largest = tokens.iter().copied().max().unwrap_or(0);
    Ok(Caps { tokens_max: Some(largest.max((mean * cap) as u64)), bytes_max: None })
}

fn budget(settings: &Settings) -> Budget {
    let Some(cpu_ms) = settings.cpu_ms else { return Budget::work(settings.work) };
    let end = cpu_seconds() + cpu_ms as f64 / 1e3;
    Budget::work(cpu_ms * WORK_PER_MS).deadline(move || cpu_seconds() >= end)
}

/// Returns this thread's CPU time if the system reports it; otherwise wall time.
#[cfg(unix)]
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Returns this thread's CPU time if the system reports it; otherwise wall time.
#[cfg(not(unix))]
fn cpu_seconds() -> f64 {
    std::time::UNIX_EPOCH.elapsed().map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

fn read_arguments() -> Result<Settings> {
    let mut settings =
        Settings { work: 1_400_000, cpu_ms: None, noise: 0.0, draws: 30, cap: None, cases: Vec::new() };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("`{arg}` needs a value"));
        match arg.as_str() {
            "--work" => settings.work = value()?.parse()?,
            "--cpu-ms" => settings.cpu_ms = Some(value()?.parse()?),
            "--noise" => settings.noise = value()?.parse::<f64>()? / 100.0,
            "--draws" => settings.draws = value()?.parse()?,
            "--cap" => settings.cap = Some(value()?.parse()?),
            _ => settings.cases.push(read_case(&arg)?),
        }
    }
    if settings.cases.is_empty() {
        settings.cases.push(case(&generated(), 2, vec![1, 3])?);
        settings.work = settings.work.min(100_000);
    }
    Ok(settings)
}

/// Parses `FILE@DP:STAGES,...[:ENCODER_DP]`.
fn read_case(arg: &str) -> Result<Case> {
    let usage = || format!("`{arg}` is not FILE@DP:STAGES,...[:ENCODER_DP]");
    let (file, pipeline) = arg.rsplit_once('@').ok_or_else(usage)?;
    let (dp_size, stages) = pipeline.split_once(':').ok_or_else(usage)?;
    let (stages, encoder_dp) = stages.split_once(':').unwrap_or((stages, dp_size));
    let stages: Vec<usize> = stages.split(',').map(str::parse).collect::<std::result::Result<_, _>>()?;
    let (dp_size, encoder_dp) = (dp_size.parse()?, encoder_dp.parse()?);
    let mut dp_sizes = vec![encoder_dp; stages.len() - 1];
    dp_sizes.push(dp_size);
    let mut case = case(&std::fs::read_to_string(file)?, dp_size, stages)?;
    case.config = case.config.module_dp_sizes(dp_sizes);
    Ok(case)
}

fn case(text: &str, dp_size: usize, stages: Vec<usize>) -> Result<Case> {
    let (instance, file) = (Instance::from_json(text)?, serde_json::from_str(text)?);
    let in_a_row = stages.iter().map(usize::to_string).collect::<Vec<_>>().join("+");
    let name = format!("{} {dp_size}x({in_a_row})", instance.name());
    Ok(Case { name, file, instance, config: PipelineConfig::new(dp_size, stages) })
}

/// Generates an instance file with 128 samples for 16 groups: short texts, images, a few videos.
fn generated() -> String {
    let mut random = Random(7);
    let (mut times_ns, mut tokens) = (Vec::new(), Vec::new());
    for _ in 0..128 {
        let tiles = [0, 1, 2, 4, 8, 24][random.next() as usize % 6];
        let text = 40 + random.next() % 400;
        times_ns.push([tiles * 1_000_000, (tiles * 200 + text) * 4_000]);
        tokens.push(tiles * 200 + text);
    }
    serde_json::json!({"name": "generated", "n": 128, "m": 16, "c": 2, "d": times_ns, "tok": tokens})
        .to_string()
}

/// A splitmix64 generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let state = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^ (state >> 31)
    }

    fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}
