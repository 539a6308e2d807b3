//! Prints the metrics of a loader's stages as a table, and warnings about stalls.

use std::io::Write;

use dflop_loader::flow::MetricsSnapshot;
use dflop_loader::{Stall, StallListener};

use crate::failure::Failure;
use crate::output::format_bytes;

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
