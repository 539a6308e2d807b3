//! Measures an index at scale: bytes per sample, time to open, and time to the first step at any position.
//!
//! Writes samples with three fields and 12-byte keys as Zstandard shards (the contents repeat, so they are
//! small on disk), indexes them, and prints a JSON line. Each time is the shortest measurement, in
//! milliseconds. Opening verifies the file checksum on as many threads as there are cores, so both the wall
//! time and the process CPU time are printed; plans are timed by thread CPU time. Steps have 512 samples.
#![expect(clippy::print_stdout, reason = "the one JSON line is what the program is for")]

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
use dflop_loader::StepPlanner;
use dflop_loader::index::{Index, IndexOptions};
use dflop_loader::shard::expand_shards;
use dflop_loader::write::{ShardCompression, ShardWriter};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

const SAMPLES: u64 = 1_000_000;
const ROUNDS: usize = 15;
const GLOBAL_BATCH: u64 = 512;
/// Steps whose first plan is timed: the start, deep in the first epoch, and after many epochs.
const STEPS: [u64; 3] = [0, 1_500, 1_000_000_000];

type BoxError = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, Serialize)]
struct Report {
    samples: u64,
    index_bytes_per_sample: f64,
    open_wall_ms: f64,
    open_cpu_ms: f64,
    steps: [u64; 3],
    first_plan_cpu_ms: Vec<f64>,
}

fn main() -> ExitCode {
    let samples = std::env::args().nth(1).map_or(Ok(SAMPLES), |count| count.parse());
    match samples.map_err(BoxError::from).and_then(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprint(&format!("error: {error}\nusage: index_scale [SAMPLES]"));
            ExitCode::FAILURE
        }
    }
}

#[expect(clippy::print_stderr, reason = "a program says on stderr why it failed")]
fn eprint(message: &str) {
    eprintln!("{message}");
}

fn run(samples: u64) -> Result<(), BoxError> {
    let directory = tempfile::tempdir()?;
    let shards_directory = directory.path().join("shards");
    let compression = ShardCompression::Zstd { level: 1 };
    let mut writer = ShardWriter::builder(&shards_directory).compression(compression).build()?;
    let mut png = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\x02\0\0\0\x01\x80".to_vec();
    png.extend([8, 2, 0, 0, 0, 0, 0, 0, 0]);
    for sample in 0..samples {
        let fields: [(&str, &[u8]); 3] =
            [("png", &png), ("txt", b"a red kite over the sea"), ("json", b"{}")];
        writer.write(&format!("{sample:012}"), &fields)?;
    }
    writer.finish()?;
    let shards = expand_shards(&[shards_directory.display().to_string()])?;
    let options = IndexOptions { directory: Some(directory.path().join("index")), ..IndexOptions::default() };
    let index = Index::open_or_build(shards.clone(), &options)?;
    let bytes = std::fs::metadata(index.path().ok_or("the index is in memory")?)?.len();
    let open = || Index::open_or_build(shards.clone(), &options).map(drop);
    let started = Instant::now();
    let open_wall_ms = shortest_ms(|| started.elapsed().as_secs_f64() * 1e3, open)?;
    let open_cpu_ms = shortest_ms(|| cpu_ms(ClockId::ProcessCPUTime), open)?;
    let index = Arc::new(index);
    // Every timing has a separate planner, so that nothing is prepared before.
    let first_plan =
        |step| shortest_ms(|| cpu_ms(ClockId::ThreadCPUTime), || planner(&index)?.plan(step).map(drop));
    let first_plan_cpu_ms = STEPS.into_iter().map(first_plan).collect::<Result<_, _>>()?;
    let index_bytes_per_sample = bytes as f64 / samples as f64;
    let report = Report {
        samples,
        index_bytes_per_sample,
        open_wall_ms,
        open_cpu_ms,
        steps: STEPS,
        first_plan_cpu_ms,
    };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

fn planner(index: &Arc<Index>) -> dflop_loader::Result<StepPlanner> {
    let model = CostModel::new(
        ModelSpec::preset("qwen2.5-vl-7b").expect("a known model"),
        DeviceRate::preset("h100").expect("a known device"),
    );
    StepPlanner::builder(index.clone(), model).global_batch(GLOBAL_BATCH).dp_size(4).work(0).build()
}

fn shortest_ms(
    now_ms: impl Fn() -> f64,
    mut timed: impl FnMut() -> dflop_loader::Result<()>,
) -> Result<f64, BoxError> {
    let mut shortest = f64::INFINITY;
    for _ in 0..ROUNDS {
        let started_ms = now_ms();
        timed()?;
        shortest = shortest.min(now_ms() - started_ms);
    }
    Ok(shortest)
}

fn cpu_ms(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}
