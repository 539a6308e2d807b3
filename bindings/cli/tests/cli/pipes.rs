//! Tests streams in and out: standard input, pipes, closed output.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use dflop_tests::dataset::{Compression, TempDataset, compress};

use crate::command::{command, dflop, dflop_fed, objects, text};

#[test]
fn standard_input_lists_like_the_file() {
    let data = TempDataset::new(1, 6, Compression::Plain);
    let shard = data.shard(0);
    let bytes = std::fs::read(&shard).expect("the shard is there");
    let from_file = dflop(&["list", text(&shard), "--json"]).stdout.replace(text(&shard), "-");
    for stored in [Compression::Plain, Compression::Gzip, Compression::Zstd] {
        let run = dflop_fed(&["list", "-", "--json"], &compress(&bytes, stored));
        assert_eq!((run.status, run.stderr.as_str()), (Some(0), ""), "{stored:?}");
        assert_eq!(run.stdout, from_file, "{stored:?}");
    }
}

#[test]
fn cut_standard_input_delivers_what_came_and_fails() {
    let data = TempDataset::new(1, 6, Compression::Plain);
    let bytes = std::fs::read(data.shard(0)).expect("the shard is there");
    let last = objects(&["list", text(&data.shard(0)), "--json"]).pop().expect("six samples");
    let cut = last["offset"].as_u64().expect("an offset") as usize + 700;
    let run = dflop_fed(&["list", "-"], &bytes[..cut]);
    assert_eq!((run.status, run.stdout.lines().count()), (Some(1), 5));
    assert!(run.stderr.contains("truncated"), "{}", run.stderr);
}

#[test]
fn empty_standard_input_fails() {
    for reader in ["list", "stream"] {
        assert_eq!(dflop_fed(&[reader, "-"], b"").status, Some(1), "{reader}");
    }
}

#[test]
fn streams_cannot_be_indexed() {
    for stream in [&["-"][..], &["pipe:true", "--set", "store.allow=pipe"]] {
        let run = dflop(&[&["index"], stream].concat());
        assert_eq!(run.status, Some(2), "{stream:?}");
        assert!(run.stderr.contains("cannot be indexed"), "{}", run.stderr);
    }
}

#[test]
fn command_of_a_pipe_is_run_again_for_each_epoch() {
    let data = TempDataset::new(1, 6, Compression::Plain);
    let shard = format!("pipe:cat {}", data.shard(0).display());
    let report = objects(&[
        "stream",
        &shard,
        "--set",
        "store.allow=pipe",
        "--epochs",
        "2",
        "--decode",
        "raw",
        "--json",
    ]);
    assert_eq!(report[0]["samples"], 12);
}

#[test]
fn failing_command_of_a_pipe_is_an_error_with_its_status() {
    let data = TempDataset::new(1, 6, Compression::Plain);
    let late = format!("pipe:cat {}; exit 3", data.shard(0).display());
    for (shard, status) in [("pipe:exit 7", "7"), (late.as_str(), "3")] {
        for reader in ["list", "stream"] {
            let run = dflop(&[reader, shard, "--set", "store.allow=pipe"]);
            assert_eq!(run.status, Some(1), "{reader} {shard}");
            assert!(run.stderr.contains(&format!("exit status: {status}")), "{}", run.stderr);
        }
    }
}

#[test]
fn reader_that_leaves_early_is_no_failure() {
    let data = TempDataset::new(2, 500, Compression::Plain);
    let mut child = command(&["list", &data.pattern(), "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut first = String::new();
    BufReader::new(child.stdout.take().expect("standard output is piped"))
        .read_line(&mut first)
        .expect("there is a line");
    let output = child.wait_with_output().expect("the command ends");
    assert!(first.contains("sample-00000"));
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}
