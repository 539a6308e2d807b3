//! The `dflop` command.
//!
//! Every command parses its arguments, calls a library and prints what it returns: results on standard output,
//! progress and errors on standard error. Exit status 0 is done, 1 is failed, 2 is misuse.

mod accuracy;
mod augment;
mod balance;
mod batch_files;
mod batches;
mod data_set;
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

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::output::{Failure, Output, stdout};

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

fn main() -> ExitCode {
    let mut out = stdout();
    let done = run(Cli::parse().command, &mut out);
    let written = out.flush().map_err(Failure::from);
    match done.and(written) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn run(command: Command, out: &mut Output) -> Result<(), Failure> {
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
        Command::Train(args) => train::run(&args, out),
    }
}
