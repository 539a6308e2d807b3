//! Tests of whole runs through the library: `dflop_executor::run`.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dflop_executor::run::{GenerateTable, ModelTable, Run, RunConfig, RunOptions, Status, StopRequests};
use dflop_executor::train::{EXAMPLE_CONFIG, StopReason};
use tempfile::TempDir;

/// A small model and shards for it, in a directory of their own, and a run on two ranks.
fn small_run() -> (TempDir, RunConfig) {
    let directory = tempfile::tempdir().unwrap();
    let example = RunConfig::from_toml(EXAMPLE_CONFIG).unwrap();
    let table = GenerateTable { samples: 48, tiles: [1, 4], ..GenerateTable::default() };
    table.write(directory.path(), &example.model).unwrap();
    let model = directory.path().join("model");
    let mut config = RunConfig::new(ModelTable { directory: Some(model), ..ModelTable::default() });
    config.data.shards = vec![directory.path().join("shards").display().to_string()];
    config.data.global_batch_size = 8;
    config.parallel.microbatches = 2;
    config.checkpoint.directory = Some(directory.path().join("run"));
    config.steps = 4;
    (directory, config)
}

/// Numbers of the steps of a run, and how it ended.
fn steps(config: &RunConfig, options: RunOptions) -> (Vec<u64>, dflop_executor::run::RunEnd) {
    let mut steps = Vec::new();
    let run = Run::new(config.clone(), options);
    let end = run.start(&mut |step| {
        steps.push(step.step);
        ControlFlow::Continue(())
    });
    (steps, end.unwrap())
}

fn resumed() -> RunOptions {
    RunOptions { resume: true, ..RunOptions::default() }
}

#[test]
fn steps_are_reported_on_the_calling_thread_and_timelines_joined() {
    let (directory, config) = small_run();
    let trace = directory.path().join("trace.json");
    let caller = std::thread::current().id();
    let options = RunOptions { until: Some(2), trace: Some(trace.clone()), ..RunOptions::default() };
    let mut threads = Vec::new();
    let end = Run::new(config, options).start(&mut |step| {
        threads.push((step.step, std::thread::current().id()));
        ControlFlow::Continue(())
    });
    assert_eq!(threads, [(0, caller), (1, caller)]);
    let end = end.unwrap();
    assert!((end.steps, end.stopped, end.has_first_rank) == (2, None, true), "{end:?}");
    let text = std::fs::read_to_string(&trace).unwrap();
    assert!(text.contains("\"pid\":0") && text.contains("\"pid\":1"), "the timeline of both ranks");
    let names: Vec<_> =
        std::fs::read_dir(directory.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| !name.to_string_lossy().starts_with(".trace")), "{names:?}");
}

#[test]
fn a_callback_that_breaks_ends_the_run_with_its_state_saved() {
    let (_directory, mut config) = small_run();
    config.steps = 1000;
    let mut reported = 0;
    let end = Run::new(config.clone(), RunOptions::default()).start(&mut |_| {
        reported += 1;
        ControlFlow::Break(())
    });
    let end = end.unwrap();
    assert_eq!((reported, end.stopped), (1, Some(StopReason::OutputClosed)));
    assert!(end.steps < 1000 && end.checkpoint.as_deref().is_some_and(Path::is_dir), "{end:?}");
    let (after, _) = steps(&config, RunOptions { until: Some(end.steps + 1), ..resumed() });
    assert_eq!(after, [end.steps], "the run goes on where it ended");
}

#[test]
fn a_stop_request_ends_the_run_after_its_step() {
    let (_directory, mut config) = small_run();
    config.steps = 1000;
    let is_requested = Arc::new(AtomicBool::new(false));
    let request = Arc::clone(&is_requested);
    let check = move || request.load(Ordering::Relaxed).then_some(StopReason::Terminate);
    let options = RunOptions { stop: StopRequests::Check(Arc::new(check)), ..RunOptions::default() };
    let end = Run::new(config, options).start(&mut |_| {
        is_requested.store(true, Ordering::Relaxed);
        ControlFlow::Continue(())
    });
    assert_eq!(end.unwrap().stopped, Some(StopReason::Terminate));
}

#[test]
fn an_interrupted_run_has_the_losses_of_a_whole_one() {
    let (_directory, mut config) = small_run();
    let losses = |config: &RunConfig, options| {
        let mut losses = Vec::new();
        let run = Run::new(config.clone(), options);
        run.start(&mut |step| {
            losses.push(step.loss.to_bits());
            ControlFlow::Continue(())
        })
        .unwrap();
        losses
    };
    let mut parts = losses(&config, RunOptions { until: Some(2), ..RunOptions::default() });
    parts.extend(losses(&config, resumed()));
    assert!(losses(&config, resumed()).is_empty(), "nothing is left of a run at its end");
    config.checkpoint.directory = None;
    assert_eq!(parts, losses(&config, RunOptions::default()));
}

#[test]
fn findings_are_data() {
    let (_directory, config) = small_run();
    let findings = Run::new(config.clone(), RunOptions::default()).check();
    assert_eq!(findings.wrong, 0, "{findings:?}");
    assert!(findings.checks.iter().any(|check| check.subject == "shards" && check.status == Status::Ok));
    let mut wrong = config.clone();
    wrong.optimizer.zero_stage = 3;
    let findings = Run::new(wrong.clone(), RunOptions::default()).check();
    let faults: Vec<_> = findings.checks.iter().filter(|check| check.status == Status::Wrong).collect();
    assert_eq!((findings.wrong, faults.len(), faults[0].subject), (1, 1, "configuration"));
    let error = Run::new(wrong, RunOptions::default()).start(&mut |_| ControlFlow::Continue(())).unwrap_err();
    assert_eq!(error.to_string(), faults[0].finding);
    let options = RunOptions { local_ranks: Some(3), ..RunOptions::default() };
    let error = Run::new(config, options).start(&mut |_| ControlFlow::Continue(())).unwrap_err();
    assert_eq!(error.to_string(), "`--local-ranks 3`: expected 2, the ranks of the job");
}
