//! Tests runs that are asked to stop, by signals or because nobody reads their output, and runs that go on
//! though a checkpoint cannot be written.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use super::config::{Job, loss_bits};
use super::process::Watched;
use crate::command::text;

const ENDLESS: [&str; 2] = ["--steps", "1000000"];
/// Jobs with a single process, a pipeline, replicas, and tensor-parallel ranks.
const LAYOUTS: [(&str, &[&str]); 4] = [
    ("llm = { stages = 1, dp = 1 }", &["--stages", "1"]),
    ("llm = { stages = 3, dp = 1 }", &[]),
    ("llm = { stages = 2, dp = 2 }\nvision = { dp = 2 }", &[]),
    ("llm = { stages = 1, tp = 2 }", &[]),
];

fn job(layout: &str) -> Job {
    Job::with(&[("llm = { stages = 1, dp = 1 }", layout)])
}

#[test]
fn signals_end_a_run_of_any_layout_after_the_same_step_on_all_ranks_with_a_state() {
    for (number, (layout, args)) in LAYOUTS.into_iter().enumerate() {
        let job = job(layout);
        let states = job.path("states");
        let paths = [args, &["--checkpoints", text(&states)]].concat();
        let mut run = Watched::start(&job, &[&paths[..], &ENDLESS].concat());
        run.wait_for(2);
        let (signal, name, status) =
            [(Signal::INT, "SIGINT", 130), (Signal::TERM, "SIGTERM", 143)][number % 2];
        run.signal(signal);
        let (run, _) = run.end();
        assert_eq!(run.status, Some(status), "{layout}: {}", run.stderr);
        let lines = run.objects();
        let last = lines.last().and_then(|line| line["step"].as_u64()).expect("a step");
        let checkpoint = states.join(format!("step-{:08}", last + 1));
        let message =
            format!("dflop: stopped by {name} after step {last}, checkpoint `{}`\n", checkpoint.display());
        assert!(run.stderr.ends_with(&message), "{layout}: {}", run.stderr);
        assert_eq!(run.stderr.lines().count(), 1, "{layout}: {}", run.stderr);
        assert!(checkpoint.join("manifest.json").exists(), "{layout}");
        if number < 2 {
            let steps = (last + 3).to_string();
            let rest = job.lines(&[&paths[..], &["--resume", "--steps", &steps]].concat());
            let straight = job.lines(&[args, &["--steps", &steps]].concat());
            let spliced: Vec<Value> = lines.into_iter().chain(rest).collect();
            assert_eq!(loss_bits(&spliced), loss_bits(&straight), "{layout}");
        }
    }
}

#[test]
fn a_signal_to_one_rank_stops_all_and_without_a_directory_nothing_is_saved() {
    let job = job("llm = { stages = 3, dp = 1 }");
    let mut run = Watched::start(&job, &ENDLESS);
    run.wait_for(1);
    // as a scheduler does that signals processes on a single machine
    rustix::process::kill_process(run.rank(2), Signal::TERM).expect("the rank runs");
    let (run, _) = run.end();
    assert_eq!(run.status, Some(143), "{}", run.stderr);
    let last = run.objects().last().and_then(|line| line["step"].as_u64()).expect("a step");
    let message = format!("stopped by SIGTERM after step {last}, no checkpoint");
    assert!(run.stderr.contains(&message), "{}", run.stderr);
}

#[test]
fn a_second_signal_ends_the_run_at_once() {
    let job = job("llm = { stages = 3, dp = 1 }");
    let mut run = Watched::start(&job, &ENDLESS);
    run.wait_for(1);
    // A stopped process cannot stop in order.
    rustix::process::kill_process(run.rank(1), Signal::STOP).expect("the rank runs");
    run.signal(Signal::INT);
    // Sooner, it would be the same request.
    std::thread::sleep(Duration::from_millis(1500));
    run.signal(Signal::INT);
    let (run, took) = run.end();
    assert_eq!(run.status, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains("interrupted by signal 2, before the ranks had stopped"), "{}", run.stderr);
    assert!(took < Duration::from_secs(10), "{took:?}: sooner than the limit of a wait");
}

#[test]
fn a_closed_output_ends_the_run_without_a_word_and_leaves_no_rank_behind() {
    for (layout, args) in LAYOUTS {
        let job = job(layout);
        let states = job.path("states");
        let paths = [args, &["--checkpoints", text(&states)]].concat();
        let mut run = Watched::start(&job, &[&paths[..], &ENDLESS].concat());
        run.wait_for(1);
        let run = run.close_output().end();
        assert_eq!((run.status, run.stderr.as_str()), (Some(0), ""), "{layout}");
        let saved = std::fs::read_dir(&states).expect("a directory").filter_map(Result::ok);
        let mut saved: Vec<_> = saved.map(|entry| entry.file_name().into_string().expect("UTF-8")).collect();
        saved.sort_unstable();
        assert!(
            saved.len() == 2 && saved[0].starts_with("step-") && saved[1] == "steps.jsonl",
            "{layout}: {saved:?}"
        );
    }
}

#[test]
fn a_run_goes_on_where_a_state_cannot_be_written_and_saves_the_next_one() {
    let job = Job::with(&[
        ("llm = { stages = 1, dp = 1 }", "llm = { stages = 2, dp = 1 }"),
        ("[correction]", "[checkpoint]\nevery = 1\n\n[correction]"),
    ]);
    let states = job.path("states");
    std::fs::create_dir(&states).expect("a directory");
    // A file where every save prepares an empty directory.
    let blocked = states.join(".step-00000002.partial");
    std::fs::write(&blocked, b"").expect("a file");
    let args = ["--checkpoints", text(&states)];
    let mut run = Watched::start(&job, &[&args[..], &ENDLESS].concat());
    run.wait_for(4);
    assert!(names(&states).iter().all(|name| !name.starts_with("step-")), "no state is complete");
    std::fs::remove_file(&blocked).expect("the file is there");
    run.wait_for(4);
    run.signal(Signal::TERM);
    let (run, _) = run.end();
    assert_eq!(run.status, Some(143), "{}", run.stderr);
    assert!(run.stderr.contains("a checkpoint cannot be written; training goes on"), "{}", run.stderr);
    assert!(names(&states).iter().any(|name| name.starts_with("step-")));

    std::fs::write(&blocked, b"").expect("a file");
    let last = run.objects().last().and_then(|line| line["step"].as_u64()).expect("a step");
    let end = (last + 3).to_string();
    let (run, _) = Watched::start(&job, &[&args[..], &["--resume", "--steps", &end]].concat()).end();
    assert_eq!(run.status, Some(1), "the last state is missing: {}", run.stderr);
    assert!(run.stderr.contains("could not prepare"), "{}", run.stderr);
}

fn names(directory: &std::path::Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("a directory").filter_map(Result::ok);
    entries.map(|entry| entry.file_name().into_string().expect("UTF-8")).collect()
}
