//! Compares whole samples, one context-parallel degree for all samples, and dflop's split samples.
//!
//! For every table of shapes, ranks under FSDP draw 1, 2, 4 and 8 samples each. Step times are predicted, for
//! a device preset, and printed over the *divisible bound*: the work of all samples in all modules over the
//! number of ranks, which no placement reaches unless work can be divided at will. Samples on the same ranks
//! share messages, in all rows. Then the CPU time of planning, with splits over without.
//!
//! A second table has pipelines, with 1, 2 and 4 samples in each of the microbatches of a rank; times are
//! over the mean work of the slowest stage, which fill and drain exceed.
//!
//! Usage: `context_parallel MODEL TABLE.csv...`; a table has the columns `tiles,seq_len`, `frame_count` with
//! `width,height` (videos at 30 frames per second, of which 2 are sampled), `duration_s`, or `width,height`.
#![expect(clippy::print_stdout, reason = "the table is what the program is for")]

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::ExitCode;

use dflop_balancer::{
    Budget, Caps, ContextAssignment, ContextItem, ContextProblem, ContextSlice, Instance, PipelineAssignment,
    PipelineConfig, Strategy, balance, balance_context, balance_lockstep, balance_pipeline, context_step_ns,
    lockstep_ns,
};
use dflop_costmodel::random::SplitMix64;
use dflop_costmodel::tokens::EncoderWork;
use dflop_costmodel::{
    AudioLength, CostModel, DevicePreset, ImageSize, KeyExchange, KeyExchangeKind, MessageLatency, ModelSpec,
    SampleShape, VideoShape,
};
use rustix::time::{ClockId, clock_gettime};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

const DEVICE: &str = "h100";
const RANKS: usize = 64;
const SAMPLES_PER_RANK: [usize; 4] = [1, 2, 4, 8];
/// Largest number of ranks for a sample.
const GROUP_RANKS: usize = 8;
/// Pipelines, their microbatches, and stages of an encoder and of the LLM.
const PIPELINES: usize = 8;
const MICROBATCHES: usize = 8;
const STAGES: [usize; 2] = [1, 4];
const SAMPLES_PER_MICROBATCH: [usize; 3] = [1, 2, 4];
/// Steps per row.
const STEPS: usize = 6;
const SEED: u64 = 5;
const WORK: u64 = 20_000;
/// Timed plans, of which the fastest counts.
const TIMES: usize = 15;
/// Work divisor for splits, as in `StepPlanner::plan_context`.
const SEARCH_DIVISOR: u64 = 5;
/// Words to tokens of text.
const TOKENS_PER_WORD: f64 = 1.3;
/// Text tokens of a sample in a table without text.
const TEXT_TOKENS: u32 = 200;
/// Frames per second of the videos over those that are sampled.
const FRAMES_PER_SAMPLED: u32 = 15;
/// Positions of a tile in the encoder.
const TILE_TOKENS: u64 = 729;
/// Positions of a tile in the encoder of `InternVL`, with the class token.
const INTERN_TILE_TOKENS: u64 = 1025;

/// Sample with whole and split costs.
#[derive(Clone)]
struct Sample {
    tokens: u32,
    item: ContextItem,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match &args[..] {
        [model, tables @ ..] if !tables.is_empty() => {
            tables.iter().try_for_each(|table| run(model, Path::new(table)))
        }
        _ => Err("usage: context_parallel MODEL TABLE.csv...".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprint(&error);
            ExitCode::FAILURE
        }
    }
}

#[expect(clippy::print_stderr, reason = "a program says on stderr why it failed")]
fn eprint(error: &BoxError) {
    eprintln!("error: {error}");
}

