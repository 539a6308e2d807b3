//! Tests the corrections that plans use: none by default, measured or recorded ones on request.

use std::path::Path;

use serde_json::Value;

use super::config::Job;
use crate::command::{dflop, text};

/// The first table, learned over four steps, is in force from step 12 on.
const STEPS: &str = "16";
const ENABLED: (&str, &str) = ("enabled = false", "enabled = true\ninterval_steps = 4");
const REPLICAS: (&str, &str) = ("llm = { stages = 1, dp = 1 }", "llm = { stages = 1, dp = 2 }");
/// Many microbatches, and a profile.
const PROFILED: [(&str, &str); 2] = [
    ("global_batch_size = 8", "global_batch_size = 24"),
    (
        "microbatches = 2\nsearch_effort = 500",
        "microbatches = 6\nsearch_effort = 500\nprofile = \"profile.csv\"",
    ),
];

/// A job whose profile has a third of the LLM times on this machine: a deviation that no noise explains, so
/// that the run learns tables.
fn job() -> Job {
    let job = Job::new();
    job.lines(&["--steps", "1"]);
    let (model, out) = (job.generated().join("model"), job.path("measured"));
    let limits = ["--tokens-max", "128", "--seconds-max", "2", "--error-bound", "0.3", "--json"];
    let run = dflop(&[&["profile", "--model", text(&model), "--out", text(&out)], &limits[..]].concat());
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    let measured = std::fs::read_to_string(out.join("model.csv")).expect("a profile");
    let mut columns = measured.lines().filter(|line| !line.starts_with('#'));
    let heading = columns.next().expect("a heading").split(',');
    let time = heading.clone().position(|name| name == "microseconds").expect("a column of times");
    let third = |line: &str| {
        let mut cells: Vec<String> = line.split(',').map(str::to_owned).collect();
        if let Some(microseconds) = cells.get(time).and_then(|cell| cell.parse::<f64>().ok()) {
            cells[time] = (microseconds / 3.0).to_string();
        }
        cells.join(",") + "\n"
    };
    let changed =
        measured.lines().map(|line| if line.starts_with("llm,") { third(line) } else { format!("{line}\n") });
    std::fs::write(job.path("profile.csv"), changed.collect::<String>())
        .expect("the directory can be written");
    job.rewrite(&[ENABLED, REPLICAS, PROFILED[0], PROFILED[1]]);
    job
}

/// Bits of losses and predicted times, which follow from the plans.
fn bits(lines: &[Value]) -> Vec<[u64; 2]> {
    let of = |line: &Value| ["loss", "predicted_seconds"].map(|name| line[name].as_f64().unwrap().to_bits());
    lines.iter().map(of).collect()
}

/// Runs with states in a directory, and returns the lines.
fn run(job: &Job, states: &Path, args: &[&str]) -> Vec<Value> {
    job.lines(&[&["--steps", STEPS, "--checkpoints", text(states)], args].concat())
}

#[test]
fn by_default_measured_times_are_recorded_and_reported_and_change_no_plan() {
    let job = job();
    let (states, other) = (job.path("states"), job.path("other"));
    let lines = run(&job, &states, &[]);
    let reports: Vec<&Value> = lines.iter().filter_map(|line| line.get("correction")).collect();
    assert_eq!(reports.len(), 5, "an early start and every interval are reported: {lines:?}");
    assert!(
        reports.iter().all(|report| report["is_applied"] == false && report["error_uncorrected"].is_f64())
    );
    let record = std::fs::read_to_string(states.join("corrections.jsonl")).expect("a record");
    assert_eq!(record.lines().count(), 17, "a description and a line per step");
    assert!(record.contains("\"table\":{\"version\":1,\"effective_step\":10,"), "{record}");

    assert_eq!(bits(&run(&job, &other, &[])), bits(&lines), "two runs have the same plans and losses");
    job.rewrite(&[REPLICAS, PROFILED[0], PROFILED[1]]);
    assert_eq!(bits(&job.lines(&["--steps", STEPS])), bits(&lines), "as has a run that measures nothing");
}

