//! The `dflop` command line as a library, for the program of that name and for the Python package.
//!
//! Every command parses its arguments, calls a library and prints the result: results on standard output,
//! progress and errors on standard error. Exit status 0 is success, 1 failure, 2 misuse, 75 a rank that ended
//! because a different rank failed, 130 and 143 a run that a signal stopped.
//!
//! [`main_from`] returns the status. It never ends the process, restores every signal handler that it
//! changes, and leaves nothing in the buffer of standard output. [`Program`] names the executable that `dflop
//! train` starts for each rank.

mod args;
mod commands;
mod failure;
#[cfg(any(feature = "fuzz", test))]
#[doc(hidden)]
pub mod fuzz;
mod output;
mod report;
mod view;

use std::ffi::OsString;
use std::io::Write;

use clap::{CommandFactory, Parser};

pub use crate::commands::Program;
pub use crate::failure::Refusal;

use crate::commands::{Command, Invocation};
use crate::failure::Failure;
use crate::output::{Output, Sink, stdout};

/// Streams, costs and balances multimodal training data.
#[derive(Debug, Parser)]
#[command(name = "dflop", version, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Runs the command that `args` name and returns the exit status; `args` do not include the program's name.
///
/// - `program`: starts this command line in a new process; `dflop train` starts the ranks with it
#[must_use]
pub fn main_from(program: Program, args: impl IntoIterator<Item = OsString>) -> u8 {
    let args: Vec<OsString> = args.into_iter().collect();
    let cli = match parse(&args) {
        Ok(cli) => cli,
        Err(error) => return failure::show_usage(&error, &args),
    };
    show_warnings();
    dflop_import::register_tables();
    let mut out = stdout();
    let invocation = Invocation { program, args };
    let done = cli.command.run(&invocation, &mut out);
    // Flushed also after a failure: the lines before it are results.
    let written = out.flush().map_err(Failure::from);
    match done.and(written) {
        Ok(()) => 0,
        Err(failure) => failure.report(&invocation.args),
    }
}

/// Prints library warnings on standard error, such as a lock that another process holds; does nothing if the
/// process has a `tracing` subscriber.
pub fn show_warnings() {
    let lines = tracing_subscriber::fmt()
        .with_writer(failure::RedactedLog::default)
        .with_max_level(tracing::Level::WARN);
    // Fails if the process has a subscriber already, which then stays in place.
    drop(lines.with_ansi(false).with_target(false).without_time().try_init());
}

/// Runs a command in this process and returns the standard output, such as JSON with `--json`.
///
/// # Errors
/// The error that the command would have printed.
pub fn answer_from(args: impl IntoIterator<Item = OsString>) -> Result<String, Refusal> {
    let args: Vec<OsString> = args.into_iter().collect();
    let misuse = |error: clap::Error| Refusal {
        message: failure::without_credentials(&error.to_string(), &args) + &failure::moved_option(&error),
        is_misuse: true,
    };
    let command = parse(&args).map_err(misuse)?.command;
    dflop_import::register_tables();
    let mut out = Output::new(Sink::Memory(Vec::new()));
    let invocation = Invocation { program: Program::this(), args };
    command.run(&invocation, &mut out).map_err(|failure| {
        let refusal = failure.into_refusal();
        Refusal { message: failure::without_credentials(&refusal.message, &invocation.args), ..refusal }
    })?;
    match out.into_inner() {
        Ok(Sink::Memory(answer)) => Ok(String::from_utf8_lossy(&answer).into_owned()),
        Ok(Sink::Stdout(_)) | Err(_) => unreachable!("the output was created in memory"),
    }
}

/// Returns the description of the whole command line, from which completions and manual pages are made.
pub(crate) fn described() -> clap::Command {
    Cli::command()
}

fn parse(args: &[OsString]) -> Result<Cli, clap::Error> {
    // clap parses the first word as the program name.
    Cli::try_parse_from(std::iter::once(OsString::from("dflop")).chain(args.iter().cloned()))
}
