//! Tests `dflop train --check`: one line for every finding, and nothing left on disk.

use std::collections::BTreeSet;
use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use dflop_tests::fault_server::{Behavior, FaultServer};
use rustix::process::Signal;

use super::config::Job;
use super::process::Watched;
use crate::command::{Run, command, dflop, text};

/// Environment for a rank under a launcher.
const RANK_0_OF_2: [(&str, &str); 5] = [
    ("RANK", "0"),
    ("WORLD_SIZE", "2"),
    ("LOCAL_RANK", "0"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "127.0.0.1"),
];
const TOKEN: (&str, &str) = ("DFLOP_JOB_TOKEN", "a secret of these tests");

fn check_in(job: &Job, args: &[&str], environment: &[(&str, &str)]) -> Run {
    let config = job.path("train.toml");
    let mut command = command(&[&["train", text(&config), "--check"], args].concat());
    command.env("XDG_CACHE_HOME", job.path("")).envs(environment.iter().copied());
    command.output().expect("the command starts").into()
}

/// Checks that the output has a line, and that a line that is wrong fails the command.
fn expect(run: &Run, line: &str) {
    assert!(run.stdout.lines().any(|found| found == line), "`{line}`:\n{}{}", run.stdout, run.stderr);
    let has_fault = run.stdout.lines().any(|line| line.starts_with("wrong "));
    assert_eq!(run.status, Some(i32::from(has_fault)), "{}{}", run.stdout, run.stderr);
    assert_eq!(run.stderr.contains("fault"), has_fault, "{}", run.stderr);
}

/// Wrong lines in a run.
fn faults(run: &Run) -> Vec<&str> {
    run.stdout.lines().filter(|line| line.starts_with("wrong ")).collect()
}

/// A job that reads separate shards with an existing index.
fn on_shards() -> (Job, PathBuf) {
    let job = Job::new();
    job.lines(&["--steps", "1"]);
    let generated = job.generated();
    let shards = job.path("shards");
    std::fs::create_dir(&shards).unwrap();
    for shard in std::fs::read_dir(generated.join("shards")).unwrap().filter_map(Result::ok) {
        if shard.path().is_file() {
            std::fs::copy(shard.path(), shards.join(shard.file_name())).unwrap();
        }
    }
    let toml = format!(
        "steps = 2\n[model]\ndirectory = \"{}\"\n[data]\nshards = [\"shards\"]\nglobal_batch_size = 8\n[parallel]\n\
         microbatches = 2\n[checkpoint]\ndirectory = \"run\"\n",
        generated.join("model").display()
    );
    std::fs::write(job.path("train.toml"), toml).unwrap();
    job.lines(&["--steps", "1"]);
    (job, shards)
}

fn first_shard(shards: &Path) -> PathBuf {
    let entries = std::fs::read_dir(shards).unwrap().map(|entry| entry.unwrap().path());
    let is_shard = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "tar");
    entries.filter(is_shard).min().expect("a shard")
}

/// All files below a directory.
fn files(directory: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            found.extend(files(&entry));
        }
        found.insert(entry);
    }
    found
}

#[test]
fn a_job_that_is_right_is_found_right_and_nothing_is_written() {
    let (job, _) = on_shards();
    let before = files(&job.path(""));
    let run = check_in(&job, &["--resume"], &[]);
    assert_eq!((run.status, run.stderr.as_str()), (Some(0), ""), "{}", run.stdout);
    let subjects: Vec<_> = run.stdout.lines().map(|line| line.get(..24).unwrap_or(line).trim_end()).collect();
    let expected = [
        "skipped  rendezvous",
        "ok       configuration",
        "ok       open files",
        "ok       model",
        "ok       weights",
        "ok       tokenizer",
        "ok       predictor",
        "ok       ranks",
        "ok       shards",
        "ok       index",
        "ok       plan",
        "skipped  GPUs",
        "skipped  NCCL",
        "ok       memory",
        "ok       checkpoints",
        "ok       resume",
    ];
    assert_eq!(subjects, expected, "{}", run.stdout);
    expect(&run, "ok       ranks          2, which dflop starts on this machine; no launcher");
    expect(&run, "ok       resume         goes on at step 1");
    assert_eq!(files(&job.path("")), before);
}

