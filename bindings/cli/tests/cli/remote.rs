//! Tests that commands over URLs do the same as over files.

use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::fault_server::{Behavior, Fault, FaultServer};
use serde_json::Value;

use crate::command::{command, dflop, object, objects, text};

/// Returns the `list` output without URLs.
fn listed(args: &[&str]) -> Vec<Value> {
    let mut lines = objects(args);
    for line in &mut lines {
        line.as_object_mut().expect("an object").remove("url");
    }
    lines
}

#[test]
fn list_index_stream_and_order_take_urls() {
    let data = TempDataset::new(3, 12, Compression::Plain);
    let server =
        FaultServer::serve_directory(data.directory(), Behavior::faulty(5, Fault::Unavailable(None)));
    let url = server.url("shard-{000..002}.tar");
    let place = tempfile::tempdir().expect("a temporary directory");
    let (index, cache) = (place.path().join("index"), place.path().join("cache"));
    assert_eq!(listed(&["list", &url, "--json"]), listed(&["list", &data.pattern(), "--json"]));
    let remote = object(&["index", &url, "--out", text(&index), "--json"]);
    let local = object(&["index", &data.pattern(), "--json"]);
    assert_eq!(remote["fingerprint"], local["fingerprint"]);
    let size = ["--global-batch-size", "6", "--dp-size", "2", "--set", "plan.strategy=search:20", "--json"];
    let order = |pattern: &str, more: &[&str]| objects(&[&["order", pattern], &size[..], more].concat());
    assert_eq!(
        order(&url, &["--set", &format!("index.directory={}", text(&index))]),
        order(&data.pattern(), &[])
    );
    for more in [
        &[][..],
        &[
            "--set",
            &format!("store.cache={}", text(&cache)),
            "--set",
            "store.cache_bytes=100000000",
            "--set",
            "store.requests_max=4",
        ],
    ] {
        let args = [&["stream", &url, "--decode", "rgb224", "--epochs", "2", "--json"], more].concat();
        let report = object(&args);
        assert_eq!(report["samples"], 72, "{more:?}");
    }
    let kept = std::fs::read_dir(&cache).expect("the cache is made").flatten();
    let is_shard = |file: &std::fs::DirEntry| file.path().extension().is_some_and(|ending| ending == "shard");
    assert_eq!(kept.filter(is_shard).count(), 3);
}

#[test]
fn the_index_of_a_url_lies_in_the_cache_directory() {
    let data = TempDataset::new(1, 4, Compression::Plain);
    let server = FaultServer::serve_directory(data.directory(), Behavior::default());
    let home = tempfile::tempdir().expect("a temporary directory");
    let run = command(&["index", &server.url("shard-000.tar"), "--json"])
        .env("XDG_CACHE_HOME", home.path())
        .output()
        .expect("the command starts");
    let report: Value = serde_json::from_slice(&run.stdout).expect("one object");
    assert!(report["path"].as_str().expect("it is kept").starts_with(text(home.path())));
}

#[test]
fn a_url_that_cannot_be_read_says_what_to_do() {
    let data = TempDataset::new(1, 4, Compression::Plain);
    let server = FaultServer::serve_directory(data.directory(), Behavior::default());
    let run = dflop(&["list", &server.url("none.tar")]);
    assert_eq!(run.status, Some(1));
    assert!(run.stderr.contains("none.tar") && run.stderr.contains("404"), "{}", run.stderr);
    let run = dflop(&["list", &server.url("")]);
    assert_eq!(run.status, Some(1));
    assert!(run.stderr.contains("do not list directories"), "{}", run.stderr);
    let run = dflop(&["list", "s3:///none.tar"]);
    assert_eq!(run.status, Some(2));
    assert!(run.stderr.contains("expected a bucket"), "{}", run.stderr);
}
