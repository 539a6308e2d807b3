//! Tests `dflop stream` with a shuffle buffer, a state, metrics and limits.

use dflop_tests::dataset::{Compression, MixedTexts, TempDataset};
use serde_json::{Value, json};

use crate::command::{dflop, dflop_fed, object, text};

fn samples(report: &Value) -> u64 {
    report["samples"].as_u64().expect("samples")
}

#[test]
fn a_run_that_was_cut_goes_on_from_its_state() {
    let data = TempDataset::new(3, 10, Compression::Plain);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let state = directory.path().join("state.json");
    let stream = ["stream", &data.pattern(), "--decode", "raw", "--batch", "4", "--json", "--epochs", "2"];
    let order = ["--shuffle-buffer", "7", "--shuffle-shards", "--seed", "3"];
    let run = |more: &[&str]| object(&[&stream[..], &order, more].concat());
    let whole = run(&[]);
    let first = run(&["--samples", "12", "--state-out", text(&state)]);
    let second = run(&["--resume", text(&state), "--samples", "20", "--state-out", text(&state)]);
    let third = run(&["--resume", text(&state), "--state-out", text(&state)]);
    assert_eq!([&first, &second, &third].map(samples), [12, 20, 28]);
    let bytes = |report: &Value| report["bytes"].as_u64().expect("bytes");
    assert_eq!([&first, &second, &third].map(bytes).iter().sum::<u64>(), bytes(&whole));
    assert_eq!(samples(&run(&["--resume", text(&state)])), 0, "the end is an end");
    let other = dflop(&[&stream[..], &["--resume", text(&state)]].concat());
    assert_eq!(other.status, Some(1));
    assert!(
        other.stderr.contains("shards were dealt shuffled by seed 3 to rank 0 of 1, and now in the order"),
        "{}",
        other.stderr
    );
}

#[test]
fn a_global_order_resumes_on_another_number_of_ranks() {
    let data = TempDataset::new(3, 10, Compression::Plain);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let state = directory.path().join("state.json");
    let stream = ["stream", &data.pattern(), "--decode", "raw", "--json", "--seed", "3"];
    let run = |more: &[&str]| object(&[&stream[..], &["--set", "order.shuffle=global"], more].concat());
    let ranks = ["0/3", "1/3", "2/3"];
    let each = ranks.map(|rank| samples(&run(&["--batch", "2", "--shards-of-rank", rank])));
    assert_eq!(each, [10; 3], "equal shares of 30 samples");
    let first = run(&["--batch", "4", "--samples", "12", "--state-out", text(&state)]);
    assert_eq!(samples(&first), 12);
    let rest = ["0/2", "1/2"]
        .map(|rank| samples(&run(&["--batch", "3", "--shards-of-rank", rank, "--resume", text(&state)])));
    assert_eq!(rest, [9; 2]);
    // The state belongs to another order.
    let stream_order = dflop(&[&stream[..], &["--resume", text(&state)]].concat());
    assert_eq!(stream_order.status, Some(1), "{}", stream_order.stderr);
    assert!(stream_order.stderr.contains("expected the state of a stream"), "{}", stream_order.stderr);
}

#[test]
fn standard_input_goes_on_from_its_start_or_from_the_rest() {
    let texts = MixedTexts::new(&[30], Compression::Plain);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let state = directory.path().join("state.json");
    let stream =
        ["stream", "-", "--batch", "4", "--json", "--set", "read.error_budget=1", "--shuffle-buffer", "5"];
    let fed = |more: &[&str], input: &[u8]| {
        let run = dflop_fed(&[&stream[..], more].concat(), input);
        assert_eq!((run.status, run.stderr.as_str()), (Some(0), ""), "{more:?}");
        run.objects().remove(0)
    };
    let whole = texts.archive(0, 0);
    let all = samples(&fed(&[], &whole));
    let first = samples(&fed(&["--samples", "8", "--state-out", text(&state)], &whole));
    let again = samples(&fed(&["--resume", text(&state)], &whole));
    assert_eq!(first + again, all);
    let saved: Value = serde_json::from_slice(&std::fs::read(&state).expect("a state")).expect("it is JSON");
    let consumed = saved["position"]["items"].as_u64().expect("a number") as usize;
    let rest = texts.archive(0, consumed);
    let rest = samples(&fed(&["--resume", text(&state), "--resumed-input", "rest"], &rest));
    assert_eq!(first + rest, all);
}

