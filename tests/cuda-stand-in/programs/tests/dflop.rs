//! `dflop train` and `dflop profile` on CUDA devices.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::command::{Run, command, text};
use crate::config::{Job, loss_bits, losses};

/// Runs a command with the CUDA libraries in a directory.
fn on(libraries: &Path, command: &mut Command) -> Run {
    command.env("DFLOP_CUDA_LIBRARY_PATH", libraries).env("LD_LIBRARY_PATH", libraries);
    command.output().expect("the command starts").into()
}

#[test]
fn a_run_on_cuda_devices_has_the_losses_of_one_on_cpus() {
    let Some(libraries) = dflop_cuda_stand_in::library_dir() else { return };
    let on_cpu = Job::with(&[]);
    let on_cuda = Job::with(&[("[parallel]\n", "[parallel]\ncompute_device = \"cuda\"\n")]);
    for stages in [&["--set", "plan.stages=1"][..], &[]] {
        let run = |job: &Job| {
            let run = on(&libraries, &mut job.command(stages));
            assert_eq!(run.status, Some(0), "{}", run.stderr);
            losses(&run.objects())
        };
        let (truth, found) = (run(&on_cpu), run(&on_cuda));
        assert!(truth.len() >= 6 && truth.len() == found.len(), "{truth:?} {found:?}");
        for (truth, found) in truth.iter().zip(&found) {
            assert!((truth - found).abs() < 1e-3 * truth, "{truth} {found}");
        }
    }
}

/// Times of a step in which a device has nothing to do.
const IDLE_PARTS: [&str; 6] = [
    "data_wait_seconds",
    "input_seconds",
    "plan_seconds",
    "result_seconds",
    "report_seconds",
    "checkpoint_seconds",
];

/// Operations that streams of the stand-in ran, in order: stream and name.
fn operations(log: &str) -> Vec<(&str, &str)> {
    let lines = log.lines().filter_map(|line| line.split_once("cuda stand-in: stream "));
    lines.filter_map(|(_, text)| text.split_once(" runs ")).collect()
}

/// Checks the work order on a device with concurrent streams. Kernels are slow here, so that the host time is
/// small, as with a large model: the log shows what waits for what.
#[test]
fn a_step_finds_its_inputs_on_the_device_and_copies_nothing_before_its_first_kernel() {
    const STEPS: usize = 6;
    let Some(libraries) = dflop_cuda_stand_in::library_dir() else { return };
    let one_rank = "placement = \"joint\"\nllm = { stages = 1 }";
    let device = "[parallel]\ncompute_device = \"cuda\"\n";
    let job = Job::with(&[("[parallel]\n", device), ("llm = { stages = 1, dp = 1 }", one_rank)]);
    let mut command = job.command(&[]);
    command.env("CUDA_STAND_IN_STREAM_THREADS", "1").env("CUDA_STAND_IN_LOG", "1");
    let run = on(&libraries, &mut command);
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    let steps = run.objects();
    assert_eq!(steps.len(), STEPS);
    let all = operations(&run.stderr);
    let is_copy = |name: &str| name.starts_with("copy up");
    let compute = all.iter().rfind(|(_, name)| name.starts_with("kernel")).expect("kernels ran").0;
    let update = all.iter().position(|(_, name)| *name == "kernel adamw").expect("weights are updated");
    let results: Vec<usize> = (update..all.len()).filter(|&place| all[place].1 == "copy down").collect();
    assert_eq!(results.len(), STEPS, "the host waits for the device once a step");
    for (step, pair) in results.windows(2).enumerate() {
        let between = &all[pair[0]..pair[1]];
        let own: Vec<&str> =
            between.iter().filter(|(stream, _)| *stream == compute).map(|own| own.1).collect();
        let first = own.iter().position(|name| name.starts_with("kernel")).expect("a step has kernels");
        let before = &own[..first];
        assert!(before.iter().all(|name| !is_copy(name)), "before step {}: {before:?}", step + 1);
        // Those of the step after the next one, whose passes are queued already.
        let beside = between.iter().filter(|(stream, name)| *stream != compute && is_copy(name)).count();
        assert_eq!(beside > 0, step + 3 < STEPS, "{beside} copies beside step {}", step + 1);
    }
    // the first steps compile and load kernels; other work on the machine delays some of the others
    let seconds = |step: &Value, name: &str| step[name].as_f64().expect("a number");
    let idle = |step: &Value| IDLE_PARTS.into_iter().map(|name| seconds(step, name)).sum::<f64>();
    let mut shares: Vec<f64> = steps[2..].iter().map(|step| idle(step) / seconds(step, "seconds")).collect();
    shares.sort_by(f64::total_cmp);
    let half = &shares[..shares.len() / 2];
    assert!(half.iter().sum::<f64>() < 0.03 * half.len() as f64, "{shares:?} {steps:?}");
}

