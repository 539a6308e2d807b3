//! Writes results to standard output, memory or files: lines of JSON, sizes for people, skipped samples.

mod file;

use std::io::{BufWriter, Stdout, Write};

use dflop_loader::error::{EXCERPT_CHARACTERS, Skipped, excerpt};
use serde::Serialize;

use crate::failure::{Failure, escape_controls};

pub(crate) use file::{place_file, replace_file, write_file};

/// Buffered destination of results. The caller of a command flushes it, so that output that cannot be written
/// is a failure.
pub(crate) type Output = BufWriter<Sink>;

/// Destination of results.
#[derive(Debug)]
pub(crate) enum Sink {
    /// Standard output, not locked, because a launcher forwards lines of its ranks meanwhile.
    Stdout(Stdout),
    /// Memory, for a caller in this process.
    Memory(Vec<u8>),
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self {
            Self::Stdout(stdout) => stdout.write(bytes),
            Self::Memory(memory) => memory.write(bytes),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        match self {
            Self::Stdout(stdout) => stdout.flush(),
            Self::Memory(_) => Ok(()),
        }
    }
}

/// Opens standard output.
pub(crate) fn stdout() -> Output {
    BufWriter::new(Sink::Stdout(std::io::stdout()))
}

/// Writes a value as one line of JSON.
pub(crate) fn write_json(out: &mut impl Write, value: &impl Serialize) -> Result<(), Failure> {
    let line = serde_json::to_string(value).map_err(|error| Failure::Failed(error.to_string()))?;
    writeln!(out, "{line}")?;
    Ok(())
}

/// Starts the runtime of a loader. It does I/O and hands over, so two threads suffice; decoding has its
/// own threads.
pub(crate) fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    Ok(dflop_loader::flow::start_runtime("dflop", 2)?)
}

/// Formats a number of bytes with a decimal unit, such as `1.5 kB`.
pub(crate) fn format_bytes(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, "B");
    for next in ["kB", "MB", "GB", "TB", "PB"] {
        if value < 1000.0 {
            break;
        }
        (value, unit) = (value / 1000.0, next);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

/// Prints a line for every sample, field or shard that was skipped.
pub(crate) fn print_skipped(out: &mut impl Write, skipped: &[Skipped]) -> Result<(), Failure> {
    for Skipped { shard, offset, key, field, reason } in skipped {
        let key = excerpt(key.as_deref().unwrap_or("(unknown)"), EXCERPT_CHARACTERS);
        let field = field.as_deref().map(|field| format!(" field {}", excerpt(field, EXCERPT_CHARACTERS)));
        let field = field.unwrap_or_default();
        let line = format!("skipped: {shard} offset {offset} key {key}{field}: {reason}");
        writeln!(out, "{}", escape_controls(&line))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_shown_with_their_unit() {
        let shown = [0, 999, 1_500, 75_000_000].map(format_bytes);
        assert_eq!(shown, ["0 B", "999 B", "1.5 kB", "75.0 MB"]);
    }
}
