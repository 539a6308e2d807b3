//! Holds the account of waits: every call that may block is in the tables in `docs/reliability.md`, and local
//! files are opened where no pipe is waited for.

use super::source::{files, root, shown, stripped_code};

/// Directories whose code runs for users.
const SOURCES: [&str; 13] = [
    "balancer/src",
    "balancer/planner/src",
    "costmodel/src",
    "loader/src",
    "loader/import/src",
    "loader/samples/src",
    "loader/processors/src",
    "executor/src",
    "executor/comm/src",
    "executor/device/src",
    "executor/models/src",
    "executor/cuda/src",
    "bindings",
];

/// Calls that wait for a thread, a process, a peer, a file lock, or time.
const BLOCKING: [&str; 20] = [
    ".join()",
    ".recv()",
    ".recv_timeout(",
    ".blocking_recv()",
    ".blocking_send(",
    ".wait(",
    ".wait_timeout(",
    ".wait_while(",
    ".wait_timeout_while(",
    ".wait_with_output()",
    ".accept()",
    ".incoming()",
    "park()",
    "park_timeout(",
    "lock_patiently(",
    "flock(",
    "TcpStream::connect",
    "UnixStream::connect",
    "thread::sleep(",
    "block_on(",
];

/// Calls that wait for the writer if the path is a pipe.
const OPENING: [&str; 4] = ["File::open(", "fs::read(", "fs::read_to_string(", "File::options().read(true)"];

/// Path parts that mark test-only code.
const TESTS: [&str; 8] = [
    "/tests/",
    "/tests.rs",
    "/examples/",
    "interleavings",
    "/conformance/",
    "/launch_order/",
    "large_jobs.rs",
    "rank_resources.rs",
];

/// Files that open what cannot be a pipe of others, and what they open.
const OPENERS: [(&str, &str); 18] = [
    ("loader/samples/src/file.rs", "the place where all others are opened"),
    ("executor/models/src/parameters/weights/checkpoint.rs", "the same for weights"),
    ("loader/src/store/local.rs", "/proc"),
    ("loader/src/files/mod.rs", "a directory, to sync it"),
    ("loader/src/store/cache/directory.rs", "files of the cache, whose directory is of this user"),
    ("loader/src/write/destination.rs", "a directory, to sync it"),
    ("executor/src/profile/measure.rs", "/proc"),
    ("executor/src/train/correction_record.rs", "a record that the command line names"),
    ("executor/src/checkpoint/mod.rs", "a directory, to sync it"),
    (
        "executor/models/src/parameters/weights/tensor_shard.rs",
        "files that it has written, and a directory, to sync them",
    ),
    ("executor/device/src/cpu/mod.rs", "/proc"),
    ("executor/cuda/src/cudnn/cache.rs", "a cache of this user"),
    ("executor/cuda/src/compiler/mod.rs", "a cache of this user"),
    ("bindings/cli/src/report/mod.rs", "/proc"),
    ("executor/src/step_record/mod.rs", "the record that the command line names"),
    ("bindings/cli/src/commands/stream/mod.rs", "/proc"),
    ("executor/src/run/", "/proc, and files that the run has written"),
    ("bindings/cli/src/commands/train/report.rs", "files that the run has written"),
];

/// Returns the code in all files, without tests, by path.
fn sources() -> Vec<(String, String)> {
    let mut sources = Vec::new();
    for path in SOURCES.iter().flat_map(|directory| files(directory, "rs")) {
        let name = shown(&path);
        let is_test = TESTS.iter().any(|part| name.contains(part));
        if !is_test {
            let text = std::fs::read_to_string(&path).unwrap();
            let code = stripped_code(text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default());
            sources.push((name, code));
        }
    }
    assert!(sources.len() > 300, "the tree was found");
    sources
}

/// Returns the paths in backticks in the wait tables.
fn places() -> Vec<String> {
    let page = std::fs::read_to_string(root().join("docs/reliability.md")).unwrap();
    let section = page.split("\n## ").find(|section| section.starts_with("Waits\n")).expect("the section");
    let is_place = |text: &&str| SOURCES.iter().any(|source| text.starts_with(source));
    let places: Vec<String> = section.split('`').filter(is_place).map(str::to_owned).collect();
    assert!(places.len() > 10, "the table was found");
    places
}

/// Returns whether code has a call by exactly this name.
fn has_call(code: &str, call: &str) -> bool {
    let is_whole = |(at, _): (usize, &str)| !code[..at].ends_with(|before: char| before.is_alphanumeric());
    code.match_indices(call).any(is_whole)
}

#[test]
fn every_call_that_may_wait_is_in_the_tables_of_waits() {
    let places = places();
    let mut unused = places.clone();
    for (name, code) in sources() {
        let Some(call) = BLOCKING
            .iter()
            .find(|call| call.starts_with('.') && code.contains(*call) || has_call(&code, call))
        else {
            continue;
        };
        let is_listed = places.iter().any(|place| name.starts_with(place.as_str()));
        assert!(is_listed, "`{name}` calls `{call}`: docs/reliability.md, Waits, does not tell what ends it");
        unused.retain(|place| !name.starts_with(place.as_str()));
    }
    assert!(unused.is_empty(), "docs/reliability.md, Waits, names code that does not wait: {unused:?}");
}

#[test]
fn local_files_are_opened_where_no_pipe_is_waited_for() {
    for (name, code) in sources() {
        let Some(call) = OPENING.iter().find(|call| has_call(&code, call)) else { continue };
        let is_listed = OPENERS.iter().any(|(place, _)| name.starts_with(place));
        assert!(
            is_listed,
            "`{name}` calls `{call}`; `dflop_samples::file` opens files without waiting for a pipe"
        );
    }
}
