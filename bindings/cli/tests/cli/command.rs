//! Runs the command as a user does.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// Exit status and output from a run.
#[derive(Debug)]
pub(crate) struct Run {
    /// Exit status; `None` if a signal ended it.
    pub(crate) status: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Returns the command, not yet started.
pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dflop"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs the command until it ends.
pub(crate) fn dflop(args: &[&str]) -> Run {
    command(args).output().expect("the command starts").into()
}

/// Runs a command that must fail with this status and a message that contains `mentioned`.
pub(crate) fn refuse(args: &[&str], status: i32, mentioned: &str) {
    let run = dflop(args);
    assert_eq!(run.status, Some(status), "{args:?}: {}", run.stderr);
    assert_eq!(run.stdout, "", "{args:?}");
    assert!(run.stderr.contains(mentioned), "{args:?}: {}", run.stderr);
    assert!(!run.stderr.contains("panicked"), "{args:?}: {}", run.stderr);
}

/// Runs the command with these bytes on standard input.
pub(crate) fn dflop_fed(args: &[&str], input: &[u8]) -> Run {
    let mut child = command(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut stdin = child.stdin.take().expect("standard input is piped");
    std::thread::scope(|scope| {
        // Writing fails if the command stops reading, which is not an error of the test.
        scope.spawn(move || drop(stdin.write_all(input)));
        child.wait_with_output().expect("the command ends").into()
    })
}

/// Runs a command that must succeed and prints a JSON object.
pub(crate) fn object(args: &[&str]) -> Value {
    let mut lines = objects(args);
    assert_eq!(lines.len(), 1, "{args:?} prints one object");
    lines.remove(0)
}

/// Runs a command that must succeed, silent on standard error, and prints JSON objects, one per line.
pub(crate) fn objects(args: &[&str]) -> Vec<Value> {
    let run = dflop(args);
    assert_eq!((run.status, run.stderr.as_str()), (Some(0), ""), "{args:?}");
    run.objects()
}

impl Run {
    /// Standard output as JSON objects, one per line.
    pub(crate) fn objects(&self) -> Vec<Value> {
        self.stdout.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect()
    }
}

impl From<Output> for Run {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("output is UTF-8");
        Self { status: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

/// Returns a path as an argument.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

/// Removes the fields that depend on the clock or the machine.
pub(crate) fn without_measurements(mut value: Value) -> Value {
    let is_measured = |name: &str| {
        name == "seconds"
            || name.ends_with("_seconds")
            || name.ends_with("_ms")
            || name.ends_with("_rss_bytes")
    };
    if let Value::Object(fields) = &mut value {
        fields.retain(|name, _| !is_measured(name));
    }
    value
}