#[test]
fn a_recorded_run_is_replayed_bit_for_bit_also_after_a_break() {
    let job = job();
    let (states, replayed, broken) = (job.path("states"), job.path("replayed"), job.path("broken"));
    let measured = run(&job, &states, &["--corrections", "measured"]);
    let plain = run(&job, &job.path("plain"), &[]);
    assert_eq!(bits(&measured)[..10], bits(&plain)[..10], "the first table is in force from step 10 on");
    assert_ne!(bits(&measured)[10..], bits(&plain)[10..], "measured times change plans");

    let record = states.join("corrections.jsonl");
    let args = ["--corrections", text(&record)];
    assert_eq!(bits(&run(&job, &replayed, &args)), bits(&measured));
    assert!(!replayed.join("corrections.jsonl").exists(), "a run that replays records nothing");
    // Breaks before, and after, the first table is in force.
    let whole = bits(&measured);
    for end in ["5", "14", STEPS] {
        let resumed: &[&str] = if end == "5" { &[] } else { &["--resume"] };
        let paths = ["--steps", end, "--checkpoints", text(&broken)];
        let lines = job.lines(&[&paths[..], &args, resumed].concat());
        let begin = lines[0]["step"].as_u64().expect("a step") as usize;
        assert_eq!(bits(&lines), whole[begin..begin + lines.len()], "up to step {end}");
    }
}

#[test]
fn a_measured_run_that_is_resumed_keeps_its_tables_and_its_record() {
    let job = job();
    let states = job.path("states");
    let paths = ["--checkpoints", text(&states), "--corrections", "measured"];
    let first = job.lines(&[&paths[..], &["--steps", "14"]].concat());
    let rest = job.lines(&[&paths[..], &["--steps", "24", "--resume"]].concat());
    assert_eq!((first.len(), rest.len()), (14, 10));
    let record = text(&states.join("corrections.jsonl")).to_owned();
    let replayed = job.lines(&["--steps", "24", "--corrections", &record]);
    assert_eq!(bits(&replayed), bits(&[first, rest].concat()), "the record spans the break");
}

#[test]
fn a_new_run_takes_the_record_of_an_earlier_one_apart() {
    let job = job();
    let states = job.path("states");
    let paths = ["--checkpoints", text(&states), "--steps", "2"];
    job.lines(&paths);
    let first = std::fs::read(states.join("corrections.jsonl")).expect("a record");
    let again = job.run(&paths);
    assert_eq!(again.status, Some(0), "{}", again.stderr);
    assert_eq!(std::fs::read(states.join("earlier-1/corrections.jsonl")).expect("a record"), first);
    assert!(states.join("corrections.jsonl").exists());
}

/// The message from a run that must not start.
fn refused(job: &Job, args: &[&str], status: i32) -> String {
    let run = job.run(args);
    assert_eq!((run.status, run.stdout.as_str()), (Some(status), ""), "{args:?}: {}", run.stderr);
    run.stderr
}

#[test]
fn records_that_cannot_be_replayed_are_named_with_the_reason() {
    let job = job();
    let states = job.path("states");
    job.lines(&["--steps", "4", "--checkpoints", text(&states)]);
    let record = states.join("corrections.jsonl");
    let replay = |path: &Path, steps: &str| {
        let message = refused(&job, &["--steps", steps, "--corrections", text(path)], 1);
        assert!(message.contains(text(path)), "{message}");
        message
    };
    let missing = replay(&job.path("none.jsonl"), "4");
    assert!(missing.contains("could not read") && missing.contains("No such file"), "{missing}");
    let short = replay(&record, "5");
    assert!(short.contains("ends after 4 steps, but the run has 5"), "{short}");
    let good = std::fs::read_to_string(&record).expect("a record");
    let damaged = job.path("damaged.jsonl");
    std::fs::write(&damaged, good.replacen("{\"step\":2}", "{\"step\":7}", 1)).expect("it can be written");
    let malformed = replay(&damaged, "4");
    assert!(malformed.contains("line 4: expected step 2, found step 7"), "{malformed}");

    let args = ["--steps", "4", "--corrections", text(&record)];
    job.rewrite(&[ENABLED, PROFILED[0], PROFILED[1]]);
    assert!(refused(&job, &args, 1).contains("was recorded with another layout: expected "));
    job.rewrite(&[
        ENABLED,
        REPLICAS,
        PROFILED[1],
        ("max_position_embeddings = 256", "max_position_embeddings = 255"),
    ]);
    assert!(refused(&job, &args, 1).contains("was recorded with another model: expected "));
    job.rewrite(&[ENABLED, REPLICAS]);
    assert!(refused(&job, &args, 1).contains("another predictor: expected \"cpu\", found \"profile "));
    job.rewrite(&[]);
    let misuse = refused(&job, &["--corrections", "measured"], 2);
    assert!(misuse.contains("`--corrections measured` needs `correction.enabled = true`"), "{misuse}");
}
