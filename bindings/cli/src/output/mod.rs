//! Writes results to standard output, memory or files: lines of JSON, sizes for people, skipped samples.
//! Draws progress bars on standard error, if it is a terminal.

pub(crate) mod layouts;

use std::fmt;
use std::fs::File;
use std::io::{BufWriter, Stdout, Write};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use dflop_loader::error::{EXCERPT_CHARACTERS, Skipped, excerpt};
use dflop_loader::files;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use serde::Serialize;

use crate::failure::{Failure, escape_controls};

pub(crate) use dflop_costmodel::memory::format_bytes;

/// Buffered destination for results. The command's caller flushes it, so that output that cannot be written
/// is a failure.
pub(crate) type Output = BufWriter<Sink>;

/// Destination for results.
#[derive(Debug)]
pub(crate) enum Sink {
    /// Standard output, not locked, because a launcher forwards rank output meanwhile.
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

/// Writes a value as a JSON line.
pub(crate) fn write_json(out: &mut impl Write, value: &impl Serialize) -> Result<(), Failure> {
    let line = serde_json::to_string(value).map_err(|error| Failure::Failed(error.to_string()))?;
    writeln!(out, "{line}")?;
    Ok(())
}

/// Starts the runtime for a loader. The runtime does I/O and hands over data, so two threads suffice;
/// decoding has separate threads.
pub(crate) fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    Ok(dflop_loader::flow::start_runtime("dflop", 2)?)
}

/// Writes a file with these contents, see [`replace_file`].
pub(crate) fn write_file(path: &Path, contents: impl AsRef<[u8]>) -> Result<(), Failure> {
    replace_file(path, |file| Ok(file.write_all(contents.as_ref())?))
}

/// Writes a file that the user named as a whole, see [`files::replace_file`]; the error names the file.
pub(crate) fn replace_file<T>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<&File>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    files::replace_file(path, write).map_err(|failure| failure.in_file(path))
}

/// Writes a file whose name the program chose as a whole, see [`files::place_file`]; the error names the
/// file.
pub(crate) fn place_file<T>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<&File>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    files::place_file(path, write).map_err(|failure| failure.in_file(path))
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

/// Progress listener that draws a library's running task as a bar.
#[derive(Debug, Default)]
pub(crate) struct Bars(Mutex<Option<ProgressBar>>);

/// Creates a bar; it is hidden if standard error is not a terminal.
pub(crate) fn bar(what: &str, total: Option<u64>) -> ProgressBar {
    let template = match total {
        Some(_) => "{msg:>10} {wide_bar} {percent} % {human_pos}/{human_len} {rate} {eta}",
        None => "{msg:>10} {spinner} {human_pos} {rate} {elapsed}",
    };
    styled_bar(what, total, template)
}

/// Creates a bar whose positions are bytes; otherwise as [`bar`].
pub(crate) fn byte_bar(what: &str, total: Option<u64>) -> ProgressBar {
    styled_bar(what, total, "{msg:>10} {wide_bar} {percent} % {binary_bytes}/{binary_total_bytes} {eta}")
}

fn styled_bar(what: &str, total: Option<u64>, template: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template(template).expect("the template is valid");
    bar.set_style(style.with_key("rate", |state: &ProgressState, text: &mut dyn fmt::Write| {
        // A failure to write a bar is no reason to end.
        let _ = text.write_str(&rate(state.per_sec()));
    }));
    bar.set_message(what.to_owned());
    bar
}

/// Formats a rate with three significant digits.
fn rate(per_second: f64) -> String {
    let decimals = match per_second {
        100.0.. => 0,
        10.0.. => 1,
        _ => 2,
    };
    format!("{per_second:.decimals$}/s")
}

impl dflop_loader::flow::Progress for Bars {
    fn begin(&self, what: &str, total: u64) {
        *self.lock() = Some(bar(what, (total > 0).then_some(total)));
    }

    fn advance(&self, units: u64) {
        if let Some(bar) = &*self.lock() {
            bar.inc(units);
        }
    }

    fn end(&self) {
        if let Some(bar) = self.lock().take() {
            bar.finish_and_clear();
        }
    }
}

impl Bars {
    fn lock(&self) -> MutexGuard<'_, Option<ProgressBar>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("none/state.json");
        let placed = place_file(&path, |_| Ok(()));
        for failed in [write_file(&path, "x"), placed] {
            assert!(failed.unwrap_err().into_refusal().message.contains("none/state.json"));
        }
    }

    #[test]
    fn rates_have_three_significant_digits() {
        let rates = [0.0, 1.3055, 18.26, 181.9826, 20_481.7].map(rate);
        assert_eq!(rates, ["0.00/s", "1.31/s", "18.3/s", "182/s", "20482/s"]);
    }
}