/// A state is of the step that was reported, though the device has begun with the next one.
#[test]
fn a_state_that_is_saved_ahead_of_the_next_step_goes_on_with_the_same_bits() {
    let Some(libraries) = dflop_cuda_stand_in::library_dir() else { return };
    let device = "[checkpoint]\nevery = 2\nkept = 8\n\n[parallel]\ncompute_device = \"cuda\"\n";
    for layout in ["placement = \"joint\"\nllm = { stages = 1 }", "llm = { stages = 1, dp = 1 }"] {
        let job = Job::with(&[("[parallel]\n", device), ("llm = { stages = 1, dp = 1 }", layout)]);
        let states = job.path("states");
        let run = |args: &[&str]| {
            let args = [&["--checkpoints", text(&states)], args].concat();
            let mut command = job.command(&args);
            let run = on(&libraries, command.env("CUDA_STAND_IN_STREAM_THREADS", "1"));
            assert_eq!(run.status, Some(0), "{}", run.stderr);
            loss_bits(&run.objects())
        };
        let straight = run(&[]);
        assert_eq!(straight.len(), 6);
        for lost in [&[6][..], &[6, 4]] {
            for step in lost {
                std::fs::remove_dir_all(states.join(format!("step-{step:08}"))).expect("a state of the step");
            }
            let first = 6 - 2 * lost.len();
            assert_eq!(run(&["--resume"]), straight[first..], "after step {first}");
        }
    }
}

/// Lets ranks in separate processes share the stand-in's device.
fn connected(command: &mut Command) -> &mut Command {
    command.env("CUDA_STAND_IN_STREAM_THREADS", "1").env("CUDA_STAND_IN_NCCL_SHARES_DEVICES", "1");
    command.env("CUDA_STAND_IN_NCCL_VERSION", "23007")
}

const OVER_NCCL: &str = "[parallel]\ncompute_device = \"cuda\"\ntransport = \"nccl\"\n";

#[test]
fn a_run_over_nccl_has_the_losses_of_one_through_the_host() {
    let Some(libraries) = dflop_cuda_stand_in::library_dir() else { return };
    let through_host = Job::with(&[("[parallel]\n", "[parallel]\ncompute_device = \"cuda\"\n")]);
    let over_nccl = Job::with(&[("[parallel]\n", OVER_NCCL)]);
    let run = |job: &Job| {
        let run = on(&libraries, connected(&mut job.command(&[])));
        assert_eq!(run.status, Some(0), "{}", run.stderr);
        losses(&run.objects())
    };
    let (truth, found) = (run(&through_host), run(&over_nccl));
    assert!(truth.len() >= 6 && truth.len() == found.len(), "{truth:?} {found:?}");
    for (truth, found) in truth.iter().zip(&found) {
        assert!((truth - found).abs() < 1e-6 * truth, "{truth} {found}");
    }
}

/// Seconds of a start by part, after a check that they are the whole.
fn start_parts(start: &Value) -> BTreeMap<&str, f64> {
    let parts = start["parts"].as_array().expect("the first line of a run has its start").iter();
    let part = |part: &'_ Value| part["seconds"].as_f64().expect("a number");
    let parts: BTreeMap<&str, f64> =
        parts.map(|own| (own["part"].as_str().expect("a name"), part(own))).collect();
    let (sum, whole) = (parts.values().sum::<f64>(), start["seconds"].as_f64().expect("a number"));
    assert!((sum - whole).abs() < 1e-6, "{sum} is not {whole}: {start}");
    parts
}

