//! Hand-overs of the loader: the files of its room `flow` on other tasks and channels.
//!
//! The files of the hand-overs are those of the other crates; only their locks, threads, channels and sockets
//! are exchanged. Shuttle runs one thread at a time and chooses, at every lock, notification and message,
//! which one goes on. Time limits never pass here: a wait that only its limit would end is a deadlock, and
//! fails.

mod error;
mod flow;
mod model;
mod runner;

fn main() -> std::process::ExitCode {
    runner::run(&flow::models())
}
