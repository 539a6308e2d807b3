//! Program commands; each file or directory defines the arguments for a command and runs it.
//!
//! [`Invocation`] starts this command line again in a new process, as required by the `dflop train` ranks.

mod accuracy;
mod balance;
mod batches;
mod completions;
mod demo;
mod describe;
mod index;
mod list;
mod man;
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

use std::ffi::OsString;
use std::path::PathBuf;
use std::process;

use clap::Subcommand;

use crate::failure::Failure;
use crate::output::Output;

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
    Describe(describe::DescribeArgs),
    Memory(memory::MemoryArgs),
    Balance(balance::BalanceArgs),
    Plan(plan::PlanArgs),
    Simulate(simulate::SimulateCommand),
    Profile(profile::ProfileArgs),
    Accuracy(accuracy::AccuracyArgs),
    Train(train::TrainArgs),
    Top(top::TopArgs),
    Report(report::ReportCommandArgs),
    Completions(completions::CompletionsArgs),
    Man(man::ManArgs),
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
            Self::Describe(args) => describe::run(&args, invocation, out),
            Self::Memory(args) => memory::run(&args, out),
            Self::Balance(args) => balance::run(&args, out),
            Self::Plan(args) => plan::run(&args, out),
            Self::Simulate(args) => simulate::run(&args, out),
            Self::Profile(args) => profile::run(&args, out),
            Self::Accuracy(args) => accuracy::run(&args, out),
            Self::Train(args) => train::run(&args, invocation, out),
            Self::Top(args) => top::run(&args, out),
            Self::Report(args) => report::run(&args, out),
            Self::Completions(args) => completions::run(&args, out),
            Self::Man(args) => man::run(&args, out),
        }
    }
}

/// Executable that runs this command line: a file and its leading arguments, such as an interpreter and a
/// module name.
#[derive(Debug, Clone)]
pub struct Program {
    /// `None` is the file that this process runs.
    path: Option<PathBuf>,
    leading: Vec<OsString>,
}

impl Program {
    /// Returns this process's executable, which is the command line itself.
    #[must_use]
    pub fn this() -> Self {
        Self { path: None, leading: Vec::new() }
    }

    /// Returns an executable that becomes the command line when `leading` precede all other arguments.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, leading: impl IntoIterator<Item = OsString>) -> Self {
        Self { path: Some(path.into()), leading: leading.into_iter().collect() }
    }
}

/// Command line of this process.
#[derive(Debug)]
pub(crate) struct Invocation {
    pub(crate) program: Program,
    /// User arguments, without the program name.
    pub(crate) args: Vec<OsString>,
}

impl Invocation {
    /// Returns the file to start for the same command in a new process.
    pub(crate) fn path(&self) -> std::io::Result<PathBuf> {
        // Resolved late: only `train` starts ranks, and `current_exe` can fail.
        self.program.path.clone().map_or_else(std::env::current_exe, Ok)
    }

    /// Returns the interpreter with its leading arguments, if this command line runs in Python.
    pub(crate) fn python(&self) -> Option<process::Command> {
        let mut python = process::Command::new(self.program.path.as_ref()?);
        python.args(&self.program.leading);
        Some(python)
    }

    /// Returns the arguments to start it with.
    pub(crate) fn args(&self) -> impl Iterator<Item = &OsString> {
        self.program.leading.iter().chain(&self.args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_arguments_come_before_those_of_the_user() {
        let program = Program::new("python", ["-m", "dflop"].map(OsString::from));
        let invocation = Invocation { program, args: vec!["train".into()] };
        assert_eq!(invocation.path().unwrap(), PathBuf::from("python"));
        assert_eq!(invocation.args().collect::<Vec<_>>(), ["-m", "dflop", "train"]);
    }

    #[test]
    fn the_program_of_this_process_needs_no_name() {
        let invocation = Invocation { program: Program::this(), args: Vec::new() };
        assert_eq!(invocation.path().unwrap(), std::env::current_exe().unwrap());
        assert_eq!(invocation.args().count(), 0);
    }
}