fn run(model: &str, table: &Path) -> Result<(), BoxError> {
    let device = DevicePreset::named(DEVICE)?;
    let model = CostModel::new(ModelSpec::preset(model)?, *device.rate());
    let link = device.links().map(|links| links.nvlink);
    let exchange = KeyExchange { kind: KeyExchangeKind::Ring, link, element_bytes: 2 };
    let samples = read(&model, table, &exchange)?;
    let name = table.file_name().unwrap_or_default().to_string_lossy();
    let longest = samples.iter().map(|sample| sample.tokens).max().unwrap_or(0);
    println!(
        "{name}, {} on {RANKS} x {DEVICE}, FSDP: {} samples, longest {longest} tokens",
        model.spec().name,
        samples.len()
    );
    println!(
        "  samples/rank  data-blind  kk tokens  dflop whole   CP2    CP4    CP8   dflop split  bound  split %   \
         CPU ms whole, split (ratio)"
    );
    for per_rank in SAMPLES_PER_RANK {
        let mut random = SplitMix64::new(SEED);
        let mut sums = [0.0; 10];
        for _ in 0..STEPS {
            let step: Vec<Sample> =
                (0..RANKS * per_rank).map(|_| samples[random.below(samples.len())].clone()).collect();
            let row = compare(&model, &step, &exchange)?;
            sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value / STEPS as f64);
        }
        let [blind, tokens, whole, two, four, eight, split, bound, share, _] = sums;
        let [whole_ms, split_ms] = time(&model, &samples, per_rank, &exchange)?;
        println!(
            "  {per_rank:>12}  {blind:>10.3}  {tokens:>9.3}  {whole:>11.3}  {two:.3}  {four:.3}  {eight:.3}  \
             {split:>11.3}  {bound:.3}  {:>7.0}   {whole_ms:.1}, {split_ms:.1} ({:.2})",
            100.0 * share,
            split_ms / whole_ms
        );
    }
    run_pipelines(&model, &samples, &exchange)
}

fn run_pipelines(model: &CostModel, samples: &[Sample], exchange: &KeyExchange) -> Result<(), BoxError> {
    let [encoder, llm] = STAGES;
    println!("  {PIPELINES} pipelines, {encoder} + {llm} stages, {MICROBATCHES} microbatches, 1F1B");
    println!(
        "  samples/microbatch  data-blind  dflop whole   CP2    CP4    CP8   dflop split  bound  split %   CPU ms \
         whole, split (ratio)"
    );
    for per_microbatch in SAMPLES_PER_MICROBATCH {
        let mut random = SplitMix64::new(SEED);
        let mut sums = [0.0; 10];
        for _ in 0..STEPS {
            let count = PIPELINES * MICROBATCHES * per_microbatch;
            let step: Vec<Sample> =
                (0..count).map(|_| samples[random.below(samples.len())].clone()).collect();
            let row = compare_pipelines(model, &step, exchange)?;
            sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value / STEPS as f64);
        }
        let [blind, whole, two, four, eight, split, bound, share, whole_ms, split_ms] = sums;
        println!(
            "  {per_microbatch:>18}  {blind:>10.3}  {whole:>11.3}  {two:.3}  {four:.3}  {eight:.3}  {split:>11.3}  \
             {bound:.3}  {:>7.0}   {whole_ms:.1}, {split_ms:.1} ({:.2})",
            100.0 * share,
            split_ms / whole_ms
        );
    }
    Ok(())
}

