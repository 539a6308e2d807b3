//! Tests mixtures, splits, shuffles and resumed runs on the command line.

use dflop_tests::dataset::{Compression, TempDataset};
use serde_json::{Value, json};

use crate::command::{dflop, object, objects, text};

const SIZE: [&str; 7] =
    ["--global-batch-size", "6", "--dp-size", "2", "--set", "plan.strategy=search:50", "--json"];

/// `order` lines with these arguments.
fn order(args: &[&str]) -> Vec<Value> {
    objects(&[&["order"], args, &SIZE].concat())
}

/// Sorted keys per step and, in a mixture, datasets.
fn unions(lines: &[Value]) -> Vec<Vec<(String, u64)>> {
    fn flat(value: &Value) -> Vec<&Value> {
        value.as_array().map_or_else(|| vec![value], |list| list.iter().flat_map(flat).collect())
    }
    let union = |line: &Value| {
        let keys = flat(&line["keys"]).into_iter().map(|key| key.as_str().expect("a key").to_owned());
        let datasets = line.get("data_sets").map(flat).unwrap_or_default();
        let number = |place: usize| datasets.get(place).and_then(|number| number.as_u64()).unwrap_or(0);
        let mut union: Vec<_> = keys.enumerate().map(|(place, key)| (key, number(place))).collect();
        union.sort_unstable();
        union
    };
    lines.iter().map(union).collect()
}

fn refuse(args: &[&str], status: i32, reason: &str) {
    let run = dflop(&[&["order"], args, &SIZE[..]].concat());
    assert_eq!(run.status, Some(status), "{args:?}: {}", run.stderr);
    assert!(run.stderr.contains(reason), "{}", run.stderr);
}

#[test]
fn a_resumed_run_prints_what_the_whole_run_does_for_any_number_of_ranks() {
    let (a, b) = (TempDataset::new(2, 10, Compression::Plain), TempDataset::new(1, 9, Compression::Zstd));
    let (a, b) = (format!("0.7={}", a.pattern()), format!("0.3={}", b.pattern()));
    let mix = ["--mix", a.as_str(), "--mix", b.as_str()];
    let whole = order(&[&mix[..], &["--steps", "7"]].concat());
    assert!(whole.iter().all(|line| line["data_sets"].as_array().is_some_and(|ranks| ranks.len() == 2)));
    let directory = tempfile::tempdir().expect("a temporary directory");
    let state = directory.path().join("state.json");
    let state = text(&state);
    let mut lines = order(&[&mix[..], &["--steps", "3", "--state-out", state]].concat());
    let args =
        [&["order"], &mix[..], &["--global-batch-size", "6", "--dp-size", "3", "--json", "--resume", state]]
            .concat();
    lines.extend(objects(&[&args[..], &["--steps", "4", "--state-out", state]].concat()));
    assert_eq!(unions(&lines), unions(&whole));
    let saved: Value = serde_json::from_str(&std::fs::read_to_string(state).expect("a state")).expect("JSON");
    assert_eq!((&saved["step"], &saved["data_sets"][1]["epoch"]), (&json!(7), &json!(1)));
    refuse(&[&mix[..], &["--resume", state, "--seed", "1"]].concat(), 1, "seed 0, and this run has 1");
}

#[test]
fn changed_data_is_refused_by_the_shard_or_accepted() {
    let data = TempDataset::new(2, 10, Compression::Plain);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let state = directory.path().join("state.json");
    let pattern = data.pattern();
    order(&[&pattern, "--steps", "1", "--state-out", text(&state)]);
    std::fs::copy(data.shard(0), data.shard(2)).expect("the directory can be written");
    let resume = [pattern.as_str(), "--resume", text(&state), "--steps", "5"];
    refuse(&resume, 1, "shard `shard-002.tar` was added");
    let lines = order(&[&resume[..], &["--set", "order.accept_changed_data=true"]].concat());
    assert_eq!((lines[0]["step"].as_u64(), unions(&lines).concat().len()), (Some(1), 30));
}

