//! Runs models under many schedules, as the command line requests.

use crate::model::Model;
use std::process::ExitCode;
use std::time::Instant;

/// Runs the models; arguments: number of schedules, seed, claim words.
pub(crate) fn run(models: &[Model]) -> ExitCode {
    let mut words = std::env::args().skip(1);
    let schedules = words.next().and_then(|word| word.parse().ok()).unwrap_or(1_000);
    let seed = words.next().and_then(|word| word.parse().ok()).unwrap_or(1);
    let wanted = words.next().unwrap_or_default();
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
