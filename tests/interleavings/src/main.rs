//! Loader handovers: the files in the loader module `flow` with exchanged tasks and channels.
//!
//! The handover files are shared with the other crates; only locks, threads, channels and sockets are
//! exchanged. Shuttle runs a thread at a time and chooses, at every lock, notification and message, which
//! thread continues. Time limits never expire here: a wait that only a time limit would end is a deadlock,
//! and fails.

mod error;
mod flow;
mod model;

fn main() -> std::process::ExitCode {
    model::run(&flow::models())
}
