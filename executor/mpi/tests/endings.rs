//! Job endings under `mpirun`, other than those in the conformance suite.

mod mpirun;

use mpirun::{mpirun, outputs};

/// Runs three ranks, and returns a line per rank.
fn ends(mode: &str) -> Vec<String> {
    let mut lines = outputs(&mpirun("endings_rank", 3, &[mode]));
    lines.sort();
    assert_eq!(lines.len(), 3, "{lines:?}");
    lines
}

#[test]
fn an_abort_reaches_ranks_that_are_in_a_collective() {
    for line in ends("abort") {
        assert!(line.contains("rank 1 ended the job: the loss is NaN"), "{line}");
    }
}

#[test]
fn ranks_that_wait_for_each_other_are_named() {
    let lines = ends("deadlock");
    assert!(lines.iter().all(|line| line.contains("deadlock: ranks wait for each other: ")), "{lines:?}");
}

#[test]
fn a_busy_rank_is_waited_for() {
    assert_eq!(ends("busy"), ["rank 0: done", "rank 1: done", "rank 2: done"]);
}

#[test]
fn a_rank_that_leaves_is_named_by_the_rank_that_waits_for_it() {
    let lines = ends("leave");
    assert!(lines[0].contains("rank 1 finished while rank 0 waited to receive"), "{lines:?}");
}

#[test]
fn a_panic_of_a_rank_ends_the_job() {
    let output = mpirun("endings_rank", 3, &["panic"]);
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("a bug of rank 1"), "{text}");
}
