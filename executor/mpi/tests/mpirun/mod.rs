//! Runs an example in this crate under `mpirun`.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::path::PathBuf;
use std::process::{Command, Output};

/// Returns the path to an example.
pub(crate) fn program(example: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.parent().and_then(|deps| deps.parent()).unwrap().join("examples").join(example);
    assert!(program.exists(), "{} is built by `cargo test`", program.display());
    program
}

/// Runs job ranks; allows more ranks than cores, and root, as in a container.
pub(crate) fn mpirun(example: &str, ranks: usize, arguments: &[&str]) -> Output {
    Command::new("mpirun")
        .args(["--oversubscribe", "--allow-run-as-root", "-n", &ranks.to_string()])
        .arg(program(example))
        .args(arguments)
        .output()
        .expect("`mpirun` is installed: apt install openmpi-bin")
}

/// Returns the output lines from a job without a fault.
#[track_caller]
pub(crate) fn outputs(output: &Output) -> Vec<String> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout).lines().map(str::to_owned).collect()
}
