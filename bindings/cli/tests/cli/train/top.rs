//! Tests `dflop top`: the record that a run keeps, and the display during and after the run.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::Stdio;

use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::Value;

use super::config::Job;
use super::process::Watched;
use crate::command::{command, dflop, object, refuse, text};

fn state(run: &std::path::Path) -> Value {
    object(&["top", text(run), "--json"])
}

#[test]
fn a_run_is_shown_from_its_directory_also_resumed_and_anew() {
    let job = Job::with(&[("llm = { stages = 1, dp = 1 }", "llm = { stages = 2, dp = 1 }")]);
    let run = job.path("run");
    let first = job.lines(&["--checkpoints", text(&run), "--steps", "4"]);
    let shown = state(&run);
    assert_eq!(
        (&shown["phase"], &shown["steps_taken"], &shown["steps"]),
        (&"completed".into(), &4.into(), &4.into())
    );
    assert_eq!((&shown["loss"], &shown["checkpoint"]), (&first[3]["loss"], &"step-00000004".into()));
    assert!(shown["left_seconds"].is_null() && shown["tokens_per_second"].as_f64() > Some(0.0), "{shown}");
    let shares = shown["shares"].as_object().expect("shares");
    let sum: f64 = shares.values().map(|part| part.as_f64().expect("a share")).sum();
    assert!((sum - 1.0).abs() < 1e-9 && shares["bubbles"].as_f64() > Some(0.0), "{shown}");

    job.lines(&["--checkpoints", text(&run), "--resume"]);
    let record = std::fs::read_to_string(run.join("steps.jsonl")).expect("a record");
    let lines: Vec<Value> = record.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let steps: Vec<u64> = lines.iter().filter_map(|line| line["step"].as_u64()).collect();
    assert_eq!(steps, [0, 1, 2, 3, 4, 5]);
    assert_eq!(lines.iter().filter_map(|line| line["first_step"].as_u64()).collect::<Vec<_>>(), [0, 4]);
    let text_of_run = dflop(&["top", text(&run)]);
    assert!(
        text_of_run.stdout.contains("internvl: completed · 3 ranks · 1f1b · 2 microbatches · balanced"),
        "{}",
        text_of_run.stdout
    );
    assert!(text_of_run.stdout.contains("\nstep     6 of 6  "), "{}", text_of_run.stdout);

    // the record follows the states of its run
    let elsewhere = job.path("own.jsonl");
    assert_eq!(job.run(&["--checkpoints", text(&run), "--steps", "1"]).status, Some(0));
    assert_eq!(std::fs::read_to_string(run.join("earlier-1/steps.jsonl")).expect("a record"), record);
    assert_eq!(state(&run)["steps_taken"], 1);
    job.lines(&["--steps", "2", "--record", text(&elsewhere)]);
    assert_eq!(state(&elsewhere)["steps_taken"], 2);
    let report = object(&["report", text(&run.join("earlier-1")), "--json"]);
    assert_eq!(report["reports"], 1);
}

#[test]
fn runs_that_end_otherwise_say_how() {
    let job = Job::with(&[("llm = { stages = 1, dp = 1 }", "llm = { stages = 3, dp = 1 }")]);
    let run = job.path("run");
    let arguments = ["--checkpoints", text(&run), "--steps", "1000000"];
    let mut stopped = Watched::start(&job, &arguments);
    stopped.wait_for(2);
    assert_eq!(state(&run)["phase"], "running");
    stopped.signal(Signal::TERM);
    assert_eq!(stopped.end().0.status, Some(143));
    let shown = state(&run);
    assert_eq!((&shown["phase"], &shown["reason"]), (&"stopped".into(), &"SIGTERM".into()));

    let mut failed = Watched::start(&job, &arguments);
    failed.wait_for(1);
    rustix::process::kill_process(failed.rank(2), Signal::KILL).expect("the rank runs");
    assert_eq!(failed.end().0.status, Some(1));
    let shown = state(&run);
    assert_eq!(shown["phase"], "failed");
    assert!(shown["reason"].as_str().is_some_and(|reason| reason.contains("rank 2")), "{shown}");
}

#[test]
fn a_terminal_follows_the_run_to_its_end() {
    let job = Job::new();
    let run = job.path("run");
    std::fs::create_dir(&run).unwrap();
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudoterminal");
    grantpt(&terminal).and_then(|()| unlockpt(&terminal)).expect("it is ours");
    let name = ptsname(&terminal, Vec::new()).expect("a name").into_string().expect("UTF-8");
    let other = File::options().read(true).write(true).open(name).expect("the other end");
    // Started first: the run has not written its record yet.
    let mut top = command(&["top", text(&run)])
        .stdout(Stdio::from(OwnedFd::from(other)))
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let steps = job.lines(&["--checkpoints", text(&run), "--steps", "3"]);
    assert_eq!(steps.len(), 3);
    let mut shown = Vec::new();
    // ends with an error once the other end is closed
    let _ = File::from(terminal).read_to_end(&mut shown);
    assert!(top.wait().expect("it ends").success());
    let shown = String::from_utf8(shown).expect("UTF-8");
    assert!(shown.starts_with("run: starting"), "{shown}");
    assert!(shown.contains("\x1b[2A") && shown.contains("step     3 of 3  "), "{shown}");
    assert!(shown.contains(": completed"), "{shown}");
}

#[test]
fn what_is_no_run_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = text(directory.path());
    refuse(&["top", path], 1, "expected a directory with `steps.jsonl`");
    refuse(&["top", &format!("{path}/none")], 1, "none`: expected a directory");
    std::fs::write(directory.path().join("steps.jsonl"), "{\"format\":\"dflop-steps\",\"version\":2}\n")
        .unwrap();
    refuse(&["top", path], 1, "expected a record of version 1, found version 2");
    std::fs::write(directory.path().join("steps.jsonl"), [0xff, b'\n', b'x']).unwrap();
    assert_eq!(dflop(&["top", path]).stdout.lines().next(), Some("run: starting"));
    let job = Job::new();
    let run = job.run(&["--steps", "1", "--record", text(&job.path("none/steps.jsonl"))]);
    assert_eq!(run.status, Some(1));
    assert!(run.stderr.contains("none/steps.jsonl"), "{}", run.stderr);
}