#[test]
fn a_job_that_generates_its_data_generates_nothing_in_a_check() {
    let job = Job::new();
    let run = check_in(&job, &[], &[]);
    expect(&run, "skipped  shards         the run generates them");
    expect(&run, "note     checkpoints    no directory: nothing is saved");
    assert_eq!(files(&job.path("")), [job.path("train.toml")].into());
}

#[test]
fn faults_of_the_configuration_are_listed_all_at_once() {
    let job = Job::with(&[("steps = 6", "steps = 0"), ("learning_rate = 2e-3", "zero_stage = 2")]);
    let run = check_in(&job, &[], &[]);
    expect(&run, "wrong    configuration  invalid `steps`: must be at least 1");
    expect(&run, "wrong    configuration  invalid `optimizer.zero_stage`: 0 and 1 are supported");
    expect(&run, "skipped  model          the configuration is wrong");
    assert_eq!(faults(&run).len(), 2, "{}", run.stdout);
    let job = Job::with(&[("learning_rate = 2e-3", "learning_rate = -1.0")]);
    expect(
        &check_in(&job, &[], &[]),
        "wrong    configuration  invalid `learning_rate`: -1 is not a finite rate of at least 0",
    );
    let job = Job::with(&[("[data]", "[data")]);
    let run = check_in(&job, &[], &[]);
    assert!(faults(&run)[0].contains("train.toml`: TOML parse error at line"), "{}", run.stdout);
    assert_eq!(run.status, Some(1));
}

#[test]
fn shards_that_cannot_be_read_are_named_one_by_one() {
    let (job, shards) = on_shards();
    let toml = std::fs::read_to_string(job.path("train.toml")).unwrap();
    let names = "\"nothing-{0..1}.tar\", \"empty.tar\", \"broken.tar\"";
    std::fs::write(job.path("train.toml"), toml.replace("\"shards\"", names)).unwrap();
    File::create(job.path("empty.tar")).unwrap();
    std::fs::write(job.path("broken.tar"), [7; 2048]).unwrap();
    let run = check_in(&job, &[], &[]);
    let advice = "restore the shard, or correct `data.shards`";
    for number in 0..2 {
        let path = job.path(&format!("nothing-{number}.tar"));
        let reason = "No such file or directory (os error 2)";
        let name = path.display();
        expect(&run, &format!("wrong    shards         could not read shard `{name}`: {reason}; {advice}"));
    }
    let empty = job.path("empty.tar");
    expect(&run, &format!("wrong    shards         shard `{}` is empty; {advice}", empty.display()));
    assert!(run.stdout.contains("broken.tar"), "{}", run.stdout);
    expect(&run, "skipped  index          a shard cannot be read");
    assert_eq!(faults(&run).len(), 4, "{}", run.stdout);
    assert!(shards.is_dir());
}

#[test]
fn shards_of_a_store_are_asked_for() {
    let (job, shards) = on_shards();
    let server = FaultServer::serve_directory(&shards, Behavior::default());
    let name = first_shard(&shards).file_name().unwrap().to_str().unwrap().to_owned();
    let toml = std::fs::read_to_string(job.path("train.toml")).unwrap();
    let with = |urls: &str| std::fs::write(job.path("train.toml"), toml.replace("\"shards\"", urls)).unwrap();
    let before = files(&job.path(""));
    let [there, absent] = [&name, "absent.tar"].map(|name| format!("\"{}\"", server.url(name)));
    with(&format!("{there}, {absent}"));
    let run = check_in(&job, &[], &[]);
    let found = faults(&run);
    assert!(
        found.len() == 1 && found[0].contains("absent.tar") && found[0].contains("404"),
        "{}",
        run.stdout
    );
    with(&there);
    let bytes = std::fs::metadata(first_shard(&shards)).unwrap().len() as f64 / 1000.0;
    let run = check_in(&job, &[], &[]);
    expect(&run, &format!("ok       shards         1 shards, {bytes:.1} kB, can be read"));
    expect(&run, "note     index          there is none; the run builds it before its first step");
    assert_eq!(files(&job.path("")), before);
}