/// Returns the step times over the mean work of the slowest stage: data-blind, whole, of fixed degrees,
/// split, the certified bound; the fraction of samples that are split; and the CPU milliseconds to plan whole
/// samples, and to split them after that.
fn compare_pipelines(
    model: &CostModel,
    step: &[Sample],
    exchange: &KeyExchange,
) -> Result<[f64; 10], BoxError> {
    let modules = step[0].item.media_ns.len() + 1;
    let stages: Vec<usize> = (0..modules).map(|module| STAGES[usize::from(module + 1 == modules)]).collect();
    let config = PipelineConfig::new(PIPELINES, stages.clone()).parallel_encoders();
    let shared = |ns: u64, module: usize| ns.div_ceil(stages[module] as u64);
    let stage = |sample: &Sample| {
        let mut item = sample.item.clone();
        for (module, media) in item.media_ns.iter_mut().enumerate() {
            for ns in media {
                *ns = shared(*ns, module);
            }
        }
        for slice in &mut item.slices {
            let message_ns = slice.message_ns / STAGES[1] as i64;
            *slice = ContextSlice { ns: shared(slice.ns, modules - 1), message_ns, ..*slice };
        }
        Sample { item, ..*sample }
    };
    let step: Vec<Sample> = step.iter().map(stage).collect();
    let times = |sample: &Sample| {
        let encoders = sample.item.media_ns.iter().map(|media| media.iter().sum::<u64>());
        encoders.chain([sample.item.slices[0].ns]).collect::<Vec<u64>>()
    };
    let times_ns: Vec<u64> = step.iter().flat_map(times).collect();
    let sum = |module: usize| times_ns.iter().skip(module).step_by(modules).sum::<u64>() as f64;
    let mean = (0..modules).map(sum).fold(0.0, f64::max) / PIPELINES as f64;
    let instance = Instance::new(PIPELINES * MICROBATCHES, modules, times_ns)?;
    let solve = |strategy: Strategy| {
        balance_pipeline(&instance, &config, strategy, &Caps::default(), &mut Budget::work(WORK))
    };
    let problem = |groups: [usize; 2]| -> Result<ContextProblem, BoxError> {
        let latency = |ranks| model.message_latencies(ranks, exchange);
        let mut latencies: Vec<MessageLatency> =
            [1, 2, 4, 8].map(latency).into_iter().collect::<Result<_, _>>()?;
        for own in &mut latencies {
            own.exposed_ns = shared(own.exposed_ns, modules - 1);
            own.hidden_ns = shared(own.hidden_ns, modules - 1);
        }
        let items = step.iter().map(|sample| sample.item.clone()).collect();
        let problem = ContextProblem::new([PIPELINES, MICROBATCHES], modules - 1, items)?;
        Ok(problem.pipeline(&config)?.group_ranks(groups)?.latencies(latencies)?)
    };
    let groups = problem([1, GROUP_RANKS])?;
    let begin = cpu_ms();
    let whole = solve(Strategy::SEARCH)?;
    let middle = cpu_ms();
    let split = split(&groups, &whole)?;
    let split_ms = cpu_ms() - begin;
    let mut row = [0.0; 10];
    row[0] = solve(Strategy::ROUND_ROBIN)?.makespan_ns as f64 / mean;
    row[1] = whole.makespan_ns as f64 / mean;
    for (at, ranks) in [2, 4, 8].into_iter().enumerate() {
        let work = whole.work_spent.min(WORK / SEARCH_DIVISOR) / 2;
        let fixed = balance_context(&problem([ranks; 2])?, None, &mut Budget::work(work))?;
        row[2 + at] = fixed.makespan_ns as f64 / mean;
    }
    row[5] = split.makespan_ns as f64 / mean;
    row[6] = split.bound.ns as f64 / mean;
    let count = split.places.iter().filter(|place| place.ranks.len() > 1).count();
    row[7] = count as f64 / step.len() as f64;
    [row[8], row[9]] = [middle - begin, split_ms];
    Ok(row)
}

/// Returns the step times over the divisible bound: data-blind, by tokens, whole, of fixed degrees, split,
/// the certified bound; and the fraction of samples that are split.
fn compare(model: &CostModel, step: &[Sample], exchange: &KeyExchange) -> Result<[f64; 10], BoxError> {
    let instance = instance(step)?;
    let loads = (0..step.len() as u32).flat_map(|item| instance.times_ns(item).to_vec());
    let divisible = loads.map(|ns| ns as f64).sum::<f64>() / RANKS as f64;
    let time = |groups: &[Vec<u32>]| {
        let ranks: Vec<Vec<Vec<u64>>> = groups.iter().map(|group| vec![instance.load_ns(group)]).collect();
        lockstep_ns(&ranks) as f64 / divisible
    };
    let dealt: Vec<Vec<u32>> =
        (0..RANKS).map(|rank| (rank as u32..step.len() as u32).step_by(RANKS).collect()).collect();
    let tokens = step.iter().map(|sample| u64::from(sample.tokens)).collect();
    let by_tokens = balance(
        &Instance::new(RANKS, 1, tokens)?,
        Strategy::KARMARKAR_KARP,
        &Caps::default(),
        &mut Budget::work(0),
    )?;
    let whole = balance_lockstep(&instance, RANKS, &Caps::default(), &mut Budget::work(WORK))?;
    let mut row = [0.0; 10];
    row[0] = time(&dealt);
    row[1] = time(&by_tokens.groups);
    row[2] = whole.makespan_ns as f64 / divisible;
    for (at, ranks) in [2, 4, 8].into_iter().enumerate() {
        let problem = problem(model, step, [ranks, ranks], exchange)?;
        let work = whole.work_spent.min(WORK / SEARCH_DIVISOR) / 2;
        let fixed = balance_context(&problem, None, &mut Budget::work(work))?;
        row[3 + at] = packed_ns(model, step, &fixed, exchange)? as f64 / divisible;
    }
    let split = split(&problem(model, step, [1, GROUP_RANKS], exchange)?, &whole)?;
    row[6] = packed_ns(model, step, &split, exchange)? as f64 / divisible;
    row[7] = split.bound.ns as f64 / divisible;
    let count = split.places.iter().filter(|place| place.ranks.len() > 1).count();
    row[8] = count as f64 / step.len() as f64;
    Ok(row)
}

