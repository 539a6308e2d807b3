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
    for args in [&[][..], &["--stages", "1"]] {
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

/// Two replicas of a stage that share the optimizer state.
#[test]
fn a_trace_has_a_thread_for_each_communication_lane_with_exposed_times() {
    let job = Job::with(&[
        ("llm = { stages = 1, dp = 1 }", "llm = { stages = 1, dp = 2 }"),
        ("[optimizer]", "[optimizer]\nzero_stage = 1"),
        ("steps = 6", "steps = 3"),
    ]);
    let file = job.path("trace.json");
    let lines = job.lines(&["--trace", text(&file)]);
    let trace: Value = serde_json::from_slice(&std::fs::read(&file).expect("a trace")).expect("JSON");
    let events = trace.as_array().expect("events");
    let names: BTreeSet<&str> = (events.iter().filter(|event| event["name"] == "thread_name"))
        .map(|event| event["args"]["name"].as_str().expect("a name"))
        .collect();
    for lane in ["measured", "predicted", "replicas of stage", "send to rank", "receive from rank"] {
        assert!(names.iter().any(|name| name.starts_with(lane)), "{lane}: {names:?}");
    }
    let of = |kind: &str, step: u64| -> Vec<&Value> {
        let is_own = |event: &&Value| event["cat"] == kind && event["args"]["step"] == step;
        events.iter().filter(is_own).collect()
    };
    for kind in ["reduce-scatter", "all-gather"] {
        let own = of(kind, 1);
        assert!(!own.is_empty(), "{kind}");
        for event in own {
            assert!(event["args"]["bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{event}");
            assert!(event["args"]["exposed_ns"].is_u64() && event["dur"].is_f64(), "{event}");
        }
    }
    assert!(of("all-gather", 0).is_empty(), "no update came before");
    // The report has means over ranks for the events in the trace.
    let ranks = events.iter().filter_map(|event| event["pid"].as_u64()).max().expect("ranks") + 1;
    for (step, line) in lines.iter().enumerate() {
        let own = events.iter().filter(|event| event["ph"] == "X" && event["args"]["step"] == step as u64);
        let exposed_ns: u64 = own.filter_map(|event| event["args"]["exposed_ns"].as_u64()).sum();
        let expected = exposed_ns as f64 / 1e9 / ranks as f64;
        let found = line["exposed_communication_seconds"].as_f64().expect("a number");
        assert!((found - expected).abs() < 1e-9, "step {step}: {found} {expected}");
    }
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

/// Number of leftover single-rank timelines.
fn parts(job: &Job) -> usize {
    let hidden = std::fs::read_dir(job.path("")).expect("the directory is there").filter(|entry| {
        entry.as_ref().is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with(".trace"))
    });
    hidden.count()
}