#[test]
fn a_second_start_finds_its_kernels_compiled() {
    let Some(libraries) = dflop_cuda_stand_in::library_dir() else { return };
    let one_rank = "placement = \"joint\"\nllm = { stages = 1 }";
    for (parallel, layout) in
        [("[parallel]\ncompute_device = \"cuda\"\n", one_rank), (OVER_NCCL, "llm = { dp = 1 }")]
    {
        let is_over_nccl = parallel == OVER_NCCL;
        let job = Job::with(&[("[parallel]\n", parallel), ("llm = { stages = 1, dp = 1 }", layout)]);
        let start = || {
            let run = on(&libraries, connected(&mut job.command(&["--steps", "1"])));
            assert_eq!(run.status, Some(0), "{}", run.stderr);
            run.objects()[0]["start"].clone()
        };
        let (first, second) = (start(), start());
        let modules = |start: &Value, name: &str| start[name].as_u64().expect("a number");
        assert!(modules(&first, "kernel_modules") > 10, "{first}");
        assert_eq!(modules(&first, "kernel_modules"), modules(&second, "kernel_modules"));
        // the other rank may have compiled some of them
        assert!(modules(&first, "compiled_modules") > 0, "{first}");
        assert_eq!(modules(&second, "compiled_modules"), 0, "{second}");
        let (first, second) = (start_parts(&first), start_parts(&second));
        assert!(second["kernels"] < first["kernels"], "{first:?} {second:?}");
        for parts in [&first, &second] {
            let needed = ["files", "index", "device", "peak", "kernels", "weights", "inputs", "first_step"];
            let missing: Vec<_> = needed.into_iter().filter(|name| parts[*name] <= 0.0).collect();
            assert!(missing.is_empty(), "{missing:?} of {parts:?}");
            // a part of tens of microseconds connects no devices
            assert_eq!(parts["communicators"] > 1e-3, is_over_nccl, "{parts:?}");
            assert_eq!(parts["launch"] > 0.0, is_over_nccl, "{parts:?}");
        }
    }
}

#[test]
fn a_rank_that_fails_over_nccl_ends_the_command_with_the_cause() {
    let Some(libraries) = dflop_cuda_stand_in::library_dir() else { return };
    let job = Job::with(&[("[parallel]\n", OVER_NCCL)]);
    let mut command = job.command(&[]);
    // the second receive operation on a lane fails in the system
    let run = on(&libraries, connected(&mut command).env("CUDA_STAND_IN_NCCL_FAULTS", "error:1:2:2"));
    assert_eq!(run.status, Some(1), "{}", run.stderr);
    assert!(run.stderr.contains("NCCL failed") || run.stderr.contains("nccl"), "{}", run.stderr);
}

#[test]
fn a_check_looks_for_nccl() {
    let Some(libraries) = dflop_cuda_stand_in::library_dir() else { return };
    let job = Job::with(&[("[parallel]\n", OVER_NCCL)]);
    let check = |command: &mut Command| {
        let run = on(&libraries, command);
        let report = run.objects().remove(0);
        let checks = report["checks"].as_array().expect("checks").clone();
        let found = checks.into_iter().find(|check| check["subject"] == "NCCL").unwrap_or_default();
        (found["status"].to_string(), found["finding"].to_string())
    };
    let (status, finding) = check(connected(&mut job.command(&["--check"])));
    assert!(status == "\"ok\"" && finding.contains("libnccl.so.2"), "{status} {finding}");
    let (status, finding) = check(job.command(&["--check"]).env("CUDA_STAND_IN_DEVICES", "2"));
    assert!(status == "\"ok\"", "{status} {finding}");
    // this version lets no two ranks share the only device
    let (status, finding) = check(&mut job.command(&["--check"]));
    assert!(status == "\"wrong\"" && finding.contains("share 1 devices"), "{status} {finding}");
}

