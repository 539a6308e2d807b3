//! Tests that the order of samples depends on seed, dataset and batch size only.

use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::tar::TarBytes;
use serde_json::Value;

use crate::command::dflop;

const SAMPLES: usize = 26;

fn order(pattern: &str, more: &[&str]) -> String {
    let run = dflop(&[&["order", pattern, "--json", "--set", "plan.strategy=search:50"], more].concat());
    assert_eq!((run.status, run.stderr.as_str()), (Some(0), ""), "{more:?}");
    run.stdout
}

fn keys_of_line(line: &str) -> Vec<Vec<Vec<String>>> {
    let line: Value = serde_json::from_str(line).expect("a line is JSON");
    serde_json::from_value(line["keys"].clone()).expect("keys by rank and microbatch")
}

/// Returns the keys in each step, sorted.
fn unions(lines: &str) -> Vec<Vec<String>> {
    let union = |line: &str| {
        let mut keys: Vec<String> = keys_of_line(line).into_iter().flatten().flatten().collect();
        keys.sort_unstable();
        keys
    };
    lines.lines().map(union).collect()
}

#[test]
fn step_holds_the_same_samples_for_any_number_of_ranks() {
    let data = TempDataset::new(2, SAMPLES / 2, Compression::Plain);
    let with = |ranks: &str| order(&data.pattern(), &["--global-batch-size", "8", "--dp-size", ranks]);
    let one = unions(&with("1"));
    for ranks in ["2", "3", "8"] {
        let lines = with(ranks);
        assert_eq!(unions(&lines), one, "{ranks} ranks");
        assert!(lines.lines().all(|line| keys_of_line(line).len().to_string() == ranks));
    }
}

#[test]
fn later_start_gives_the_tail_of_the_full_run() {
    let data = TempDataset::new(2, SAMPLES / 2, Compression::Plain);
    for tail in ["carry", "drop", "short"] {
        let size = [
            "--global-batch-size",
            "4",
            "--dp-size",
            "2",
            "--seed",
            "5",
            "--set",
            &format!("order.tail={tail}"),
        ];
        let full = order(&data.pattern(), &size);
        let lines: Vec<&str> = full.split_inclusive('\n').collect();
        for start in [0, 1, lines.len() - 1] {
            let from = order(&data.pattern(), &[&size[..], &["--from-step", &start.to_string()]].concat());
            assert_eq!(from, lines[start..].concat(), "{tail} from step {start}");
        }
    }
}

/// A first step after the first epoch once printed nothing and succeeded.
#[test]
fn a_later_first_step_is_printed_to_the_end_of_its_epoch() {
    let data = TempDataset::new(2, SAMPLES / 2, Compression::Plain);
    let size = ["--global-batch-size", "4", "--dp-size", "2"];
    let full = order(&data.pattern(), &[&size[..], &["--steps", "14"]].concat());
    let later = order(&data.pattern(), &[&size[..], &["--from-step", "9"]].concat());
    assert_eq!(later.lines().collect::<Vec<_>>(), full.lines().skip(9).collect::<Vec<_>>());
}

#[test]
fn tails_differ_in_the_last_batch_only() {
    let data = TempDataset::new(2, SAMPLES / 2, Compression::Plain);
    let steps = |tail| {
        unions(&order(
            &data.pattern(),
            &["--global-batch-size", "8", "--dp-size", "2", "--set", &format!("order.tail={tail}")],
        ))
    };
    let lengths = |tail| steps(tail).iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(lengths("carry"), [8, 8, 8, 8]);
    assert_eq!(lengths("drop"), [8, 8, 8]);
    assert_eq!(lengths("short"), [8, 8, 8, 2]);
    assert_eq!(steps("carry")[..3], steps("short")[..3]);
    assert_eq!(steps("drop"), steps("short")[..3]);
}

#[test]
fn next_epoch_goes_on_where_the_first_ended() {
    let data = TempDataset::new(2, SAMPLES / 2, Compression::Plain);
    let size = ["--global-batch-size", "13", "--dp-size", "2"];
    let both = unions(&order(&data.pattern(), &[&size[..], &["--steps", "4"]].concat()));
    let second = unions(&order(&data.pattern(), &[&size[..], &["--set", "order.first_epoch=1"]].concat()));
    assert_eq!(both[2..], second);
}

