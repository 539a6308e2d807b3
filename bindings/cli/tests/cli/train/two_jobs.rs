//! Tests two jobs that save states in the same directory.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use super::config::{Job, loss_bits};
use super::process::Watched;
use crate::command::text;

const PATIENCE: Duration = Duration::from_mins(1);

#[test]
fn a_second_job_is_refused_by_name_until_the_first_is_gone() {
    let job = Job::with(&[("[correction]", "[checkpoint]\nevery = 1\n\n[correction]")]);
    let states = job.path("states");
    let args = ["--checkpoints", text(&states)];
    let mut first = Watched::start(&job, &[&args[..], &["--steps", "1000000"]].concat());
    first.wait_for(2);
    let owner = std::fs::read_to_string(states.join(".owner")).expect("the owner is described");
    let owner: serde_json::Value = serde_json::from_str(&owner).expect("it is JSON");
    for extra in [&[][..], &["--resume"], &["--seed", "7"], &["--stages", "1"]] {
        let second = job.run(&[&args[..], &["--steps", "2"], extra].concat());
        assert_eq!((second.status, second.stdout.as_str()), (Some(1), ""), "{extra:?}: {}", second.stderr);
        let named = format!("is in use by process {} on `", owner["pid"]);
        assert!(second.stderr.contains(&named) && second.stderr.contains(text(&states)), "{}", second.stderr);
    }
    first.wait_for(1);
    // a killed job keeps no claim, and the states belong to it alone
    let lines = first.kill();
    let rest = job.lines(&[&args[..], &["--resume", "--steps", &(lines.len() + 3).to_string()]].concat());
    let straight = job.lines(&["--steps", &(lines.len() + 3).to_string()]);
    let begin = rest[0]["step"].as_u64().expect("a step") as usize;
    assert!(begin > 0);
    assert_eq!(loss_bits(&rest), loss_bits(&straight)[begin..]);
    assert!(!states.join(".owner").exists(), "a job that ends leaves the directory clean");
}

/// Waits until the first of two processes has ended; returns its place.
fn first_to_end(children: &mut [Child; 2]) -> usize {
    let begin = Instant::now();
    loop {
        for (place, child) in children.iter_mut().enumerate() {
            if child.try_wait().expect("the process can be asked").is_some() {
                return place;
            }
        }
        assert!(begin.elapsed() < PATIENCE, "one of two jobs is refused");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn exactly_one_of_two_jobs_that_start_together_runs() {
    let job = Job::with(&[("[correction]", "[checkpoint]\nevery = 1\n\n[correction]")]);
    job.lines(&["--steps", "1"]);
    for _ in 0..2 {
        let states = job.path("states");
        let start = |seed| {
            let args = ["--checkpoints", text(&states), "--steps", "1000000", "--stages", "1"];
            let mut command = job.command(&[&args[..], &["--seed", seed]].concat());
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("the command starts")
        };
        let mut children = ["1", "2"].map(start);
        let refused = first_to_end(&mut children);
        let [first, second] = children;
        let (refused, mut winner) = if refused == 0 { (first, second) } else { (second, first) };
        let refused = crate::command::Run::from(refused.wait_with_output().expect("it has ended"));
        assert_eq!(refused.status, Some(1));
        // The other job has claimed the directory, and may not have written its process yet.
        let names = ["is in use by process", "is in use by another process"];
        assert!(names.iter().any(|name| refused.stderr.contains(name)), "{}", refused.stderr);
        assert!(winner.try_wait().expect("the process can be asked").is_none(), "the other one runs");
        winner.kill().expect("it runs");
        winner.wait().expect("it ends");
        std::fs::remove_dir_all(&states).expect("the directory can be removed");
    }
}
