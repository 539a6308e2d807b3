//! Shows how corrections converge from wrong starts: microbatch prediction errors by the number of measured
//! microbatches.
//!
//! ```sh
//! cargo run --release -p dflop-costmodel --example correction_starts
//! ```
//!
//! Microbatches with images and texts run on 8 ranks on a device that differs from the prediction. Only
//! whole-microbatch times are measured, with 2 % noise. Errors are over 400 further microbatches, medians
//! over 20 runs.

use std::io::Write;

use dflop_costmodel::correction::{CorrectionOptions, CorrectionTracker, Observation, SampleTime};
use dflop_costmodel::random::SplitMix64;
use dflop_costmodel::{CorrectionTable, MicrobatchConstants, Module, median};

const RANKS: u32 = 8;
const SEEDS: u64 = 20;
/// Numbers of steps, with 8 microbatches each, after which errors are shown.
const SHOWN: [u64; 6] = [0, 1, 2, 3, 5, 10];
const NOISE: f64 = 0.02;

/// Wrong assumptions at the start.
struct Start {
    name: &'static str,
    /// True divided by predicted time that a sample adds, in vision and LLM.
    scales: [f64; 2],
    floor_ns: f64,
    base_ns: f64,
    /// Share of microbatches that take three times as long.
    stragglers: f64,
    /// Slowdown factor on rank 5.
    slow_rank: f64,
}

const RIGHT: Start =
    Start { name: "right", scales: [1.0; 2], floor_ns: 0.0, base_ns: 0.0, stragglers: 0.0, slow_rank: 1.0 };

const STARTS: [Start; 9] = [
    RIGHT,
    Start { name: "vision 2 x too fast", scales: [2.0, 1.0], ..RIGHT },
    Start { name: "llm 2 x too slow", scales: [1.0, 0.5], ..RIGHT },
    Start { name: "both off (a stated rate)", scales: [1.6, 0.9], ..RIGHT },
    Start { name: "constant of 150 ms", base_ns: 150e6, ..RIGHT },
    Start { name: "floor of 420 ms", floor_ns: 420e6, ..RIGHT },
    Start { name: "floor, constant, both off", scales: [1.5, 0.8], floor_ns: 600e6, base_ns: 40e6, ..RIGHT },
    Start { name: "vision off, 5 % stragglers", scales: [2.0, 1.0], stragglers: 0.05, ..RIGHT },
    Start { name: "vision off, a rank 1.5 x slow", scales: [2.0, 1.0], slow_rank: 1.5, ..RIGHT },
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut out = std::io::stdout().lock();
    write!(out, "{:<32}", "median / p95 error after")?;
    for steps in SHOWN {
        write!(out, "{:>15}", format!("{} microb.", steps * u64::from(RANKS)))?;
    }
    writeln!(out, "  slow ranks")?;
    for start in &STARTS {
        write!(out, "{:<32}", start.name)?;
        let mut named = Vec::new();
        for steps in SHOWN {
            let (mut medians, mut tails) = (Vec::new(), Vec::new());
            for seed in 1..=SEEDS {
                let (errors, slow) = run(start, steps, seed)?;
                medians.push(errors[errors.len() / 2]);
                tails.push(errors[errors.len() * 95 / 100]);
                named = slow;
            }
            write!(
                out,
                "{:>15}",
                format!("{:.1} / {:.1} %", 100.0 * median(medians), 100.0 * median(tails))
            )?;
        }
        writeln!(out, "  {}", if named.is_empty() { "none".to_owned() } else { named.join(", ") })?;
    }
    Ok(())
}

/// Measures this many steps; returns the errors on other microbatches, ascending, and the slow ranks in the
/// last interval.
fn run(start: &Start, steps: u64, seed: u64) -> dflop_costmodel::Result<(Vec<f64>, Vec<String>)> {
    let options = CorrectionOptions { interval_steps: steps.max(1), ..CorrectionOptions::default() };
    let mut tracker = CorrectionTracker::new(options)?;
    let mut random = SplitMix64::new(seed);
    let (mut table, mut slow) = (None, Vec::new());
    for _ in 0..steps {
        for rank in 0..RANKS {
            let (added, ns) = microbatch(start, &mut random);
            let wait = if fraction(&mut random) < start.stragglers { 3.0 } else { 1.0 };
            let own = if rank == 5 { start.slow_rank } else { 1.0 };
            let noise: f64 = (0..12).map(|_| fraction(&mut random)).sum::<f64>() - 6.0;
            let measured_ns = (ns * wait * own * (1.0 + NOISE * noise)) as u64;
            let sample = |(module, ns)| SampleTime { module, size: 1_000, ns };
            let samples = [Module::Vision, Module::Llm].into_iter().zip(added).map(sample).collect();
            let constants = MicrobatchConstants::default();
            tracker.observe(&Observation { module: None, rank, measured_ns, constants, samples })?;
        }
        if let Some(report) = tracker.end_step() {
            table = report.table.or(table);
            slow = report
                .slow_ranks
                .iter()
                .map(|slow| format!("{} ({:.2} x)", slow.rank, slow.factor))
                .collect();
        }
    }
    let mut errors: Vec<f64> = (0..400)
        .map(|_| {
            let (added, ns) = microbatch(start, &mut random);
            (predicted(table.as_ref(), added) / ns - 1.0).abs()
        })
        .collect();
    errors.sort_by(f64::total_cmp);
    Ok((errors, slow))
}

/// Draws a microbatch: the predicted added time in vision and LLM, and the true time.
fn microbatch(start: &Start, random: &mut SplitMix64) -> ([u64; 2], f64) {
    let images = 40e6 + 300e6 * fraction(random) * fraction(random);
    let added = [images, 0.5 * images + 60e6 + 300e6 * fraction(random)];
    let device_ns = start.base_ns + added[0] * start.scales[0] + added[1] * start.scales[1];
    (added.map(|ns| ns as u64), device_ns.max(start.floor_ns))
}

fn predicted(table: Option<&CorrectionTable>, added: [u64; 2]) -> f64 {
    let Some(table) = table else { return added.iter().sum::<u64>() as f64 };
    let corrected = [Module::Vision, Module::Llm].into_iter().zip(added);
    let corrected: u64 = corrected.map(|(module, ns)| table.apply(module, 1_000, ns)).sum();
    table.whole_constants().unwrap_or_default().microbatch_ns(corrected) as f64
}

fn fraction(random: &mut SplitMix64) -> f64 {
    random.below(1 << 30) as f64 / f64::from(1 << 30)
}