#[test]
fn ranks_without_an_index_share_the_shards() {
    let data = TempDataset::new(3, 5, Compression::Plain);
    let share = |share| {
        let args = ["stream", &data.pattern(), "--decode", "raw", "--shards-of-rank", share, "--json"];
        samples(&object(&args))
    };
    assert_eq!([share("0/2"), share("1/2")], [10, 5]);
    for (share, mentioned) in [("0/4", "3 shards"), ("2/2", "rank 2"), ("half", "RANK/WORLD")] {
        let run = dflop(&["stream", &data.pattern(), "--shards-of-rank", share]);
        assert_eq!(run.status, Some(2), "{share}");
        assert!(run.stderr.contains(mentioned), "{}", run.stderr);
    }
}

#[test]
fn metrics_are_a_table_and_an_object() {
    let data = TempDataset::new(2, 6, Compression::Plain);
    let report = object(&["stream", &data.pattern(), "--metrics", "--json"]);
    let stages = report["metrics"]["stages"].as_array().expect("stages");
    let names: Vec<&Value> = stages.iter().map(|stage| &stage["stage"]).collect();
    assert_eq!(names, ["plan", "read", "decode_queue", "decode", "transform", "collate", "deliver"]);
    assert_eq!((&stages[1]["items"], &stages[6]["items"]), (&json!(12), &json!(12)));
    assert!(object(&["stream", &data.pattern(), "--json"]).get("metrics").is_none());
    let table = dflop(&["stream", &data.pattern(), "--metrics"]).stdout;
    assert!(table.contains("decode queue") && table.contains("bottleneck: "), "{table}");
}

#[test]
fn a_number_of_bad_samples_is_a_limit() {
    let texts = MixedTexts::new(&[40], Compression::Plain);
    let stream = ["stream", &texts.pattern()];
    assert_eq!(dflop(&[&stream[..], &["--set", "read.error_budget=1:40"]].concat()).status, Some(0));
    let run = dflop(&[&stream[..], &["--set", "read.error_budget=1:3"]].concat());
    assert_eq!(run.status, Some(1));
    assert!(run.stderr.contains("over the error budget of 3"), "{}", run.stderr);
}

#[test]
fn a_command_that_hangs_is_warned_of_and_ends_the_run() {
    let stalls = ["--set", "read.stall_log_seconds=0.2", "--set", "read.stall_seconds=0.7"];
    let run = dflop(&[&["stream", "pipe:exec sleep 600", "--set", "store.allow=pipe"], &stalls[..]].concat());
    assert_eq!(run.status, Some(1));
    assert!(run.stderr.contains("read stage is stuck in shard `pipe:exec sleep 600`"), "{}", run.stderr);
    assert!(run.stderr.lines().count() >= 3, "warned, then failed: {}", run.stderr);
}

#[test]
fn what_is_no_state_is_named() {
    let data = TempDataset::new(1, 2, Compression::Plain);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let state = directory.path().join("state.json");
    for content in [None, Some("{\"version\": 1"), Some("[]")] {
        if let Some(content) = content {
            std::fs::write(&state, content).expect("the directory can be written");
        }
        let run = dflop(&["stream", &data.pattern(), "--resume", text(&state)]);
        assert_eq!(run.status, Some(1), "{content:?}");
        assert!(run.stderr.contains("state.json"), "{}", run.stderr);
    }
}