#[test]
fn an_index_of_other_shards_is_stale() {
    let (job, shards) = on_shards();
    let later = SystemTime::now() + Duration::from_hours(1);
    File::options().write(true).open(first_shard(&shards)).unwrap().set_modified(later).unwrap();
    let index = files(&shards.join(".dflop"));
    let index = index.iter().find(|path| path.extension().is_some_and(|end| end == "arrow")).unwrap();
    let line = format!(
        "wrong    index          `{}` is stale: shards have changed since it was built; if that is meant, build it \
         again: `dflop index {} --rebuild`",
        index.display(),
        shards.display()
    );
    expect(&check_in(&job, &[], &[]), &line);
    dflop(&["index", text(&shards), "--rebuild"]);
    let line = "the run adds them";
    let run = check_in(&job, &[], &[]);
    assert!(run.stdout.contains(line) && run.status == Some(0), "{}", run.stdout);
    std::fs::remove_dir_all(shards.join(".dflop")).unwrap();
    expect(
        &check_in(&job, &[], &[]),
        "note     index          there is none; the run builds it before its first step",
    );
    assert!(!shards.join(".dflop").exists());
}

#[test]
fn too_little_memory_is_found_before_it_is_allocated() {
    let job = Job::with(&[("search_effort = 500", "search_effort = 500\nmemory_gib = 0.00001")]);
    expect(
        &check_in(&job, &[], &[]),
        "wrong    memory         rank 1 needs about 136.4 kB (state alone, as there is no index), \
         `parallel.memory_gib` allows 10.7 kB; use more stages, more microbatches or `model.recompute_layers`, or \
         allow more",
    );
}

#[test]
fn a_launcher_needs_a_token_and_as_many_ranks_as_the_job() {
    let job = Job::new();
    let run = check_in(&job, &[], &RANK_0_OF_2);
    expect(
        &run,
        "wrong    token          `DFLOP_JOB_TOKEN` is not set; set it to the same secret on all 2 ranks, such as of \
         `openssl rand -hex 32`",
    );
    expect(&run, "ok       ranks          2, started by torchrun; 2 on this machine");
    let three = [&RANK_0_OF_2[..], &[("WORLD_SIZE", "3"), TOKEN]].concat();
    expect(
        &check_in(&job, &[], &three),
        "wrong    ranks          the job has 2 ranks, torchrun started 3; start 2 ranks, or change stages, dp and tp \
         in `parallel`",
    );
    expect(
        &check_in(&job, &["--local-ranks", "5"], &[]),
        "wrong    ranks          the job has 2 ranks, `--local-ranks` is 5; change stages, dp and tp in `parallel`",
    );
    let without_size = [("RANK", "0")];
    expect(
        &check_in(&job, &[], &without_size),
        "wrong    launcher       environment variable `WORLD_SIZE` of torchrun: missing",
    );
}

