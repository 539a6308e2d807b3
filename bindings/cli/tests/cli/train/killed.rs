//! Tests ranks that are killed.

use std::time::Duration;

use super::config::{Job, loss_bits};
use super::process::{Watched, kill};
use crate::command::text;

/// A job that ends because a rank died ends well within the duration of a hang.
const SOON: Duration = Duration::from_secs(10);

#[test]
fn a_rank_that_is_killed_ends_the_job_at_once_and_is_named() {
    let job = Job::with(&[("llm = { stages = 1, dp = 1 }", "llm = { stages = 2, dp = 1 }")]);
    for rank in [0, 2] {
        let mut run = Watched::start(&job, &["--steps", "1000000"]);
        run.wait_for(2);
        kill(run.rank(rank));
        let (run, took) = run.end();
        assert_eq!(run.status, Some(1), "{}", run.stderr);
        let message = format!("rank {rank} ended the run: signal: 9");
        assert!(run.stderr.contains(&message), "{}", run.stderr);
        assert!(took < SOON, "{took:?}");
        assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
    }
}

#[test]
fn a_killed_run_goes_on_from_its_last_state_with_the_same_bits() {
    let job = Job::new();
    let states = job.path("states");
    let args = ["--checkpoints", text(&states)];
    job.rewrite(&[("[correction]", "[checkpoint]\nevery = 1\n\n[correction]")]);
    let mut run = Watched::start(&job, &[&args[..], &["--steps", "1000000"]].concat());
    run.wait_for(4);
    let before = loss_bits(&run.kill());

    let mut run = Watched::start(&job, &[&args[..], &["--resume", "--steps", "1000000"]].concat());
    run.wait_for(3);
    kill(run.rank(1));
    let (run, _) = run.end();
    assert_eq!(run.status, Some(1), "{}", run.stderr);
    let middle = loss_bits(&run.objects());
    // What was printed of a step that was not saved comes again.
    let first = middle[0].0;
    assert!(first > 0 && first <= before.len() as u64, "goes on with step {first} after {before:?}");

    let steps = (first + middle.len() as u64 + 3).to_string();
    let after = loss_bits(&job.lines(&[&args[..], &["--resume", "--steps", &steps]].concat()));
    assert!(after[0].0 > first, "{after:?} after {middle:?}");
    let straight = loss_bits(&job.lines(&["--steps", &steps]));
    for part in [&before, &middle, &after] {
        let start = part[0].0 as usize;
        assert_eq!(**part, straight[start..start + part.len()]);
    }
    assert_eq!(after.last(), straight.last());
}