#[test]
fn a_missing_library_is_named_by_the_command() {
    let empty = tempfile::tempdir().expect("a temporary directory");
    let job = Job::with(&[("[parallel]\n", "[parallel]\ncompute_device = \"cuda:0\"\n")]);
    let run = on(empty.path(), &mut job.command(&["--set", "plan.stages=1"]));
    // a machine with a driver computes
    if run.status != Some(0) {
        assert_eq!(run.status, Some(1), "{}", run.stderr);
        assert!(run.stderr.contains("libcuda.so.1"), "{}", run.stderr);
    }
}

#[test]
fn a_check_names_the_libraries_and_the_devices() {
    let Some(libraries) = dflop_cuda_stand_in::library_dir() else { return };
    let check = |device: &str, libraries: &Path| {
        let settings = format!("[parallel]\ncompute_device = \"{device}\"\n");
        let run = on(libraries, &mut Job::with(&[("[parallel]\n", &settings)]).command(&["--check"]));
        let report = run.objects().remove(0);
        let checks = report["checks"].as_array().expect("checks").clone();
        let of = |subject: &str| checks.iter().find(|check| check["subject"] == subject).cloned();
        (run.status, of("CUDA libraries").unwrap_or_default(), of("GPUs").unwrap_or_default())
    };
    let (status, found, devices) = check("cuda", &libraries);
    assert_eq!(status, Some(0), "{found} {devices}");
    let directory = libraries.display().to_string();
    assert!(found["finding"].as_str().is_some_and(|text| text.contains(&directory)), "{found}");
    assert!(devices["finding"].as_str().is_some_and(|text| text.contains("for 2 ranks")), "{devices}");
    let (status, _, devices) = check("cuda:99", &libraries);
    assert_eq!((status, &devices["status"]), (Some(1), &"wrong".into()), "{devices}");
}

#[test]
fn cudnn_that_is_asked_for_and_missing_is_named() {
    let Some(libraries) = dflop_cuda_stand_in::library_dir() else { return };
    let settings = "[parallel]\ncompute_device = \"cuda\"\nattention = \"fastest\"\n";
    let run =
        on(&libraries, &mut Job::with(&[("[parallel]\n", settings)]).command(&["--set", "plan.stages=1"]));
    assert_eq!((run.status, run.stdout.as_str()), (Some(1), ""), "{}", run.stderr);
    assert!(run.stderr.contains("libcudnn.so.9"), "{}", run.stderr);
}

#[test]
fn the_script_of_profiles_runs_from_start_to_end() {
    let Some(libraries) = dflop_cuda_stand_in::library_dir() else { return };
    let directory = tempfile::tempdir().expect("a temporary directory");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../benches/gpu/profile.sh");
    let mut command = Command::new("bash");
    command.arg(script).arg(env!("CARGO_BIN_EXE_dflop")).env("RUN_ON", "stand-in");
    command.env("OUT", directory.path()).env("XDG_CACHE_HOME", directory.path().join("cache"));
    let run = on(&libraries, command.env("SECONDS_MAX", "300"));
    assert_eq!(run.status, Some(0), "{}{}", run.stdout, run.stderr);
    assert!(directory.path().join("tiny.csv").is_file(), "{}", run.stdout);
}

#[test]
fn a_profile_names_the_device_and_its_clock() {
    let Some(libraries) = dflop_cuda_stand_in::library_dir() else { return };
    let directory = tempfile::tempdir().expect("a temporary directory");
    let out = directory.path().display().to_string();
    let args = ["profile", "--model", "tiny", "--device", "cuda:0", "--layers", "1", "--json"];
    let rest = ["--tokens-max", "64", "--seconds-max", "1", "--out", &out];
    let mut command = command(&[&args[..], &rest].concat());
    let run = on(&libraries, command.env("XDG_CACHE_HOME", directory.path().join("cache")));
    assert_eq!(run.status, Some(0), "{}", run.stderr);
    let profile = &run.objects()[0];
    assert!(profile["device"].as_str().is_some_and(|name| name.contains("stand-in")), "{profile}");
    assert_eq!((&profile["clock"], profile.get("threads")), (&"time of the device".into(), None));
    let text = std::fs::read_to_string(directory.path().join("tiny.csv")).expect("a profile");
    assert!(text.contains("bfloat16"), "{text}");
}