/// Splits samples after whole samples were placed, as `StepPlanner::plan_context` does.
fn split(problem: &ContextProblem, whole: &PipelineAssignment) -> Result<ContextAssignment, BoxError> {
    let work = whole.work_spent.min(WORK / SEARCH_DIVISOR);
    Ok(balance_context(problem, Some(&whole.ranks), &mut Budget::work(work))?)
}

/// Returns the CPU milliseconds to plan a step with whole samples, and with split samples after that: the
/// least of some.
fn time(
    model: &CostModel,
    samples: &[Sample],
    per_rank: usize,
    exchange: &KeyExchange,
) -> Result<[f64; 2], BoxError> {
    let mut random = SplitMix64::new(SEED);
    let step: Vec<Sample> =
        (0..RANKS * per_rank).map(|_| samples[random.below(samples.len())].clone()).collect();
    let instance = instance(&step)?;
    let problem = problem(model, &step, [1, GROUP_RANKS], exchange)?;
    let mut least = [f64::INFINITY; 2];
    for _ in 0..TIMES {
        let start = cpu_ms();
        let whole = balance_lockstep(&instance, RANKS, &Caps::default(), &mut Budget::work(WORK))?;
        let middle = cpu_ms();
        split(&problem, &whole)?;
        let end = cpu_ms();
        least = [least[0].min(middle - start), least[1].min(end - start)];
    }
    Ok(least)
}

fn cpu_ms() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e3 + now.tv_nsec as f64 / 1e6
}

fn instance(step: &[Sample]) -> Result<Instance, BoxError> {
    let times = |sample: &Sample| {
        let encoders = sample.item.media_ns.iter().map(|media| media.iter().sum::<u64>());
        encoders.chain([sample.item.slices[0].ns]).collect::<Vec<u64>>()
    };
    let modules = step[0].item.media_ns.len() + 1;
    Ok(Instance::new(RANKS, modules, step.iter().flat_map(times).collect())?)
}

fn problem(
    model: &CostModel,
    step: &[Sample],
    groups: [usize; 2],
    exchange: &KeyExchange,
) -> Result<ContextProblem, BoxError> {
    let latencies: Vec<MessageLatency> = [1, 2, 4, 8]
        .map(|ranks| model.message_latencies(ranks, exchange))
        .into_iter()
        .collect::<Result<_, _>>()?;
    let items: Vec<ContextItem> = step.iter().map(|sample| sample.item.clone()).collect();
    let ranks = NonZeroUsize::new(RANKS).ok_or("no ranks")?;
    let encoders = step[0].item.media_ns.len();
    Ok(ContextProblem::new([RANKS, 1], encoders, items)?
        .shard_ranks(ranks)?
        .group_ranks(groups)?
        .latencies(latencies)?)
}

/// Returns the step time if samples on the same ranks share messages.
fn packed_ns(
    model: &CostModel,
    step: &[Sample],
    found: &ContextAssignment,
    exchange: &KeyExchange,
) -> Result<u64, BoxError> {
    let modules = step[0].item.media_ns.len() + 1;
    let mut times = vec![vec![vec![0_u64; modules]]; RANKS];
    let mut packs: BTreeMap<(usize, usize), Vec<[u32; 2]>> = BTreeMap::new();
    for (place, sample) in found.places.iter().zip(step) {
        for (encoder, ranks) in place.media.iter().enumerate() {
            for (medium, rank) in ranks.iter().enumerate() {
                times[*rank][0][encoder] += sample.item.media_ns[encoder][medium];
            }
        }
        packs.entry((place.ranks.start, place.ranks.len())).or_default().push([sample.tokens, 0]);
    }
    for ((first, size), pack) in packs {
        let slices = model.predict_packed_slices(&pack, size as u32, exchange)?;
        for (rank, slice) in (first..first + size).zip(slices) {
            times[rank][0][modules - 1] += slice.total_ns();
        }
    }
    Ok(context_step_ns(&times, &[], NonZeroUsize::new(RANKS).ok_or("no ranks")?))
}

