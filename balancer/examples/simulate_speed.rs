//! How many passes a second the makespan of a compiled schedule takes, on one core.
//!
//! ```console
//! $ cargo run --release -p dflop-balancer --example simulate_speed
//! ```
//!
//! Counted are forward and backward passes, the schedule compiled once, one time changed before every call.
//! Time is CPU time of the thread where Linux tells it (best of the repeats), else wall time.

use dflop_balancer::schedule::ScheduleKind;
use dflop_balancer::{CompiledSchedule, StageTimes};
use std::error::Error;
use std::hint::black_box;
use std::io::Write;
use std::time::Instant;

/// Name, schedule, stages, microbatches.
const SHAPES: [(&str, ScheduleKind, usize, usize); 4] = [
    ("gpipe 4 x 16", ScheduleKind::GPipe, 4, 16),
    ("1f1b 4 x 16", ScheduleKind::OneForwardOneBackward, 4, 16),
    ("1f1b 8 x 16", ScheduleKind::OneForwardOneBackward, 8, 16),
    ("1f1b 8 x 64", ScheduleKind::OneForwardOneBackward, 8, 64),
];
const REPEATS: usize = 5;
/// Passes of one repeat.
const PASSES: usize = 60_000_000;

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = std::io::stdout().lock();
    for (name, kind, stages, microbatches) in SHAPES {
        let rows: Vec<usize> = (0..stages).collect();
        let mut compiled = CompiledSchedule::new(kind, &rows, microbatches)?;
        let times_ns: Vec<u64> = (0..stages * microbatches).map(|i| (i * 7919 % 997 + 500) as u64).collect();
        let variants = [1, 2, 3, 5].map(|factor| {
            let mut times_ns = times_ns.clone();
            times_ns[stages] *= factor;
            StageTimes::split(stages, microbatches, &times_ns)
        });
        let variants = variants.into_iter().collect::<Result<Vec<_>, _>>()?;
        let passes = 2 * stages * microbatches;
        let calls = PASSES / passes;
        let mut best_ns = u64::MAX;
        for _ in 0..REPEATS {
            let clock = Clock::start();
            for call in 0..calls {
                black_box(compiled.makespan_ns(black_box(&variants[call % 4])));
            }
            best_ns = best_ns.min(clock.elapsed_ns());
        }
        let rate = (calls * passes) as f64 / best_ns as f64 * 1e3;
        let call_us = best_ns as f64 / calls as f64 / 1e3;
        writeln!(out, "{name:<24} {rate:>8.1} million passes/s {call_us:>8.3} us a call")?;
    }
    Ok(())
}

struct Clock {
    cpu_ns: Option<u64>,
    wall: Instant,
}

impl Clock {
    fn start() -> Self {
        Self { cpu_ns: cpu_ns(), wall: Instant::now() }
    }

    fn elapsed_ns(&self) -> u64 {
        match (self.cpu_ns, cpu_ns()) {
            (Some(start), Some(end)) if end > start => end - start,
            _ => self.wall.elapsed().as_nanos() as u64,
        }
    }
}

/// CPU time of this thread, as Linux tells it.
fn cpu_ns() -> Option<u64> {
    std::fs::read_to_string("/proc/thread-self/schedstat").ok()?.split(' ').next()?.parse().ok()
}