#[test]
fn a_port_that_is_in_use_and_a_host_that_is_unknown_are_found() {
    let job = Job::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let used = [&RANK_0_OF_2[..], &[("DFLOP_PORT", port.as_str()), TOKEN]].concat();
    let line = format!(
        "wrong    rendezvous     rank 0 cannot listen on 127.0.0.1:{port}: Address already in use (os error 98); end \
         the program that listens there, or choose another port with `DFLOP_PORT`"
    );
    expect(&check_in(&job, &[], &used), &line);
    // another rank finds that somebody listens, then that nobody does
    let other = [&used[..], &[("RANK", "1"), ("LOCAL_RANK", "1")]].concat();
    let run = check_in(&job, &[], &other);
    assert_eq!((run.status, run.stdout.as_str(), run.stderr.as_str()), (Some(0), "", ""));
    drop(listener);
    let run = check_in(&job, &[], &other);
    assert_eq!((run.status, run.stdout.as_str(), run.stderr.as_str()), (Some(0), "", ""));
    expect(
        &check_in(&job, &[], &used),
        &format!("ok       rendezvous     rank 0 can listen on 127.0.0.1:{port}"),
    );
    let open = [&used[..], &[("MASTER_ADDR", "0.0.0.0")]].concat();
    expect(
        &check_in(&job, &[], &open),
        "wrong    rendezvous     `0.0.0.0` is an unspecified address; set `MASTER_ADDR` to the name or address of the \
         machine of rank 0",
    );
}

#[test]
fn a_rank_of_another_machine_prints_its_own_faults_alone() {
    let (job, shards) = on_shards();
    std::fs::write(first_shard(&shards), "").unwrap();
    let rank = [&RANK_0_OF_2[..], &[("RANK", "1"), ("LOCAL_WORLD_SIZE", "1"), TOKEN]].concat();
    let run = check_in(&job, &[], &rank);
    let name = first_shard(&shards).display().to_string();
    let fault = format!("shard `{name}` is empty; restore the shard, or correct `data.shards`");
    assert_eq!(run.stdout, format!("wrong    shards         rank 1: {fault}\n"));
    assert_eq!(run.stderr, "dflop: the check of rank 1 found 1 fault\n");
    let report = check_in(&job, &["--json"], &rank).objects().remove(0);
    assert_eq!((&report["rank"], &report["wrong"]), (&1.into(), &1.into()));
    assert_eq!(report["checks"][0]["advice"], "restore the shard, or correct `data.shards`");
}

#[test]
fn a_directory_of_checkpoints_that_cannot_be_used_is_named() {
    let job = Job::new();
    std::fs::write(job.path("file"), "").unwrap();
    let states = job.path("file/states");
    let line = format!(
        "wrong    checkpoints    `{}` cannot be written: `{}` is no directory; choose another directory, or change its \
         permissions",
        states.display(),
        job.path("file").display()
    );
    expect(&check_in(&job, &["--checkpoints", text(&states)], &[]), &line);
    let states = job.path("states");
    job.lines(&["--steps", "2", "--checkpoints", text(&states)]);
    let step = states.join("step-00000002");
    let args = ["--checkpoints", text(&states), "--resume", "--seed", "5"];
    let line = format!(
        "wrong    resume         `{}`: it has seed 0, the configuration 5; use the settings of the run that saved it, \
         or start anew without `--resume`",
        step.display()
    );
    expect(&check_in(&job, &args, &[]), &line);
    let line = format!(
        "note     resume         `{}` has a state of step 2; without `--resume` it is moved aside",
        states.display()
    );
    expect(&check_in(&job, &args[..2], &[]), &line);
}

#[test]
fn a_directory_of_a_running_job_is_in_use() {
    let job = Job::with(&[("steps = 6", "steps = 1000000")]);
    let states = job.path("states");
    let args = ["--checkpoints", text(&states), "--stages", "1"];
    let mut running = Watched::start(&job, &args);
    running.wait_for(1);
    let run = check_in(&job, &args[..2], &[]);
    let start = format!("wrong    checkpoints    `{}` is in use by process ", states.display());
    let end = "; end that job, or choose another directory";
    let is_found = |line: &&str| line.starts_with(&start) && line.ends_with(end);
    assert_eq!(faults(&run).into_iter().filter(is_found).count(), 1, "{}", run.stdout);
    running.signal(Signal::TERM);
    assert_eq!(running.end().0.status, Some(143));
}
