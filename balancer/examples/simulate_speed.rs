//! Measures the passes per second of a compiled schedule's makespan, on one core.
//!
//! ```console
//! $ cargo run --release -p dflop-balancer --example simulate_speed
//! ```
//!
//! Forward and backward passes are counted, the schedule is compiled once, and a single time changes before
//! every call. Time is thread CPU time if Linux reports it (best repeat), otherwise wall time.

use dflop_balancer::schedule::{ModuleStages, PipelineLayout, ScheduleKind};
use dflop_balancer::{Communication, CompiledSchedule, StageTimes};
use std::error::Error;
use std::hint::black_box;
use std::io::Write;
use std::time::Instant;

const REPEATS: usize = 5;
/// Passes per repeat.
const PASSES: usize = 60_000_000;

/// Name, schedule and layout.
type Shape = (String, ScheduleKind, PipelineLayout);

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = std::io::stdout().lock();
    for (name, kind, layout) in shapes()? {
        let free = Communication::free(layout.stages(), layout.microbatches());
        report(&mut out, &name, kind, &layout, &free)?;
        let per_stage = vec![100; layout.stages()];
        let timed = free.messages(&per_stage, &per_stage)?.reduce_grads(per_stage.clone(), true)?;
        report(&mut out, &format!("{name}, messages"), kind, &layout, &timed)?;
    }
    Ok(())
}

fn shapes() -> Result<Vec<Shape>, Box<dyn Error>> {
    let chains = [
        (ScheduleKind::GPipe, 4, 16),
        (ScheduleKind::OneForwardOneBackward, 4, 16),
        (ScheduleKind::OneForwardOneBackward, 8, 16),
        (ScheduleKind::OneForwardOneBackward, 8, 64),
        (ScheduleKind::Interleaved { chunks: 2 }, 4, 16),
        (ScheduleKind::Interleaved { chunks: 4 }, 8, 64),
        (ScheduleKind::ZeroBubble, 4, 16),
        (ScheduleKind::ZeroBubble, 8, 64),
    ];
    let mut shapes = Vec::new();
    for (kind, ranks, microbatches) in chains {
        let layout = PipelineLayout::chain(ranks, kind.chunks(), microbatches)?;
        shapes.push((format!("{kind} {ranks} x {microbatches}"), kind, layout));
    }
    let layout = PipelineLayout::from_modules(&[ModuleStages::new(1, 2), ModuleStages::new(3, 4)], 16)?;
    shapes.push(("1f1b 2 x 1 + 4 x 3, 16".to_owned(), ScheduleKind::OneForwardOneBackward, layout));
    Ok(shapes)
}

fn report(
    out: &mut impl Write,
    name: &str,
    kind: ScheduleKind,
    layout: &PipelineLayout,
    communication: &Communication,
) -> Result<(), Box<dyn Error>> {
    let (stages, microbatches) = (layout.stages(), layout.microbatches());
    let rows: Vec<usize> = (0..stages).collect();
    let mut compiled = CompiledSchedule::from_layout(kind, layout, &rows, communication)?;
    let times_ns: Vec<u64> = (0..stages * microbatches).map(|i| (i * 7919 % 997 + 500) as u64).collect();
    let variants = [1, 2, 3, 5].map(|factor| {
        let mut times_ns = times_ns.clone();
        times_ns[microbatches / 2] *= factor;
        StageTimes::split(stages, microbatches, &times_ns)
    });
    let variants = variants.into_iter().collect::<Result<Vec<_>, _>>()?;
    let lists = layout.schedule(kind)?;
    let passes = lists.iter().flatten().filter(|action| action.pass().is_some()).count();
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
    writeln!(out, "{name:<34} {rate:>7.1} million passes/s {call_us:>9.3} us a call")?;
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

/// Returns this thread's CPU time, if Linux reports it.
fn cpu_ns() -> Option<u64> {
    std::fs::read_to_string("/proc/thread-self/schedstat").ok()?.split(' ').next()?.parse().ok()
}
