//! Tests real shards and files next to the checkout; passes without them.

use std::path::{Path, PathBuf};

use dflop_tests::shared_data;

use crate::command::{dflop, object, objects, text};

/// Real WebDataset shards and the number of samples, counted with webdataset 1.0.2.
const SHARDS: [(&str, usize); 6] = [
    ("webdataset/testdata__compressed.tar", 3),
    ("webdataset/testdata__mpdata.tar", 100),
    ("webdataset/testdata__sample.tgz", 90),
    ("webdataset/testdata__tendata.tar", 100),
    ("webdataset/testdata__testgz.tar", 1000),
    ("speechbrain/tests__samples__lang-shards__shard-000000.tar", 3),
];

fn copied(source: &Path, directory: &Path) -> PathBuf {
    let copy = directory.join(source.file_name().expect("a file has a name"));
    std::fs::copy(source, &copy).expect("the file can be copied");
    copy
}

#[test]
fn real_shards_hold_as_many_samples_as_webdataset_counts() {
    let Some(shared) = shared_data() else { return };
    let directory = tempfile::tempdir().expect("a temporary directory");
    for (name, samples) in SHARDS {
        let shard = copied(&shared.join("tars").join(name), directory.path());
        assert_eq!(objects(&["list", text(&shard), "--json"]).len(), samples, "{name}");
        let place = directory.path().join("index");
        let report = object(&["index", text(&shard), "--out", text(&place), "--json"]);
        assert_eq!(report["samples"], samples, "{name}");
    }
}

#[test]
fn malformed_files_among_good_ones_are_named_and_cost_no_good_one() {
    let Some(shared) = shared_data() else { return };
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (source, out) = (directory.path().join("source"), directory.path().join("out"));
    std::fs::create_dir(&source).expect("the directory can be written");
    let malformed = std::fs::read_dir(shared.join("malformed/made")).expect("malformed files are there");
    for entry in malformed {
        copied(&entry.expect("an entry").path(), &source);
    }
    for number in 0..50 {
        let path = source.join(format!("good{number}.txt"));
        std::fs::write(path, format!("text {number}")).expect("the directory can be written");
    }
    let packed = object(&["pack", text(&source), text(&out), "--json"]);
    for decode in ["raw", "rgb224", "media"] {
        let args = ["stream", text(&out), "--decode", decode, "--set", "read.error_budget=1", "--json"];
        let report = object(&args);
        let skipped = report["skipped"].as_array().expect("a list");
        assert_eq!(
            report["samples"].as_u64().expect("samples") + skipped.len() as u64,
            packed["samples"].as_u64().expect("samples"),
            "{decode}"
        );
        let is_good = |key: &serde_json::Value| key.as_str().expect("a key").starts_with("good");
        assert!(skipped.iter().all(|skipped| !is_good(&skipped["key"])), "{decode}");
        assert!(report["peak_rss_bytes"].as_u64().expect("bytes") < 1 << 29, "{decode}: memory is bounded");
    }
}

#[test]
fn malformed_shards_end_without_a_panic() {
    let Some(shared) = shared_data() else { return };
    let entries = std::fs::read_dir(shared.join("malformed/made")).expect("malformed files are there");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    for path in paths.filter(|path| text(path).contains(".tar")) {
        let run = dflop(&["list", text(&path)]);
        assert!(matches!(run.status, Some(0 | 1)), "{}: {}", path.display(), run.stderr);
        assert!(!run.stderr.contains("panicked"), "{}: {}", path.display(), run.stderr);
    }
}
