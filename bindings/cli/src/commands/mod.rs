//! Program commands; each file or directory defines the arguments for a command and runs it.

mod accuracy;
mod balance;
mod batches;
mod demo;
mod index;
mod list;
mod memory;
mod models;
mod order;
mod pack;
pub(crate) mod plan;
mod profile;
mod report;
mod simulate;
mod stats;
mod stream;
mod top;
pub(crate) mod train;
mod view;

use clap::Subcommand;

use crate::failure::Failure;
use crate::output::Output;
use crate::reexec::Invocation;

/// A command with arguments, in the `dflop --help` order.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Demo(demo::DemoArgs),
    Pack(pack::PackArgs),
    Index(index::IndexArgs),
    List(list::ListArgs),
    Stream(stream::StreamArgs),
    Order(order::OrderArgs),
    Batches(batches::BatchesArgs),
    Stats(stats::StatsArgs),
    View(view::ViewArgs),
    Models(models::ModelsArgs),
    Memory(memory::MemoryArgs),
    Balance(balance::BalanceArgs),
    Plan(plan::PlanArgs),
    Simulate(simulate::SimulateCommand),
    Profile(profile::ProfileArgs),
    Accuracy(accuracy::AccuracyArgs),
    Train(train::TrainArgs),
    Top(top::TopArgs),
    Report(report::ReportCommandArgs),
}

impl Command {
    /// Runs the command; results go to `out`.
    pub(crate) fn run(self, invocation: &Invocation, out: &mut Output) -> Result<(), Failure> {
        match self {
            Self::Demo(args) => demo::run(&args, out),
            Self::Pack(args) => pack::run(&args, out),
            Self::Index(args) => index::run(&args, out),
            Self::List(args) => list::run(&args, out),
            Self::Stream(args) => stream::run(&args, out),
            Self::Order(args) => order::run(&args, out),
            Self::Batches(args) => batches::run(&args, out),
            Self::Stats(args) => stats::run(&args, out),
            Self::View(args) => view::run(&args, out),
            Self::Models(args) => models::run(&args, out),
            Self::Memory(args) => memory::run(&args, out),
            Self::Balance(args) => balance::run(&args, out),
            Self::Plan(args) => plan::run(&args, out),
            Self::Simulate(args) => simulate::run(&args, out),
            Self::Profile(args) => profile::run(&args, out),
            Self::Accuracy(args) => accuracy::run(&args, out),
            Self::Train(args) => train::run(&args, invocation, out),
            Self::Top(args) => top::run(&args, out),
            Self::Report(args) => report::run(&args, out),
        }
    }
}
