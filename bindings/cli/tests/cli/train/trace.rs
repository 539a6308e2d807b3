//! Tests the timelines of all ranks in one file.

use std::collections::BTreeSet;

use serde_json::Value;

use super::config::Job;
use crate::command::text;

#[test]
fn a_trace_has_measured_and_predicted_events_of_every_rank() {
    let job = Job::with(&[
        ("llm = { stages = 1, dp = 1 }", "llm = { stages = 2, dp = 1 }"),
        ("steps = 6", "steps = 2"),
    ]);
    let file = job.path("trace.json");
    for args in [&[][..], &["--pipeline-stages", "1"]] {
        job.lines(&[&["--trace", text(&file)], args].concat());
        let ranks = 3 - args.len() as u64 / 2;
        let trace: Value = serde_json::from_slice(&std::fs::read(&file).expect("a trace")).expect("JSON");
        let events = trace.as_array().expect("events");
        // Measured and predicted times are on separate threads of the trace.
        let spans = events.iter().filter(|event| event["ph"] == "X");
        let lanes: BTreeSet<(u64, u64)> = spans
            .map(|event| (event["pid"].as_u64().expect("a rank"), event["tid"].as_u64().expect("a lane")))
            .collect();
        let of_rank = |rank: u64| lanes.iter().filter(|lane| lane.0 == rank).count();
        assert!((0..ranks).all(|rank| of_rank(rank) >= 2), "{lanes:?}");
        assert_eq!(lanes.iter().map(|lane| lane.0).max(), Some(ranks - 1));
    }
    assert_eq!(parts(&job), 0, "parts are removed");
}

#[test]
fn a_run_that_fails_leaves_the_timeline_of_what_it_did() {
    let job = Job::with(&[("learning_rate = 2e-3", "learning_rate = 1e30")]);
    let file = job.path("trace.json");
    assert_eq!(job.run(&["--trace", text(&file)]).status, Some(1));
    let trace: Value = serde_json::from_slice(&std::fs::read(&file).expect("a trace")).expect("JSON");
    let steps = trace.as_array().expect("events").iter().filter(|event| event["args"]["step"] == 0);
    assert!(steps.count() > 0);
    assert_eq!(parts(&job), 0, "parts are removed");
}

/// Timelines of single ranks that lie about.
fn parts(job: &Job) -> usize {
    let hidden = std::fs::read_dir(job.path("")).expect("the directory is there").filter(|entry| {
        entry.as_ref().is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with(".trace"))
    });
    hidden.count()
}
