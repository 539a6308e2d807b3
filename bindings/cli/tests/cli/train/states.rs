//! Tests saved states: runs that resume from them, and rejected states.

use std::path::Path;

use super::config::{Job, difference, loss_bits, losses};
use crate::command::text;

/// Names in a directory, hidden ones included, sorted.
fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("the directory is there");
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

#[test]
fn a_run_goes_on_with_the_same_bits_and_other_ranks_to_rounding() {
    let job = Job::new();
    let straight = job.lines(&["--steps", "8"]);
    let states = job.path("states");
    let first = job.lines(&["--steps", "4", "--checkpoints", text(&states)]);
    assert_eq!(loss_bits(&first), loss_bits(&straight)[..4]);
    assert_eq!(names(&states), ["step-00000004", "steps.jsonl"]);

    let copy = job.path("copy");
    std::fs::create_dir_all(copy.join("step-00000004")).expect("the directory can be written");
    for name in names(&states.join("step-00000004")) {
        let [from, to] = [&states, &copy].map(|directory| directory.join("step-00000004").join(&name));
        std::fs::copy(from, to).expect("the directory can be written");
    }

    let rest = job.lines(&["--steps", "8", "--checkpoints", text(&states), "--resume"]);
    assert_eq!(loss_bits(&rest), loss_bits(&straight)[4..]);
    assert_eq!(names(&states), ["step-00000004", "step-00000008", "steps.jsonl"]);

    job.rewrite(&[("llm = { stages = 1, dp = 1 }", "llm = { stages = 2, dp = 2 }")]);
    let other = job.lines(&["--steps", "8", "--checkpoints", text(&copy), "--resume"]);
    assert!(difference(&losses(&other), &losses(&straight)[4..]) < 1e-5);
}

#[test]
fn states_of_tensor_parallel_ranks_go_on_with_any_degree() {
    let llm = "llm = { stages = 1, dp = 1 }";
    let job = Job::with(&[(llm, "vision = { tp = 2 }\nllm = { tp = 2 }")]);
    let straight = job.lines(&["--steps", "3"]);
    let states = job.path("states");
    let args = ["--steps", "2", "--checkpoints", text(&states)];
    job.lines(&args);
    let rest = ["--steps", "3", "--resume", "--checkpoints", text(&states)];
    assert_eq!(loss_bits(&job.lines(&rest)), loss_bits(&straight)[2..]);
    std::fs::remove_dir_all(states.join("step-00000003")).expect("the state of the step");
    job.rewrite(&[]);
    assert!(difference(&losses(&job.lines(&rest)), &losses(&straight)[2..]) < 1e-5);
}

#[test]
fn a_finished_run_that_is_resumed_has_nothing_to_do() {
    let job = Job::new();
    let states = job.path("states");
    let args = ["--steps", "2", "--checkpoints", text(&states)];
    job.lines(&args);
    assert!(job.lines(&[&args[..], &["--resume"]].concat()).is_empty());
    assert_eq!(names(&states), ["step-00000002", "steps.jsonl"]);
}

#[test]
fn without_resume_a_run_begins_anew_and_what_was_saved_is_kept() {
    let job = Job::new();
    let states = job.path("states");
    let args = ["--checkpoints", text(&states)];
    let whole = job.lines(&[&args[..], &["--steps", "4"]].concat());
    let again = job.run(&[&args[..], &["--steps", "2"]].concat());
    assert_eq!(again.status, Some(0), "{}", again.stderr);
    assert_eq!(loss_bits(&again.objects()), loss_bits(&whole)[..2]);
    assert!(again.stderr.contains("earlier-1"), "{}", again.stderr);
    assert_eq!(names(&states), ["earlier-1", "step-00000002", "steps.jsonl"]);
    assert_eq!(names(&states.join("earlier-1")), ["step-00000004", "steps.jsonl"]);
    // The run that started last is resumed.
    let rest = job.lines(&[&args[..], &["--steps", "3", "--resume"]].concat());
    assert_eq!(loss_bits(&rest), loss_bits(&whole)[2..3]);
}

#[test]
fn a_damaged_state_is_passed_over_for_the_one_before() {
    let job = Job::with(&[("[correction]", "[checkpoint]\nevery = 2\n\n[correction]")]);
    let states = job.path("states");
    let whole = job.lines(&["--checkpoints", text(&states), "--steps", "4"]);
    assert_eq!(names(&states), ["step-00000002", "step-00000004", "steps.jsonl"]);
    let newest = states.join("step-00000004");
    let weights = names(&newest).into_iter().find(|name| name.starts_with("model")).expect("weights");
    let file = newest.join(weights);
    let mut bytes = std::fs::read(&file).expect("weights");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, bytes).expect("the directory can be written");
    let run = job.run(&["--checkpoints", text(&states), "--steps", "4", "--resume"]);
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    assert_eq!(loss_bits(&run.objects()), loss_bits(&whole)[2..]);
    assert!(run.stderr.contains("step-00000004"), "the state that was passed over is named: {}", run.stderr);
}
