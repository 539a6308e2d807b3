//! Tests that no command waits for a pipe, a socket or a device in the place of a file, and that pipes which
//! the command line names as texts are read.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use dflop_tests::dataset::{Compression, TempDataset};
use serde_json::json;

use crate::command::{Run, command, dflop, text};

/// Maximum command time, on a machine with other load.
const PATIENCE: Duration = Duration::from_mins(1);

fn pipe(path: &Path) {
    let made = Command::new("mkfifo").arg(path).status().expect("mkfifo starts");
    assert!(made.success());
}

/// Runs a command, which must end in time.
fn ended(args: &[&str]) -> Run {
    let mut command = command(args);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let started = Instant::now();
    while child.try_wait().expect("it can be asked").is_none() {
        if started.elapsed() > PATIENCE {
            child.kill().expect("it runs");
            panic!("{args:?} waits");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().expect("it has ended").into()
}

fn refuse(args: &[&str], named: &str, found: &str) {
    let run = ended(args);
    assert!(matches!(run.status, Some(1 | 2)), "{args:?}: {run:?}");
    assert!(run.stderr.contains(named) && run.stderr.contains(found), "{args:?}: {}", run.stderr);
}

#[test]
fn what_is_no_file_is_refused_as_a_shard_wherever_it_is_named() {
    let data = TempDataset::new(1, 4, Compression::Plain);
    let place = tempfile::tempdir().expect("a temporary directory");
    let at = |name: &str| place.path().join(name);
    std::fs::create_dir(at("directory")).expect("it is made");
    std::fs::copy(data.shard(0), at("directory/a.tar")).expect("the shard is copied");
    pipe(&at("directory/pipe.tar"));
    pipe(&at("list-pipe.json"));
    let _listener = UnixListener::bind(at("socket.tar")).expect("it is bound");
    std::os::unix::fs::symlink("/dev/zero", at("device.tar")).expect("the link is made");
    let list = json!({"wids_version": 1, "shardlist": [{"url": "directory/pipe.tar"}]});
    std::fs::write(at("list.json"), list.to_string()).expect("the list is written");
    let shards = [
        (at("directory/pipe.tar"), "pipe.tar", "a pipe"),
        (at("directory"), "pipe.tar", "a pipe"),
        (at("list.json"), "pipe.tar", "a pipe"),
        (at("list-pipe.json"), "list-pipe.json", "a pipe"),
        (at("socket.tar"), "socket.tar", "a socket"),
        (at("device.tar"), "device.tar", "a device"),
    ];
    let out = at("out");
    for (shard, named, found) in &shards {
        let shard = text(shard);
        refuse(&["list", shard], named, found);
        refuse(&["stream", shard, "--decode", "raw"], named, found);
        refuse(&["index", shard, "--out", text(&out)], named, found);
        refuse(&["stats", shard, "--set", &format!("index.directory={}", text(&out))], named, found);
        for mode in ["mmap", "pread"] {
            refuse(&["list", shard, "--set", &format!("store.read={mode}")], named, found);
        }
    }
    let size =
        ["--global-batch-size", "2", "--dp-size", "1", "--set", &format!("index.directory={}", text(&out))];
    refuse(&[&["order", text(&at("directory"))], &size[..]].concat(), "pipe.tar", "a pipe");
}

#[test]
fn what_is_no_file_is_refused_in_every_directory_that_is_read() {
    let data = TempDataset::new(1, 4, Compression::Plain);
    let shard = data.shard(0);
    let place = tempfile::tempdir().expect("a temporary directory");
    for name in ["model/config.json", "tokenizer/tokenizer.json", "profile/a.csv", "mds/index.json"] {
        let path = place.path().join(name);
        std::fs::create_dir(path.parent().expect("a directory")).expect("it is made");
        pipe(&path);
    }
    let at = |name: &str| text(&place.path().join(name)).to_owned();
    pipe(&place.path().join("splits.yaml"));
    pipe(&place.path().join("manifest.jsonl"));
    pipe(&place.path().join("rows.parquet"));
    refuse(&["memory", "--model", &at("model"), "--tokens", "8,8"], "config.json", "a pipe");
    refuse(&["stats", text(&shard), "--tokenizer", &at("tokenizer")], "tokenizer.json", "a pipe");
    refuse(&["stats", text(&shard), "--profile", &at("profile"), "--model", "x"], "", "");
    let split = ["--split", "train", "--set", &format!("index.splits={}", at("splits.yaml"))];
    refuse(&[&["stats", text(&shard)], &split[..]].concat(), "splits.yaml", "a pipe");
    for (source, found) in
        [("mds", "not a regular file"), ("manifest.jsonl", "expected"), ("rows.parquet", "expected")]
    {
        refuse(&["pack", &at(source), "--out", &at("packed")], source, found);
    }
    // Files next to shards, such as the indexes that other tools write, are not waited for either.
    for name in ["beside.json", "shard-000.tar.idx", "shard-000.tar.index", "shard-000.json"] {
        pipe(&data.directory().join(name));
    }
    // An index that is none is built again.
    let index = place.path().join("index");
    let built = ended(&["index", text(&shard), "--out", text(&index)]);
    assert_eq!(built.status, Some(0), "{built:?}");
    for file in std::fs::read_dir(&index).expect("the index is there").flatten() {
        if file.path().extension().is_some_and(|extension| extension == "arrow") {
            std::fs::remove_file(file.path()).expect("it is removed");
            pipe(&file.path());
        }
    }
    let size =
        ["--global-batch-size", "2", "--dp-size", "1", "--set", &format!("index.directory={}", text(&index))];
    let order = ended(&[&["order", text(&shard)], &size[..]].concat());
    assert_eq!(order.status, Some(0), "{order:?}");
}

#[test]
fn a_pipe_that_the_command_line_names_as_a_text_is_read() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let instance = place.path().join("instance.json");
    let case = json!({"name": "a", "n": 3, "m": 2, "c": 1, "d": [[3], [2], [1]], "tok": [5, 5, 5]});
    std::fs::write(&instance, case.to_string()).expect("it is written");
    let direct = dflop(&["balance", "--instance", text(&instance)]);
    assert_eq!(direct.status, Some(0), "{direct:?}");
    let program = env!("CARGO_BIN_EXE_dflop");
    let script = format!("{program} balance --instance <(cat {})", text(&instance));
    let piped: Run = Command::new("bash").args(["-c", &script]).output().expect("bash starts").into();
    assert_eq!(piped.status, direct.status, "{piped:?}");
    let script = format!("cat {} | {program} balance --instance /dev/stdin", text(&instance));
    let fed: Run = Command::new("bash").args(["-c", &script]).output().expect("bash starts").into();
    assert_eq!(fed.status, direct.status, "{fed:?}");
}