/// Reads the samples of a table.
fn read(model: &CostModel, table: &Path, exchange: &KeyExchange) -> Result<Vec<Sample>, BoxError> {
    let text = std::fs::read_to_string(table)?;
    let mut lines = text.lines();
    let columns: Vec<&str> = lines.next().ok_or("an empty table")?.split(',').collect();
    let mut known: HashMap<Vec<u64>, Sample> = HashMap::new();
    let mut samples = Vec::new();
    for line in lines {
        let cells: Vec<&str> = line.split(',').collect();
        let cell = |name: &str| -> Option<f64> {
            let at = columns.iter().position(|column| *column == name)?;
            cells.get(at)?.parse().ok()
        };
        let key: Vec<u64> =
            ["tiles", "seq_len", "frame_count", "width", "height", "text_words", "duration_s"]
                .map(|name| cell(name).unwrap_or(0.0).to_bits())
                .to_vec();
        if let Some(sample) = known.get(&key) {
            samples.push(sample.clone());
            continue;
        }
        // A sample that the model does not accept is left out.
        let Some(sample) = sample(model, &cell, exchange)? else { continue };
        known.insert(key, sample.clone());
        samples.push(sample);
    }
    if samples.is_empty() { Err("no sample that the model accepts".into()) } else { Ok(samples) }
}

fn sample(
    model: &CostModel,
    cell: &dyn Fn(&str) -> Option<f64>,
    exchange: &KeyExchange,
) -> Result<Option<Sample>, BoxError> {
    let text_tokens = cell("text_words").map_or(TEXT_TOKENS, |words| (words * TOKENS_PER_WORD) as u32);
    let plain = SampleShape { text_tokens, ..SampleShape::default() };
    let mut parts = 1;
    let cost = if let (Some(tiles), Some(tokens)) = (cell("tiles"), cell("seq_len")) {
        let own = if model.spec().name.starts_with("internvl") { INTERN_TILE_TOKENS } else { TILE_TOKENS };
        let tiles = tiles as u64;
        let pairs = tiles * own * own;
        parts = tiles.max(1);
        let work = EncoderWork {
            items: tiles,
            encoder_tokens: tiles * own,
            attention_pairs: pairs,
            window_pairs: pairs,
            ..EncoderWork::default()
        };
        model.predict_counted(&[work], tokens as u32, 0)
    } else if let (Some(frames), Some(width), Some(height)) =
        (cell("frame_count"), cell("width"), cell("height"))
    {
        let frames = (frames as u32 / FRAMES_PER_SAMPLED).max(1);
        let video = VideoShape { frames, width: width as u32, height: height as u32 };
        let shape = SampleShape { videos: vec![video], ..plain };
        parts = model.spec().encoders().map(|(_, _, rule)| rule.parts(&shape)).max().unwrap_or(1);
        model.predict(&shape)
    } else if let Some(seconds) = cell("duration_s") {
        let clip = AudioLength { frames: (seconds * 16_000.0) as u64, sample_rate_hz: 16_000 };
        model.predict(&SampleShape { audio: vec![clip], ..plain })
    } else if let (Some(width), Some(height)) = (cell("width"), cell("height")) {
        let image = ImageSize { width: width as u32, height: height as u32 };
        let shape = SampleShape { images: vec![image], ..plain };
        parts = model.spec().encoders().map(|(_, _, rule)| rule.parts(&shape)).max().unwrap_or(1);
        model.predict(&shape)
    } else {
        return Err("a table without columns that are known, see the usage".into());
    };
    let Ok(cost) = cost else { return Ok(None) };
    let (_, encoders) = cost.module_ns.as_slice().split_last().ok_or("a model without modules")?;
    let mut slices = Vec::new();
    for ranks in [1, 2, 4, 8] {
        let own = model.predict_slice_share(cost.tokens, 0, ranks, exchange)?;
        let tokens = u64::from(cost.tokens.div_ceil(ranks));
        slices.push(ContextSlice { ns: own.ns, message_ns: own.message_ns, tokens, bytes: 0 });
    }
    // A table does not say how many media a sample has, so it has one, cut between tiles or layers of frames.
    let pieces = parts.min(GROUP_RANKS as u64);
    let before = |ns: u64, piece: u64| ns * (piece * parts / pieces) / parts;
    let cut = |ns: &u64| (0..pieces).map(|piece| before(*ns, piece + 1) - before(*ns, piece)).collect();
    let media_ns = encoders.iter().map(cut).collect();
    Ok(Some(Sample { tokens: cost.tokens, item: ContextItem { media_ns, slices } }))
}
