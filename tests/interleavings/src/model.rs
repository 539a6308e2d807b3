//! A model: a claim, and the program that would break it under some schedule. Runs models under many
//! schedules, as the command line requests.

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

/// Number of priority changes in a schedule of the second kind.
const PRIORITY_CHANGES: usize = 3;
/// Stack size per thread in bytes.
const STACK_BYTES: usize = 256 << 10;

/// Program whose every schedule must end, without a panic.
#[derive(Clone, Copy)]
pub(crate) struct Model {
    /// Claim.
    pub(crate) name: &'static str,
    /// Program.
    pub(crate) run: fn(),
}

impl Model {
    /// Runs half of the schedules at random, and half with priorities that change a few times; returns the
    /// number of schedules.
    pub(crate) fn run(&self, schedules: usize, seed: u64) -> Result<usize, String> {
        let half = schedules.div_ceil(2);
        let random = self.run_with(RandomScheduler::new_from_seed(seed, half))?;
        let priorities = self.run_with(PctScheduler::new_from_seed(seed, PRIORITY_CHANGES, half))?;
        Ok(random + priorities)
    }

    fn run_with(&self, scheduler: impl Scheduler + 'static) -> Result<usize, String> {
        let mut config = Config::new();
        config.stack_size = STACK_BYTES;
        config.silence_warnings = true;
        let run = AssertUnwindSafe(|| Runner::new(scheduler, config).run(self.run));
        catch_unwind(run).map_err(|panic| {
            let words = panic.downcast_ref::<String>().map(String::as_str);
            let words = words.or_else(|| panic.downcast_ref::<&str>().copied());
            words.unwrap_or("a panic").lines().next().unwrap_or_default().to_owned()
        })
    }
}

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
