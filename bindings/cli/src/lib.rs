//! The command line of `dflop`, for the program of that name and for the Python package, which is one, too.
//!
//! Every command parses its arguments, calls a library and prints what it returns: results on standard output,
//! progress and errors on standard error. Exit status 0 is done, 1 is failed, 2 is misuse, 75 a rank that ended
//! because of another.
//!
//! [`main_from`] returns the status: it never ends the process, changes no signal handler that it does not put back,
//! and leaves nothing in the buffer of standard output. What a command needs to know of the process it runs in is
//! said by [`Program`].

mod accuracy;
mod augment;
mod balance;
mod batch_files;
mod batches;
mod dataset;
mod demo;
mod demo_data;
mod index;
mod list;
mod measure;
mod memory;
mod mixture;
mod model;
mod order;
mod output;
mod pack;
mod plan;
mod planner;
mod profile;
mod program;
mod progress;
mod report;
mod shuffle_quality;
mod simulate;
mod stats;
mod stream;
mod stream_input;
mod stream_metrics;
mod text_counts;
mod train;
mod video;

use std::ffi::OsString;
use std::io::Write;

use clap::{Parser, Subcommand};

pub use crate::program::Program;

pub use crate::output::Refusal;
use crate::output::{Failure, Output, Sink, stdout};
use crate::program::Invocation;

/// Streams, costs and balances multimodal training data.
#[derive(Debug, Parser)]
#[command(name = "dflop", version, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::DemoArgs),
    Pack(pack::PackArgs),
    Index(index::IndexArgs),
    List(list::ListArgs),
    Stream(stream::StreamArgs),
    Order(order::OrderArgs),
    Batches(batches::BatchesArgs),
    Stats(stats::StatsArgs),
    Memory(memory::MemoryArgs),
    Balance(balance::BalanceArgs),
    Plan(plan::PlanCommandArgs),
    Simulate(simulate::SimulateCommand),
    #[command(name = "profile")]
    Measure(measure::MeasureArgs),
    Accuracy(accuracy::AccuracyArgs),
    Train(train::TrainArgs),
}

/// Runs the command that these arguments, the program's name not among them, ask for, and returns the exit status.
///
/// `program` is what starts this command again: `dflop train` starts its ranks so.
#[must_use]
pub fn main_from(program: Program, args: impl IntoIterator<Item = OsString>) -> u8 {
    let args: Vec<OsString> = args.into_iter().collect();
    let named = std::iter::once(OsString::from("dflop")).chain(args.iter().cloned());
    let command = match Cli::try_parse_from(named) {
        Ok(cli) => cli.command,
        Err(asked) => return output::show_usage(&asked),
    };
    let mut out = stdout();
    let done = run(command, &Invocation { program, args }, &mut out);
    let written = out.flush().map_err(Failure::from);
    match done.and(written) {
        Ok(()) => 0,
        Err(failure) => failure.report(),
    }
}

/// Runs a command in this process and returns what it prints on standard output, such as JSON with `--json`.
///
/// # Errors
/// What the command would have printed as its error.
pub fn answer_from(args: impl IntoIterator<Item = OsString>) -> Result<String, Refusal> {
    let args: Vec<OsString> = args.into_iter().collect();
    let named = std::iter::once(OsString::from("dflop")).chain(args.iter().cloned());
    let misuse = |error: clap::Error| Refusal { message: error.to_string(), is_misuse: true };
    let command = Cli::try_parse_from(named).map_err(misuse)?.command;
    let mut out = Output::new(Sink::Memory(Vec::new()));
    run(command, &Invocation { program: Program::this(), args }, &mut out).map_err(Failure::into_refusal)?;
    match out.into_inner() {
        Ok(Sink::Memory(answer)) => Ok(String::from_utf8_lossy(&answer).into_owned()),
        Ok(Sink::Stdout(_)) | Err(_) => unreachable!("the answer went to memory"),
    }
}

fn run(command: Command, invocation: &Invocation, out: &mut Output) -> Result<(), Failure> {
    match command {
        Command::Demo(args) => demo::run(&args, out),
        Command::Pack(args) => pack::run(&args, out),
        Command::Index(args) => index::run(&args, out),
        Command::List(args) => list::run(&args, out),
        Command::Stream(args) => stream::run(&args, out),
        Command::Order(args) => order::run(&args, out),
        Command::Batches(args) => batches::run(&args, out),
        Command::Stats(args) => stats::run(&args, out),
        Command::Memory(args) => memory::run(&args, out),
        Command::Balance(args) => balance::run(&args, out),
        Command::Plan(args) => plan::run(&args, out),
        Command::Simulate(args) => simulate::run(&args, out),
        Command::Measure(args) => measure::run(&args, out),
        Command::Accuracy(args) => accuracy::run(&args, out),
        Command::Train(args) => train::run(&args, invocation, out),
    }
}
