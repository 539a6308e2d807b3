//! `dflop describe` without a Python that can count a model, and with one.

use super::command::{command, text};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Puts a script in place of `python3`.
fn python(directory: &Path, script: &str) {
    let file = directory.join("python3");
    std::fs::write(&file, format!("#!/bin/sh\n{script}\n")).expect("it is written");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).expect("it is a program");
}

fn described(path: &Path, args: &[&str]) -> (Option<i32>, String, String) {
    let run = command(&[&["describe"], args].concat()).env("PATH", path).output().expect("it starts");
    let [out, err] = [run.stdout, run.stderr].map(|bytes| String::from_utf8(bytes).expect("UTF-8"));
    (run.status.code(), out, err)
}

#[test]
fn what_is_missing_is_named_with_its_installation() {
    let directory = tempfile::tempdir().expect("a directory");
    let install = "pip install dflop torch transformers";
    let (status, out, err) = described(directory.path(), &["checkpoint/"]);
    assert_eq!((status, out.as_str()), (Some(1), ""));
    assert!(err.contains("`dflop describe` needs python3 with") && err.contains(install), "{err}");
    python(directory.path(), "echo \"ModuleNotFoundError: No module named 'dflop'\" >&2; exit 1");
    let (status, _, err) = described(directory.path(), &["checkpoint/"]);
    assert_eq!(status, Some(1));
    assert!(err.contains(install) && err.contains("No module named 'dflop'"), "{err}");
}

#[test]
fn python_counts_the_model_of_the_checkpoint() {
    let directory = tempfile::tempdir().expect("a directory");
    let arguments = directory.path().join("arguments");
    let script = format!("[ \"$1\" = -c ] && exit 0\necho \"$@\" > '{}'\necho described", text(&arguments));
    python(directory.path(), &script);
    let (status, out, err) =
        described(directory.path(), &["kite/", "-o", "kite.json", "--trust-remote-code"]);
    assert_eq!((status, out.as_str(), err.as_str()), (Some(0), "described\n", ""));
    let passed = std::fs::read_to_string(&arguments).expect("it ran");
    assert_eq!(passed, "-m dflop describe --out kite.json --trust-remote-code -- kite/\n");
    python(directory.path(), "[ \"$1\" = -c ] && exit 0\necho 'ModelError: no' >&2; exit 1");
    let (status, _, err) = described(directory.path(), &["kite/"]);
    assert_eq!(status, Some(1));
    assert!(err.contains("ModelError: no") && err.contains("was not written"), "{err}");
}
