//! Tests `dflop pack`: limits, the index that it writes, and the state after it is killed.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::command::{command, object};

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary directories are UTF-8")
}

/// Writes a directory with this many samples of one text each.
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
    let index = object(&["index", text(out.path()), "--json"]);
    assert_eq!(index["samples"].as_u64(), Some(10 * left.len() as u64));
    assert_eq!((&index["skipped"], &index["warnings"]), (&serde_json::json!([]), &serde_json::json!([])));
    let again = shards_after_append(out.path());
    assert_eq!(again, left.len() + 1, "an appending writer continues after them");
}

/// Appends one sample with the library; returns the number of shards after it.
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
