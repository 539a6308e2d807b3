//! Tests `dflop pack`: limits, the index that it writes, and the state after it is killed.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use dflop_tests::markdown::root;

use crate::command::{command, dflop, object, refuse};

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary directories are UTF-8")
}

/// Writes a directory with this many samples, a text each.
fn source(samples: usize) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for sample in 0..samples {
        std::fs::write(directory.path().join(format!("{sample:05}.txt")), "a red kite ".repeat(20)).unwrap();
    }
    directory
}

fn shards(directory: &Path) -> Vec<String> {
    let names = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("shard-")).collect();
    names.sort();
    names
}

#[test]
fn pack_rolls_at_a_number_of_samples_and_leaves_an_index_that_is_used() {
    let (source, out) = (source(10), tempfile::tempdir().unwrap());
    let report = object(&["pack", text(source.path()), text(out.path()), "--shard-samples", "4", "--json"]);
    assert_eq!((report["shards"].as_u64(), report["samples"].as_u64()), (Some(3), Some(10)));
    let written = Path::new(report["index"].as_str().expect("an index"));
    let stamp = |path: &Path| std::fs::metadata(path).unwrap().modified().unwrap();
    let (bytes, time) = (std::fs::read(written).unwrap(), stamp(written));
    let index = object(&["index", text(out.path()), "--json"]);
    assert_eq!(index["path"], report["index"]);
    assert_eq!(stamp(written), time, "the index was not made again");
    object(&["index", text(out.path()), "--rebuild", "--json"]);
    assert!(std::fs::read(written).unwrap() == bytes, "a scan makes the same file");
}

#[test]
fn pack_without_an_index_writes_none() {
    let (source, out) = (source(3), tempfile::tempdir().unwrap());
    let report = object(&["pack", text(source.path()), text(out.path()), "--no-index", "--json"]);
    assert!(report["index"].is_null());
    assert!(!out.path().join(".dflop").exists());
}

#[test]
fn pack_takes_several_sources_and_reports_fields_columns_and_classes() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    for name in ["animals/kite/1.jpg", "animals/crow/1.jpg", "animals/README.md"] {
        std::fs::create_dir_all(path(name).parent().unwrap()).unwrap();
        std::fs::write(path(name), "x").unwrap();
    }
    let table = root().join("tests/golden/data_in/kites.parquet");
    let table = text(&table);
    let report = object(&["pack", table, table, "-o", text(&path("a")), "--map", "caption=txt", "--json"]);
    assert_eq!(
        (&report["samples"], &report["fields"]["txt"]),
        (&serde_json::json!(8), &serde_json::json!(8))
    );
    assert_eq!(report["columns"]["image"], serde_json::json!(["png"]));
    assert_eq!(report["classes"], serde_json::json!(["blue", "red"]));
    let (source, out) = (path("animals"), path("b"));
    let report = object(&["pack", text(&source), text(&out), "--label-from", "directory", "--json"]);
    assert_eq!(report["fields"], serde_json::json!({"jpg": 2, "cls": 2}));
    assert!(report["skipped"][0]["path"].as_str().unwrap().ends_with("README.md"));
    refuse(&["pack", table], 2, "SOURCE OUT");
    refuse(&["pack", table, text(&path("c")), "--map", "caption"], 2, "COLUMN=FIELD");
    refuse(&["pack", table, text(&path("c")), "--format", "xml"], 2, "expected files, jsonl");
    let lines = path("rows.jsonl");
    std::fs::write(&lines, "{}").unwrap();
    refuse(&["index", text(&lines)], 2, "dflop.from_jsonl");
}

#[test]
fn a_killed_pack_leaves_whole_shards_that_are_indexed_on_first_use() {
    let (source, out) = (source(2_000), tempfile::tempdir().unwrap());
    let args = ["pack", text(source.path()), text(out.path()), "--shard-samples", "10"];
    let mut child = command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let begin = Instant::now();
    while shards(out.path()).len() < 3 && child.try_wait().unwrap().is_none() {
        assert!(begin.elapsed() < Duration::from_mins(1), "no shard appeared");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    let status = child.wait().unwrap();
    let left = shards(out.path());
    assert!(!status.success() && (3..200).contains(&left.len()), "{status}, {} shards", left.len());
    assert!(!out.path().join(".dflop").exists(), "it was killed before the index");
    let partial = std::fs::read_dir(out.path()).unwrap().flatten();
    let is_partial =
        partial.map(|entry| entry.path()).any(|path| path.extension().is_some_and(|end| end == "partial"));
    let indexed = dflop(&["index", text(out.path()), "--json"]);
    assert_eq!(
        (indexed.status, indexed.stderr.contains("was killed")),
        (Some(0), is_partial),
        "{}",
        indexed.stderr
    );
    let index = &indexed.objects()[0];
    assert_eq!(index["samples"].as_u64(), Some(10 * left.len() as u64));
    assert_eq!((&index["skipped"], &index["warnings"]), (&serde_json::json!([]), &serde_json::json!([])));
    let again = shards_after_append(out.path());
    assert_eq!(again, left.len() + 1, "an appending writer continues after them");
}

/// Appends a sample with the library; returns the number of shards afterwards.
fn shards_after_append(directory: &Path) -> usize {
    let builder = dflop_loader::write::ShardWriter::builder(directory).append(true);
    let mut writer = builder.build().unwrap();
    writer.write("new", &[("txt", b"a kite")]).unwrap();
    let written = writer.finish().unwrap();
    assert!(written.index.is_some());
    assert!(
        std::fs::read_dir(directory)
            .unwrap()
            .flatten()
            .all(|entry| { !entry.file_name().to_string_lossy().ends_with(".partial") })
    );
    shards(directory).len()
}
