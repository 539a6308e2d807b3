//! Tests that the index is built on first use, kept, noticed to be stale, and never found half-written.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::tar::TarBytes;

use crate::command::{command, dflop, object, text};

fn order(pattern: &str, more: &[&str]) -> String {
    let (stdout, stderr) = order_and_log(pattern, more);
    assert_eq!(stderr, "");
    stdout
}

fn order_and_log(pattern: &str, more: &[&str]) -> (String, String) {
    let size = ["--global-batch-size", "6", "--dp-size", "2", "--set", "plan.strategy=search:20", "--json"];
    let run = dflop(&[&["order", pattern], &size[..], more].concat());
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    (run.stdout, run.stderr)
}

fn index_path(pattern: &str) -> PathBuf {
    PathBuf::from(object(&["index", pattern, "--json"])["path"].as_str().expect("the index is kept"))
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("the directory is there");
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name();
    entries.map(|entry| name(entry).into_string().expect("names are UTF-8")).collect()
}

#[test]
fn first_use_makes_the_index_beside_the_shards() {
    let data = TempDataset::new(2, 4, Compression::Plain);
    let first = order(&data.pattern(), &[]);
    assert!(names(&data.directory().join(".dflop")).iter().any(|name| name.contains(".arrow")));
    assert_eq!(order(&data.pattern(), &[]), first);
}

#[test]
fn index_that_fits_is_kept() {
    let data = TempDataset::new(1, 4, Compression::Plain);
    let modified =
        || index_path(&data.pattern()).metadata().and_then(|file| file.modified()).expect("a time");
    assert_eq!(modified(), modified());
}

#[test]
fn named_directory_holds_the_index_for_every_command() {
    let data = TempDataset::new(1, 8, Compression::Plain);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let place = directory.path().join("here");
    let plain = order(&data.pattern(), &["--set", &format!("index.directory={}", text(&place))]);
    assert!(!data.directory().join(".dflop").exists());
    let report = object(&["index", &data.pattern(), "--out", text(&place), "--json"]);
    assert!(report["path"].as_str().expect("a path").starts_with(text(&place)));
    assert_eq!(order(&data.pattern(), &[]), plain);
}

#[test]
fn directory_that_takes_no_index_sends_it_to_the_cache_directory() {
    let data = TempDataset::new(1, 8, Compression::Plain);
    let cache = tempfile::tempdir().expect("a temporary directory");
    // A file in its place prevents the directory for every user, including root.
    std::fs::write(data.directory().join(".dflop"), "").expect("the directory can be written");
    let output = command(&["index", &data.pattern(), "--json"]).env("XDG_CACHE_HOME", cache.path()).output();
    let report: serde_json::Value =
        serde_json::from_slice(&output.expect("the command runs").stdout).expect("an object");
    assert!(report["path"].as_str().expect("a path").starts_with(text(cache.path())));
}

#[test]
fn without_any_directory_the_index_lives_in_memory() {
    let data = TempDataset::new(1, 8, Compression::Plain);
    std::fs::write(data.directory().join(".dflop"), "").expect("the directory can be written");
    let mut index = command(&["index", &data.pattern(), "--json"]);
    let output = index.env_remove("HOME").env_remove("XDG_CACHE_HOME").output().expect("the command runs");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("an object");
    assert_eq!((&report["samples"], &report["path"]), (&8.into(), &serde_json::Value::Null));
}

