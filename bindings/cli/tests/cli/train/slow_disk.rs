//! Tests a rank whose disk takes longer than the wait limit.

use std::path::PathBuf;
use std::process::Command;

use super::config::{Job, loss_bits};
use crate::command::{Run, text};

/// Wait limit, and the longer time that each file flush takes on rank 1, in seconds.
const LIMIT: &str = "timeout_seconds = 1.0";
/// Flushes to disk, except on rank 1, which sleeps before the first two flushes.
const SLOW_FSYNC: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int slept;
int fsync(int file) {
    static int (*original)(int);
    if (!original) original = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    const char *rank = getenv("RANK");
    if (rank && !strcmp(rank, "1") && slept++ < 2) sleep(3);
    return original(file);
}
"#;

/// Compiles the library; `None` without a C compiler.
fn slow_fsync(job: &Job) -> Option<PathBuf> {
    let (source, library) = (job.path("slow.c"), job.path("slow.so"));
    std::fs::write(&source, SLOW_FSYNC).expect("the directory can be written");
    let args = ["-shared", "-fPIC", "-o", text(&library), text(&source), "-ldl"];
    let compiled = Command::new("cc").args(args).output().ok()?;
    compiled.status.success().then_some(library)
}

#[test]
fn a_checkpoint_slower_than_the_limit_of_a_wait_ends_no_healthy_job() {
    let job = Job::with(&[
        ("timeout_seconds = 20.0", LIMIT),
        ("[correction]", "[checkpoint]\nevery = 2\n\n[correction]"),
    ]);
    let Some(library) = slow_fsync(&job) else { return };
    let plain = loss_bits(&job.lines(&[]));
    let states = job.path("states");
    let run = |args: &[&str]| -> Run {
        let mut command = job.command(&[&["--checkpoints", text(&states)], args].concat());
        command.env("LD_PRELOAD", &library).output().expect("the command starts").into()
    };
    let slow = run(&[]);
    assert_eq!((slow.status, slow.stderr.as_str()), (Some(0), ""));
    assert_eq!(loss_bits(&slow.objects()), plain);
    assert!(states.join("step-00000006/manifest.json").exists());
    let rest = run(&["--resume", "--steps", "8"]);
    assert_eq!((rest.status, rest.objects().len()), (Some(0), 2), "{}", rest.stderr);

    // A limit for busy ranks that the disk exceeds ends the job, and names the rank.
    job.rewrite(&[
        ("timeout_seconds = 20.0", "timeout_seconds = 1.0\nslow_seconds = 1.0"),
        ("[correction]", "[checkpoint]\nevery = 2\n\n[correction]"),
    ]);
    std::fs::remove_dir_all(&states).expect("the directory can be removed");
    let ended = run(&[]);
    assert_eq!(ended.status, Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("`write state`") && ended.stderr.contains("rank 1"), "{}", ended.stderr);
}