#[test]
fn seeds_change_the_order_up_to_the_largest() {
    let data = TempDataset::new(2, SAMPLES / 2, Compression::Plain);
    let with = |seed| order(&data.pattern(), &["--global-batch-size", "8", "--dp-size", "2", "--seed", seed]);
    assert_ne!(unions(&with("0")), unions(&with("1")));
    assert_ne!(unions(&with("0")), unions(&with("18446744073709551615")));
    assert_eq!(with("7"), with("7"));
}

#[test]
fn batch_larger_than_the_dataset_runs_into_later_epochs_if_asked_for() {
    let data = TempDataset::new(1, 3, Compression::Plain);
    let args = ["--global-batch-size", "7", "--dp-size", "2", "--steps", "1", "--set", "order.tail=repeat"];
    let refused = dflop(&[&["order", &data.pattern()], &args[..6]].concat());
    assert_eq!(refused.status, Some(2));
    assert!(refused.stderr.contains("7 samples are more than the 3 of the data"), "{}", refused.stderr);
    let step = unions(&order(&data.pattern(), &args)).remove(0);
    let count = |key: &String| step.iter().filter(|other| *other == key).count();
    assert!(data.keys.iter().all(|key| (2..=3).contains(&count(key))), "{step:?}");
}

#[test]
fn plan_line_bounds_its_own_makespan() {
    let data = TempDataset::new(2, SAMPLES / 2, Compression::Plain);
    let lines =
        order(&data.pattern(), &["--global-batch-size", "8", "--dp-size", "2", "--microbatches", "2"]);
    for (step, line) in lines.lines().enumerate() {
        let line: Value = serde_json::from_str(line).expect("a line is JSON");
        assert_eq!(line["step"], step);
        assert_eq!(line["digest"].as_str().expect("a digest").len(), 16);
        assert!(line["lower_bound_ns"].as_u64() <= line["makespan_ns"].as_u64());
        assert!(line["target_tokens"].as_u64().expect("tokens") > 0);
    }
}

#[test]
fn names_of_a_dataset_are_interchangeable() {
    let data = TempDataset::new(3, 4, Compression::Plain);
    let directory = data.pattern();
    let size = ["--global-batch-size", "6", "--dp-size", "2"];
    let whole = order(&directory, &size);
    assert_eq!(order(&format!("{directory}/shard-{{000..002}}.tar"), &size), whole);
    assert_eq!(order(&format!("{directory}/shard-{{000,001,002}}.tar"), &size), whole);
    let [first, second, third] = [0, 1, 2].map(|shard| data.shard(shard).display().to_string());
    assert_eq!(order(&format!("{first}::{second}::{third}"), &size), whole);
    assert_eq!(order(&first, &[&[second.as_str(), third.as_str()], &size[..]].concat()), whole);
}

#[test]
fn a_line_tells_that_a_byte_cap_left_no_partition_near_the_mean() {
    let directory = tempfile::tempdir().unwrap();
    let texts = ["a.txt", "b.txt", "c.txt"].into_iter();
    let tar = texts.fold(TarBytes::new(), |tar, name| tar.file(name, "word ".repeat(500).as_bytes()));
    let tar = tar.file("d.bin", &vec![0; 100_000]).file("d.txt", b"word");
    std::fs::write(directory.path().join("texts.tar"), tar.finish()).unwrap();
    let pattern = directory.path().display().to_string();
    let size = ["--global-batch-size", "4", "--dp-size", "1", "--microbatches", "2", "--steps", "1"];
    let line = |more: &[&str]| -> Value {
        serde_json::from_str(&order(&pattern, &[&size[..], more].concat())).expect("a line is JSON")
    };
    assert_eq!(line(&[]).get("near_mean_cap_dropped"), None);
    assert_eq!(line(&["--set", "plan.bytes_max=100010"])["near_mean_cap_dropped"], true);
}

#[test]
fn steps_are_planned_for_the_schedule() {
    let data = TempDataset::new(2, SAMPLES / 2, Compression::Plain);
    let shape =
        ["--global-batch-size", "8", "--dp-size", "1", "--microbatches", "4", "--set", "plan.stages=1,1,2"];
    let of_schedule = |schedule| {
        order(&data.pattern(), &[&shape[..], &["--set", &format!("plan.schedule={schedule}")]].concat())
    };
    assert_eq!(of_schedule("1f1b"), order(&data.pattern(), &shape));
    assert_ne!(of_schedule("1f1b"), of_schedule("interleaved:2"));
    let run =
        dflop(&[&["order", &data.pattern(), "--set", "plan.schedule=interleaved:3"], &shape[..]].concat());
    assert!(run.status != Some(0) && run.stderr.contains("schedule"), "{}", run.stderr);
}
