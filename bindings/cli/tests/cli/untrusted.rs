//! Tests that names that were read start nothing, and that no output holds credentials.

use std::path::Path;

use dflop_tests::dataset::{Compression, TempDataset};
use dflop_tests::fault_server::{Behavior, FaultServer};
use dflop_tests::tar::TarBytes;
use serde_json::json;

use crate::command::{Run, command, dflop, text};

/// Writes a shard list and returns the list path.
fn shard_list(directory: &Path, urls: &[&str]) -> String {
    let path = directory.join("list.json");
    let shards: Vec<_> = urls.iter().map(|url| json!({"url": url})).collect();
    let list = json!({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shards});
    std::fs::write(&path, list.to_string()).expect("the list is written");
    text(&path).to_owned()
}

fn refuse(args: &[&str], mentioned: &str) {
    let run = dflop(args);
    assert!(matches!(run.status, Some(1 | 2)), "{args:?}: {run:?}");
    assert!(run.stderr.contains(mentioned), "{args:?}: {}", run.stderr);
}

#[test]
fn a_shard_list_never_runs_a_command() {
    let data = TempDataset::new(1, 4, Compression::Plain);
    let made = data.directory().join("MADE");
    let command = format!("pipe:touch {}; cat {}", text(&made), text(&data.shard(0)));
    let list = shard_list(data.directory(), &[&command]);
    for reader in [&["list"][..], &["stream", "--decode", "raw"], &["index"], &["stats"]] {
        let (name, options) = reader.split_first().expect("a command");
        refuse(&[&[*name, &list], options].concat(), "may name only files and URLs");
        refuse(
            &[&[*name, &list, "--set", "store.allow=outside"], options].concat(),
            "may name only files and URLs",
        );
    }
    refuse(&["list", &shard_list(data.directory(), &["-"])], "may name only files and URLs");
    assert!(!made.exists());
}

#[test]
fn a_shard_list_stays_in_its_directory_unless_allowed() {
    let data = TempDataset::new(2, 4, Compression::Plain);
    let elsewhere = tempfile::tempdir().expect("a temporary directory");
    let outside = data.shard(0);
    let server = FaultServer::serve_directory(data.directory(), Behavior::default());
    let climbing =
        format!("sub/../../{}/shard-000.tar", text(Path::new(data.directory().file_name().unwrap())));
    for url in
        [text(&outside), &format!("file://{}", text(&outside)), &climbing, &server.url("shard-000.tar")]
    {
        refuse(&["list", &shard_list(elsewhere.path(), &[url])], "outside its directory");
    }
    let allowed =
        dflop(&["list", &shard_list(elsewhere.path(), &[text(&outside)]), "--set", "store.allow=outside"]);
    assert_eq!((allowed.status, allowed.stdout.lines().count()), (Some(0), 4), "{allowed:?}");
    let inside = dflop(&["list", &shard_list(data.directory(), &["./sub/../shard-001.tar"])]);
    assert_eq!(inside.status, Some(1), "the text of a path is joined, not searched: {inside:?}");
    let inside = dflop(&["list", &shard_list(data.directory(), &["shard-001.tar"])]);
    assert_eq!(inside.status, Some(0), "{inside:?}");
}

#[test]
fn commands_run_only_when_allowed_and_files_come_first() {
    let data = TempDataset::new(1, 4, Compression::Plain);
    let place = tempfile::tempdir().expect("a temporary directory");
    let piped = format!("pipe:cat {}", text(&data.shard(0)));
    refuse(&["list", &piped], "`allow=pipe`");
    assert_eq!(dflop(&["list", &piped, "--set", "store.allow=pipe"]).status, Some(0));
    // A file that looks like a command, as `dflop list *.tar` passes it.
    for name in ["pipe:touch MADE;.tar", "a.tar::pipe:touch MADE;.tar", "${MADE}{0..1}.tar"] {
        std::fs::copy(data.shard(0), place.path().join(name)).expect("the shard is copied");
        let run = command(&["list", name, "--set", "store.allow=pipe"]).current_dir(place.path()).output();
        let run: Run = run.expect("the command starts").into();
        assert_eq!(run.status, Some(0), "{name}: {run:?}");
    }
    let run: Run = command(&["list", "."]).current_dir(place.path()).output().expect("it starts").into();
    assert_eq!(run.status, Some(0), "{run:?}");
    assert!(!place.path().join("MADE").exists());
}