#[test]
fn a_mixture_file_says_what_flags_do_and_more() {
    let data = [TempDataset::new(1, 10, Compression::Plain), TempDataset::new(1, 7, Compression::Plain)];
    let flags = data.each_ref().map(|data| format!("1={}", data.pattern()));
    let by_flags = order(&["--mix", &flags[0], "--mix", &flags[1], "--steps", "4"]);
    let file = data[0].directory().join("mixture.json");
    let document = json!({"data_sets": [{"shards": ["."]}, {"shards": [data[1].pattern()]}]});
    std::fs::write(&file, document.to_string()).expect("the directory can be written");
    assert_eq!(unions(&order(&["--mix", text(&file), "--steps", "4"])), unions(&by_flags));
    let document = json!({"stop": "all_exhausted",
        "data_sets": [{"shards": ["shard-000.tar"], "repeat": 2}, {"shards": [data[1].pattern()], "repeat": 1}]});
    std::fs::write(&file, document.to_string()).expect("the directory can be written");
    let lines = order(&["--mix", text(&file)]);
    assert_eq!((lines.len(), unions(&lines).concat().len()), (5, 27));
    let simulate = ["simulate", "--mix", text(&file), "--global-batch-size", "6", "--dp-size", "2", "--json"];
    assert_eq!(object(&simulate)["steps"], 3);
    refuse(&["--mix", text(&file), "--from-step", "5", "--steps", "1"], 2, "the run has 5 steps");
    refuse(&["--mix", text(&file), "--from-step", "6"], 2, "the run has 5 steps");
    refuse(&["--mix", "shards"], 1, "shards");
    refuse(&["--mix", "a=b", "--mix", "c=d"], 2, "WEIGHT=DATASET");
    refuse(&["--mix", text(&file), data[1].pattern().as_str()], 2, "cannot be used with");
    let of_each =
        [["--split", "train"], ["--set", "index.directory=indexes"], ["--set", "index.splits=splits.json"]];
    for argument in of_each {
        let args = [&["--mix", text(&file)], &argument[..]].concat();
        refuse(&args, 2, "has no effect with a mixture file");
    }
}

#[test]
fn a_split_narrows_every_command_that_goes_through_an_index() {
    let data = TempDataset::new(2, 10, Compression::Plain);
    let splits = json!({"splits": {"a": {"shards": ["shard-000.tar"]}, "b": {"shards": ["shard-001.tar"]}}});
    std::fs::write(data.directory().join("splits.json"), splits.to_string())
        .expect("the directory can be written");
    let pattern = data.pattern();
    assert_eq!(object(&["stats", &pattern, "--split", "b", "--json"])["samples"], 10);
    let validated = unions(&order(&[
        &pattern,
        "--split",
        "b",
        "--epochs",
        "1",
        "--set",
        "order.shuffle=none",
        "--set",
        "order.tail=short",
    ]))
    .concat();
    let keys: Vec<String> = validated.into_iter().map(|(key, _)| key).collect();
    assert_eq!(keys, data.keys[10..]);
    refuse(&[&pattern, "--split", "c"], 2, "no split `c`; it has: a, b");
    let elsewhere = tempfile::tempdir().expect("a temporary directory");
    let file = elsewhere.path().join("mine.json");
    std::fs::write(&file, r#"{"splits": {"c": {"fraction": [0, 1]}}}"#)
        .expect("the directory can be written");
    let named = order(&[
        &pattern,
        "--split",
        "c",
        "--set",
        &format!("index.splits={}", text(&file)),
        "--epochs",
        "1",
    ]);
    assert_eq!(unions(&named).concat().len(), 20);
}

#[test]
fn shuffle_quality_tells_shuffles_apart() {
    let data = TempDataset::new(5, 20, Compression::Plain);
    let pattern = data.pattern();
    let quality = |shuffle: &[&str]| {
        let size = ["--global-batch-size", "6", "--dp-size", "2", "--json"];
        let report = object(&[&["order", &pattern, "--shuffle-quality"], shuffle, &size].concat());
        report["data_sets"][0].clone()
    };
    let number = |quality: &Value, name: &str| quality[name].as_f64().expect("a number");
    let (global, none) = (quality(&[]), quality(&["--set", "order.shuffle=none"]));
    assert!(number(&global, "displacement") > 0.7 && number(&none, "displacement") < 1e-9);
    assert!(number(&global, "index_neighbors") < 0.1 && number(&none, "index_neighbors") > 0.999);
    let blocks = quality(&["--set", "order.shuffle=blocks:10:2"]);
    assert!(number(&blocks, "batch_shards") <= 4.0, "{blocks}");
    refuse(&[&pattern, "--set", "order.shuffle=blocks:0:64"], 2, "blocks:SAMPLES:RUNS");
    refuse(&[&pattern, "--open-blocks", "4"], 2, "--set order.shuffle=blocks:SAMPLES:RUNS");
}