#[test]
fn shard_replaced_by_one_of_the_same_size_is_noticed() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let shard = directory.path().join("x.tar");
    let write = |keys: [&str; 6]| {
        let append = |tar: TarBytes, key: &str| tar.file(&format!("{key}.txt"), b"text");
        let bytes = keys.into_iter().fold(TarBytes::new(), append).finish();
        std::fs::write(&shard, &bytes).expect("the directory can be written");
        bytes.len()
    };
    let bytes = write(["a", "b", "c", "d", "e", "f"]);
    assert!(order(text(&shard), &[]).contains(r#""a""#));
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(write(["u", "v", "w", "x", "y", "z"]), bytes);
    let changed = order(text(&shard), &[]);
    assert!(changed.contains(r#""u""#) && !changed.contains(r#""a""#), "{changed}");
}

#[test]
fn cut_index_is_made_anew() {
    let data = TempDataset::new(2, 8, Compression::Plain);
    let whole = order(&data.pattern(), &[]);
    let path = index_path(&data.pattern());
    let bytes = std::fs::read(&path).expect("the index is there");
    for length in [0, 1, 9, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..length]).expect("the index can be written");
        let (found, log) = order_and_log(&data.pattern(), &[]);
        assert_eq!(found, whole, "cut to {length} bytes");
        assert!(log.lines().count() == 1 && log.contains("is built again"), "{log}");
    }
    assert_eq!(std::fs::read(&path).expect("the index is there"), bytes);
}

#[test]
fn killed_indexing_leaves_nothing_that_misleads() {
    let data = TempDataset::new(3, 20, Compression::Plain);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let whole = order(
        &data.pattern(),
        &["--set", &format!("index.directory={}", text(&directory.path().join("whole")))],
    );
    for (attempt, wait_ms) in [0, 1, 2, 4, 8, 16].into_iter().enumerate() {
        let place = directory.path().join(attempt.to_string());
        let mut index = command(&["index", &data.pattern(), "--verify", "--out", text(&place)]);
        let mut child =
            index.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the command starts");
        std::thread::sleep(std::time::Duration::from_millis(wait_ms));
        child.kill().expect("the command can be killed");
        child.wait().expect("the command ends");
        assert_eq!(
            order(&data.pattern(), &["--set", &format!("index.directory={}", text(&place))]),
            whole,
            "killed after {wait_ms} ms"
        );
    }
}

#[test]
fn processes_that_index_at_once_agree() {
    let data = TempDataset::new(3, 20, Compression::Plain);
    let spawn = |_| {
        let mut index = command(&["index", &data.pattern(), "--json"]);
        index.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts")
    };
    let children: Vec<_> = (0..4).map(spawn).collect();
    let reports = children.into_iter().map(|child| {
        let output = child.wait_with_output().expect("the command ends");
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("an object");
        report["fingerprint"].clone()
    });
    let mut fingerprints: Vec<_> = reports.collect();
    fingerprints.dedup();
    assert_eq!(fingerprints.len(), 1);
    let files = names(&data.directory().join(".dflop"));
    assert!(files.iter().all(|name| !name.contains("partial")), "{files:?}");
}

#[test]
fn a_disk_that_is_full_keeps_no_one_from_the_data() {
    let data = TempDataset::new(2, 4, Compression::Plain);
    let cache = tempfile::tempdir().expect("a temporary directory");
    // No file may grow: writing fails in every directory, as on full disks.
    let limited = "trap '' XFSZ; ulimit -f 0; exec \"$0\" \"$@\"";
    let pattern = data.pattern();
    let run = |more: &[&str]| {
        let arguments = [&["index", &pattern, "--json"], more].concat();
        let mut shell = std::process::Command::new("bash");
        shell.args(["-c", limited, env!("CARGO_BIN_EXE_dflop")]).args(arguments);
        let output = shell.env("XDG_CACHE_HOME", cache.path()).stdin(Stdio::null()).output();
        let output = output.expect("bash starts");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is UTF-8");
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let (status, stdout, stderr) = run(&[]);
    assert_eq!((status, stderr.as_str()), (Some(0), ""));
    let report: serde_json::Value = serde_json::from_str(&stdout).expect("a report");
    assert!(report["path"].is_null() && report["samples"] == 8, "{report}");
    let directory = data.directory().join(".dflop");
    assert!(names(&directory).iter().all(|name| !name.contains(".arrow") && !name.contains(".partial")));
    let (status, _, stderr) = run(&["--out", text(&data.directory().join("named"))]);
    assert!(status == Some(1) && stderr.contains("named"), "a directory that was asked for: {stderr}");
}

#[test]
fn links_that_were_planted_beside_the_shards_are_not_written_through() {
    use std::os::unix::fs::symlink;
    let data = TempDataset::new(2, 4, Compression::Plain);
    let place = tempfile::tempdir().expect("a temporary directory");
    let victim = place.path().join("victim.txt");
    std::fs::write(&victim, "precious").expect("the file is written");
    let index = index_path(&data.pattern());
    let directory = data.directory().join(".dflop");
    let stem = index.file_stem().expect("a name").to_str().expect("ASCII").to_owned();
    // The index itself, the lock, and the temporary names for the next processes, as they once were.
    let mut names: Vec<String> = vec![format!("{stem}.arrow"), format!("{stem}.lock")];
    names.extend((0..4_194).map(|pid| format!("{stem}.{}.tmp", pid + std::process::id())));
    std::fs::remove_dir_all(&directory).expect("the directory can be removed");
    std::fs::create_dir(&directory).expect("the directory is made");
    for name in &names {
        symlink(&victim, directory.join(name)).expect("the link is made");
    }
    let cache = place.path().join("cache");
    let mut command = command(&["index", &data.pattern(), "--json"]);
    let output = command.env("XDG_CACHE_HOME", &cache).output().expect("it starts");
    let report = String::from_utf8(output.stdout).expect("UTF-8");
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert!(report.contains(text(&index)), "{report}");
    assert_eq!(std::fs::read_to_string(&victim).expect("it is there"), "precious");
    assert!(std::fs::symlink_metadata(&index).expect("it is there").is_file(), "the link was replaced");
}