#[test]
fn no_output_holds_the_credentials_of_a_url() {
    let data = TempDataset::new(2, 6, Compression::Plain);
    // A truncated shard leaves a record with the names of skipped samples.
    let bytes = std::fs::read(data.shard(1)).expect("the shard is there");
    std::fs::write(data.shard(1), &bytes[..bytes.len() * 2 / 3]).expect("the shard is cut");
    let server = FaultServer::serve_directory(data.directory(), Behavior::default());
    let secret = |name: &str| {
        format!("{}?X-Amz-Signature=CANARY", server.url(name).replacen("://", "://alice:CANARY@", 1))
    };
    let place = tempfile::tempdir().expect("a temporary directory");
    let path = |name: &str| place.path().join(name).display().to_string();
    let (both, none) = (secret("shard-{000..001}.tar"), secret("none.tar"));
    let (index, state) = (path("index"), path("state.json"));
    let runs: &[&[&str]] = &[
        &["list", &none],
        &["list", &secret("directory/")],
        &["list", &both, "--json"],
        &["stream", &none],
        &[
            "stream",
            &both,
            "--decode",
            "raw",
            "--set",
            "read.error_budget=1",
            "--state-out",
            &state,
            "--json",
        ],
        &["stream", &both, "--decode", "raw", "--set", "read.error_budget=0"],
        &["index", &both, "--out", &index, "--json"],
        &["index", &both, "--out", &index],
        &["stats", &both, "--set", &format!("index.directory={index}")],
        &[
            "order",
            &both,
            "--set",
            &format!("index.directory={index}"),
            "--global-batch-size",
            "2",
            "--dp-size",
            "1",
            "--json",
        ],
        &["order", "--mix", &format!("x={both}"), "--global-batch-size", "2", "--dp-size", "1"],
        &["index", &secret("{a,b"), "--json"],
        &["list", &both.replace("127.0.0.1", "127.0.0.1:x")],
    ];
    for args in runs {
        let run = dflop(args);
        assert!(!run.stdout.contains("CANARY") && !run.stderr.contains("CANARY"), "{args:?}: {run:?}");
    }
    assert!(Path::new(&state).exists());
    let mut files: Vec<_> = std::fs::read_dir(&index).expect("the index is there").flatten().collect();
    files.extend(std::fs::read_dir(place.path()).expect("the directory is there").flatten());
    let files: Vec<_> = files.iter().filter(|file| file.path().is_file()).collect();
    assert!(files.len() >= 2, "a state and an index");
    for file in files {
        let bytes = std::fs::read(file.path()).expect("the file is there");
        assert!(!bytes.windows(6).any(|window| window == b"CANARY"), "{}", file.path().display());
    }
}

#[test]
fn names_in_archives_cannot_steer_a_terminal() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let shard = place.path().join("a.tar");
    let tar = TarBytes::new().file("\u{1b}]0;title\u{7}\nforged\t1.txt", b"text").file("b.jpg", b"no image");
    std::fs::write(&shard, tar.finish()).expect("the shard is written");
    for reader in [
        &["list"][..],
        &["stream", "--decode", "raw"],
        &["stream", "--set", "read.error_budget=1"],
        &["stats"],
    ] {
        let (name, options) = reader.split_first().expect("a command");
        let run = dflop(&[&[*name, text(&shard)], options].concat());
        let is_steering = |text: &str| text.contains('\u{1b}') || text.contains("\nforged");
        assert!(!is_steering(&run.stdout) && !is_steering(&run.stderr), "{reader:?}: {run:?}");
    }
    assert!(dflop(&["list", text(&shard)]).stdout.contains(r"\u{1b}]0;title\u{7}\nforged\t1"));
}

#[test]
fn shards_of_a_writer_that_was_killed_are_read_with_a_warning() {
    let data = TempDataset::new(1, 4, Compression::Plain);
    let directory = text(data.directory()).to_owned();
    let whole = dflop(&["list", &directory]);
    assert_eq!((whole.status, whole.stderr.as_str()), (Some(0), ""));
    std::fs::write(data.directory().join(".shard-000001.tar.partial"), b"x").unwrap();
    let part = dflop(&["list", &directory]);
    assert_eq!((part.status, &part.stdout), (Some(0), &whole.stdout));
    assert!(
        part.stderr.contains("was killed") && part.stderr.contains("shard-000001.tar.partial"),
        "{}",
        part.stderr
    );
}
