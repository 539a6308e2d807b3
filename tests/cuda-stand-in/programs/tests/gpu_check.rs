//! Runs the script `run.sh` from start to end on the CUDA stand-ins.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Table rows.
const PARTS: [&str; 24] = [
    "device",
    "operations",
    "memcheck",
    "bandwidth",
    "gemm",
    "gemm PyTorch",
    "gemm beside PyTorch",
    "attention",
    "attention PyTorch",
    "attention cuDNN",
    "attention beside PyTorch",
    "parity",
    "parity PyTorch",
    "curve",
    "curve PyTorch",
    "curve beside PyTorch",
    "throughput",
    "throughput cuDNN",
    "throughput PyTorch",
    "throughput beside PyTorch",
    "profile",
    "nccl",
    "machines",
    "dflop.torch",
];

/// Result of a script run.
struct Run {
    status: i32,
    /// Name and status in every table row.
    rows: Vec<(String, String)>,
    /// Everything that was printed.
    output: String,
    results: String,
}

impl Run {
    fn part_status(&self, part: &str) -> &str {
        self.rows.iter().find(|(name, _)| name == part).map_or("missing", |(_, status)| status)
    }
}

/// Runs the script; `None` if there is no compiler for the stand-ins.
fn run(variables: &[(&str, &str)]) -> Option<Run> {
    let libraries = dflop_cuda_stand_in::library_dir()?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../benches/gpu/run.sh");
    let out = tempfile::tempdir().expect("the temporary directory is writable");
    // kernels stay from run to run of this test
    let kernels = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("kernels");
    let output = Command::new("bash")
        .arg(&script)
        .arg(env!("CARGO_BIN_EXE_gpu-check"))
        .env("RUN_ON", "stand-in")
        .env("STAND_IN", &libraries)
        .env("OUT", out.path())
        .env("XDG_CACHE_HOME", kernels)
        .envs(variables.iter().copied())
        .output()
        .expect("bash starts");
    let output_text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let table = std::fs::read_to_string(out.path().join("table.txt")).unwrap_or_default();
    let row = |line: &str| {
        let part = PARTS.iter().filter(|part| line.starts_with(**part)).max_by_key(|part| part.len())?;
        Some(((*part).to_owned(), line[part.len()..].split_whitespace().next()?.to_owned()))
    };
    Some(Run {
        status: output.status.code().unwrap_or(-1),
        rows: table.lines().filter_map(row).collect(),
        output: output_text.into_owned(),
        results: std::fs::read_to_string(out.path().join("results.jsonl")).unwrap_or_default(),
    })
}

#[test]
fn the_script_runs_from_start_to_end() {
    let Some(run) = run(&[]) else { return };
    assert_eq!(run.status, 0, "{}", run.output);
    for part in PARTS {
        let optional = ["memcheck", "attention cuDNN", "throughput cuDNN", "dflop.torch"];
        let is_optional = optional.contains(&part) || part.contains("PyTorch");
        let status = run.part_status(part);
        assert!(status == "passed" || is_optional && status == "skipped", "{part}: {status}\n{}", run.output);
    }
    assert_eq!(run.rows.len(), PARTS.len(), "{}", run.output);
    for part in PARTS.iter().filter(|part| run.part_status(part) == "passed") {
        let summary = format!("\"part\":\"{part}\",\"summary\":\"passed\"");
        assert!(run.results.contains(&summary), "{part} has no summary in the results");
    }
}

#[test]
fn a_run_without_time_left_fails_with_the_whole_table() {
    let Some(run) = run(&[("SECONDS_MAX", "4")]) else { return };
    assert_eq!(run.status, 1, "{}", run.output);
    assert_eq!(run.rows.len(), PARTS.len(), "{}", run.output);
    assert_eq!((run.part_status("device"), run.part_status("profile")), ("failed", "not"), "{}", run.output);
}

#[test]
fn a_part_that_fails_fails_the_run_and_the_others_still_run() {
    // `add` is a kernel in operations and in models
    let Some(run) = run(&[("CUDA_STAND_IN_FAIL_LAUNCH", "add:1")]) else { return };
    assert_eq!(run.status, 1, "{}", run.output);
    assert_eq!(run.rows.len(), PARTS.len(), "{}", run.output);
    assert_eq!(run.part_status("operations"), "failed", "{}", run.output);
    for part in ["device", "bandwidth", "gemm", "attention"] {
        assert_eq!(run.part_status(part), "passed", "{}", run.output);
    }
    assert!(run.rows.iter().all(|(_, status)| status != "not"), "{}", run.output);
}
