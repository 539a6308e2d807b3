//! Hand-overs in the loader: the files in the loader room `flow` on other tasks and channels.
//!
//! The hand-over files belong to the other crates; only the locks, threads, channels and sockets are
//! exchanged. Shuttle runs a single thread at a time and chooses, at every lock, notification and message,
//! which thread continues. Time limits never pass here: a wait that only a time limit would end is a
//! deadlock, and fails.

mod error;
mod flow;
mod model;
mod runner;

fn main() -> std::process::ExitCode {
    runner::run(&flow::models())
}
