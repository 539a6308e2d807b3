//! Standard output, standard error and the exit status.

use std::io::{BufWriter, Stdout, Write};

use serde::Serialize;

/// Why a command did not do what it was asked for.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The arguments make no sense: exit status 2.
    Misuse(String),
    /// It was tried and failed: exit status 1.
    Failed(String),
    /// A run ended because of another of its ranks, which says why itself: exit status 75.
    Secondary(String),
    /// Nobody reads standard output any more, which is how `head` ends a pipe: exit status 0, silently.
    Closed,
}

/// Why a command gave no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// What is wrong, and its causes, one a line.
    pub message: String,
    /// Whether the arguments make no sense; else it was tried and failed.
    pub is_misuse: bool,
}

impl Failure {
    /// Names the file that the failure is about.
    pub(crate) fn in_file(self, path: &std::path::Path) -> Self {
        self.named(&format!("`{}`", path.display()))
    }

    /// Names the step of training that could not be taken.
    pub(crate) fn in_step(self, step: u64) -> Self {
        self.named(&format!("step {step}"))
    }

    fn named(self, what: &str) -> Self {
        let name = |message| format!("{what}: {message}");
        match self {
            Self::Misuse(message) => Self::Misuse(name(message)),
            Self::Failed(message) => Self::Failed(name(message)),
            Self::Secondary(message) => Self::Secondary(name(message)),
            Self::Closed => Self::Closed,
        }
    }

    /// The error as it is printed, and whether the arguments are at fault.
    pub(crate) fn into_refusal(self) -> Refusal {
        let (message, is_misuse) = match self {
            Self::Misuse(message) => (message, true),
            Self::Failed(message) | Self::Secondary(message) => (message, false),
            Self::Closed => ("nobody reads the answer".to_owned(), false),
        };
        Refusal { message, is_misuse }
    }

    /// Prints the error and returns the exit status.
    #[expect(clippy::print_stderr, reason = "errors go to standard error")]
    pub(crate) fn report(&self) -> u8 {
        let (message, code) = match self {
            Self::Misuse(message) => (message, 2),
            Self::Failed(message) => (message, 1),
            Self::Secondary(message) => (message, 75),
            Self::Closed => return 0,
        };
        eprintln!("dflop: {message}");
        code
    }
}

/// Prints what the parser of the arguments has to say, help that was asked for included, and returns the exit status.
pub(crate) fn show_usage(said: &clap::Error) -> u8 {
    // nobody may be reading: the status says it all
    let _ = said.print().and_then(|()| std::io::stdout().flush());
    said.exit_code().try_into().unwrap_or(2)
}

/// An error and its causes, one a line.
fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}\n  because: {cause}"))
}

impl From<dflop_loader::Error> for Failure {
    fn from(error: dflop_loader::Error) -> Self {
        use dflop_loader::Error::{Config, Model, RunEnded, ShardList};
        match error {
            Model(error) => error.into(),
            Config { .. } | RunEnded { .. } | ShardList { .. } => Self::Misuse(with_causes(&error)),
            _ => Self::Failed(with_causes(&error)),
        }
    }
}

impl From<dflop_costmodel::Error> for Failure {
    fn from(error: dflop_costmodel::Error) -> Self {
        use dflop_costmodel::Error::{ProfileFormat, ProfileLacks, ProfileMixed};
        match error {
            ProfileFormat { .. } | ProfileLacks { .. } | ProfileMixed { .. } => {
                Self::Failed(with_causes(&error))
            }
            _ => Self::Misuse(with_causes(&error)),
        }
    }
}

impl From<dflop_balancer::Error> for Failure {
    fn from(error: dflop_balancer::Error) -> Self {
        match error {
            dflop_balancer::Error::Config { .. } => Self::Misuse(with_causes(&error)),
            _ => Self::Failed(with_causes(&error)),
        }
    }
}

impl From<dflop_executor::Error> for Failure {
    fn from(error: dflop_executor::Error) -> Self {
        use dflop_executor::Error::{Comm, InvalidSetting, Loader, Model, ModelConfig, NotSaved};
        match error {
            Model(error) => error.into(),
            Loader(error) => error.into(),
            Comm(ref comm) if comm.exit_status() != 1 => Self::Secondary(with_causes(&error)),
            // Another rank could not, and says why.
            NotSaved { .. } => Self::Secondary(with_causes(&error)),
            InvalidSetting { .. } | ModelConfig { .. } => Self::Misuse(with_causes(&error)),
            _ => Self::Failed(with_causes(&error)),
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            Self::Closed
        } else {
            Self::Failed(with_causes(&error))
        }
    }
}

/// Where results go, buffered; who runs a command flushes it, so that output which cannot be written is a failure.
pub(crate) type Output = BufWriter<Sink>;

/// What takes results.
#[derive(Debug)]
pub(crate) enum Sink {
    /// Standard output; not locked, because a launcher passes lines of its ranks on meanwhile.
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

/// Starts the runtime that drives a loader: I/O and hand-over only, so two threads do.
pub(crate) fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

/// Shows a number of bytes with a unit of three digits or less.
pub(crate) fn shown_bytes(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, "B");
    for next in ["kB", "MB", "GB", "TB", "PB"] {
        if value < 1000.0 {
            break;
        }
        (value, unit) = (value / 1000.0, next);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_shown_with_their_unit() {
        let shown = [0, 999, 1_500, 75_000_000].map(shown_bytes);
        assert_eq!(shown, ["0 B", "999 B", "1.5 kB", "75.0 MB"]);
    }
}
