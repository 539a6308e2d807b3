//! Runs the hand-overs between threads under many schedules.
//!
//! The files of the hand-overs are those of the other crates; only their locks, threads, channels and sockets
//! are exchanged. Shuttle runs one thread at a time and chooses, at every lock, notification and message,
//! which one goes on. Time limits never pass here: a wait that only its limit would end is a deadlock, and
//! fails.

mod comm;
mod error;
mod flow;
mod model;

use model::Model;
use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let schedules = words.next().and_then(|word| word.parse().ok()).unwrap_or(1_000);
    let seed = words.next().and_then(|word| word.parse().ok()).unwrap_or(1);
    let wanted = words.next().unwrap_or_default();
    let models: Vec<Model> = [comm::models(), flow::models()].concat();
    for model in models.iter().filter(|model| model.name.contains(&wanted)) {
        let begin = Instant::now();
        let outcome = model.run(schedules, seed);
        let seconds = begin.elapsed().as_secs_f64();
        match outcome {
            Ok(found) => println!("{:<65} {found:>7} schedules, {seconds:.1} s", model.name),
            // the threads that a failed schedule leaves would disturb the next model
            Err(reason) => {
                println!("{:<65} FAILED: {reason}", model.name);
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}
