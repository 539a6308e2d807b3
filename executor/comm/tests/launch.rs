//! Jobs with real processes: they print, die, hang and are interrupted.
//!
//! This test binary is also the rank program: [`rank_process`] reads the task from the environment.

#![allow(clippy::print_stdout, reason = "what a rank prints is tested")]

use super::support::{floats, ring_sum};
use dflop_comm::launch::{JobOutcome, Launcher, StopSignals, end_with_launcher, identity_from_environment};
use dflop_comm::{Comm, Communicator, EXIT_SECONDARY, Result, Settings, StepContext, tcp};
use rustix::process::{Pid, Signal, getpid, kill_process, test_kill_process};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Handlers in a rank that stops in order.
static SIGNALS: OnceLock<StopSignals> = OnceLock::new();

const WHAT: &str = "EXECUTOR_TEST_RANK";
const DIRECTORY: &str = "EXECUTOR_TEST_DIRECTORY";

/// Arguments with which this binary runs an ignored test as a plain process.
const RANK_ARGS: [&str; 5] = ["--exact", "launch::rank_process", "--ignored", "--nocapture", "--quiet"];
const LAUNCHER_ARGS: [&str; 5] =
    ["--exact", "launch::launcher_process", "--ignored", "--nocapture", "--quiet"];

fn launcher(what: &str, ranks: usize, directory: &Path) -> Launcher {
    let program = std::env::current_exe().unwrap();
    Launcher::new(program, ranks)
        .unwrap()
        .args(RANK_ARGS)
        .variable(WHAT, what)
        .variable(DIRECTORY, directory)
        .grace(Duration::from_millis(500))
}

/// Returns a test directory, removed when the test ends.
fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn said(directory: &Path, rank: usize) -> String {
    std::fs::read_to_string(directory.join(format!("rank-{rank}"))).unwrap_or_default()
}

/// Runs a job and measures the duration.
fn outcome(what: &str, ranks: usize) -> (JobOutcome, TempDir, Duration) {
    let (directory, begin) = (directory(), Instant::now());
    let outcome = launcher(what, ranks, directory.path()).run().unwrap();
    (outcome, directory, begin.elapsed())
}

/// Not a test: a rank in the jobs that the tests below start.
#[test]
#[ignore = "a process of the other tests"]
fn rank_process() {
    let (Ok(what), Ok(directory)) = (std::env::var(WHAT), std::env::var(DIRECTORY)) else { return };
    end_with_launcher().unwrap();
    let identity = identity_from_environment().unwrap();
    let file = Path::new(&directory).join(format!("rank-{}", identity.rank));
    std::fs::write(file.with_extension("pid"), std::process::id().to_string()).unwrap();
    let settings = Settings::default().wait(Duration::from_secs(2)).rendezvous(Duration::from_secs(20));
    let ended = tcp::connect(&identity, settings).and_then(|session| run_rank(&what, &session.comm));
    if let Err(error) = ended {
        std::fs::write(file, error.to_string()).unwrap();
        std::process::exit(i32::from(error.exit_status()));
    }
    std::process::exit(0);
}

fn run_rank(what: &str, comm: &Communicator) -> Result<()> {
    let rank = comm.rank();
    for step in 0..u64::MAX {
        let at = StepContext::microbatch(step, 1, "forward");
        comm.note(at);
        let mut values = floats(rank, 1000);
        comm.all_reduce(at.action("gradients"), values.as_mut_slice().into())?;
        assert_eq!(values, ring_sum(comm.size(), 1000));
        match (what, step, rank) {
            ("prints", 3, _) => {
                println!("rank {rank} is done");
                return Ok(());
            }
            ("dies", 3, 2) => kill_process(getpid(), Signal::KILL).unwrap(),
            ("hangs", 3, 1) => kill_process(getpid(), Signal::STOP).unwrap(),
            // longer than a wait's time limit
            ("computes", 3, 1) => std::thread::sleep(Duration::from_secs(5)),
            ("computes", 5, _) => return Ok(()),
            ("fails", 3, 1) => std::process::exit(7),
            ("aborts", 3, 2) => return Err(comm.abort(at, "the loss is NaN")),
            ("digest", 3, _) => comm.check_digest(step, u64::from(rank == 3))?,
            ("runs", ..) => std::thread::sleep(Duration::from_millis(5)),
            ("stops", 0, _) => SIGNALS.set(StopSignals::register()?).expect("the first step"),
            ("stops", ..) => {
                // the ranks agree, as a signal reaches them between different messages
                let mut asked =
                    [f32::from(u8::from(SIGNALS.get().expect("registered").received().is_some()))];
                comm.all_reduce(at.action("stop"), asked.as_mut_slice().into())?;
                if asked[0] > 0.0 {
                    return Ok(());
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            _ => {}
        }
    }
    Ok(())
}

#[test]
fn ranks_of_a_job_succeed() {
    let (outcome, _, _) = outcome("prints", 3);
    assert!(outcome.is_success(), "{outcome:?}");
    assert_eq!(outcome.ranks.iter().map(|ended| ended.rank).collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn a_killed_rank_ends_all_others_and_is_named() {
    let (outcome, directory, elapsed) = outcome("dies", 4);
    let failed = outcome.failed.unwrap();
    assert_eq!((failed.rank, failed.status.signal()), (2, Some(9)), "{outcome:?}");
    // well below a wait's time limit
    assert!(elapsed < Duration::from_secs(10), "{elapsed:?}");
    for rank in [0, 1, 3] {
        let text = said(directory.path(), rank);
        assert!(text.contains("rank 2 died"), "rank {rank}: {text}");
        assert!(text.contains("step") && text.contains("microbatch 1"), "rank {rank}: {text}");
        assert_eq!(outcome.ranks[rank].status.code(), Some(i32::from(EXIT_SECONDARY)));
    }
}

#[test]
fn a_rank_that_hangs_is_named_and_killed() {
    let (outcome, directory, elapsed) = outcome("hangs", 4);
    assert!(outcome.failed.is_some(), "{outcome:?}");
    assert_eq!(outcome.ranks[1].status.signal(), Some(9), "a stopped process takes no request");
    assert!(elapsed < Duration::from_secs(15), "{elapsed:?}");
    for rank in [0, 2, 3] {
        let text = said(directory.path(), rank);
        assert!(text.contains("rank 1 does not answer"), "rank {rank}: {text}");
        assert!(text.contains("`gradients`"), "rank {rank}: {text}");
    }
}

/// In a tree with 12 ranks, ranks 1 and 2 are between the root and other ranks.
#[test]
fn a_rank_in_the_middle_of_the_tree_that_dies_or_hangs_is_named_by_all() {
    for (what, culprit, text) in [("dies", 2, "rank 2 died"), ("hangs", 1, "rank 1 does not answer")] {
        let (outcome, directory, elapsed) = outcome(what, 12);
        assert_eq!(outcome.ranks[culprit].status.signal(), Some(9), "{outcome:?}");
        assert!(elapsed < Duration::from_secs(30), "{elapsed:?}");
        for rank in (0..12).filter(|&rank| rank != culprit) {
            assert!(said(directory.path(), rank).contains(text), "{rank}: {}", said(directory.path(), rank));
        }
    }
}

#[test]
fn a_rank_that_computes_longer_than_the_limit_of_a_wait_does_not_end_the_job() {
    let (outcome, directory, elapsed) = outcome("computes", 3);
    assert!(outcome.is_success(), "{outcome:?} {}", said(directory.path(), 0));
    assert!(elapsed > Duration::from_secs(4), "{elapsed:?}");
}

#[test]
fn the_rank_that_exits_counts_as_failed() {
    let (outcome, directory, _) = outcome("fails", 3);
    let failed = outcome.failed.unwrap();
    assert_eq!((failed.rank, failed.status.code()), (1, Some(7)), "{outcome:?}");
    assert!(said(directory.path(), 0).contains("rank 1 died"), "{}", said(directory.path(), 0));
}

#[test]
fn the_rank_that_ends_the_job_counts_as_failed() {
    let (outcome, directory, _) = outcome("aborts", 4);
    let failed = outcome.failed.unwrap();
    assert_eq!((failed.rank, failed.status.code()), (2, Some(1)), "{outcome:?}");
    for rank in 0..4 {
        assert!(
            said(directory.path(), rank).contains("the loss is NaN"),
            "rank {rank}: {}",
            said(directory.path(), rank)
        );
    }
}

#[test]
fn processes_with_another_digest_end_the_job() {
    let (outcome, directory, _) = outcome("digest", 4);
    assert_eq!(outcome.failed.unwrap().rank, 3, "{outcome:?}");
    for rank in 0..4 {
        let text = said(directory.path(), rank);
        assert!(text.contains("plan digests of step 3 differ: rank 3 has"), "rank {rank}: {text}");
    }
}

#[test]
fn a_missing_program_is_named() {
    let error = Launcher::new("no-such-program", 2).unwrap().run().unwrap_err();
    assert!(error.to_string().contains("start `no-such-program` as rank 0"), "{error}");
    assert!(Launcher::new("x", 0).is_err());
}

/// Not a test: a launcher that can be interrupted.
#[test]
#[ignore = "a process of the other tests"]
fn launcher_process() {
    let (Ok(what), Ok(directory)) = (std::env::var(WHAT), std::env::var(DIRECTORY)) else { return };
    let outcome = launcher(&what, 3, Path::new(&directory)).run().unwrap();
    std::fs::write(Path::new(&directory).join("outcome"), format!("{:?}", outcome.interrupted)).unwrap();
    std::process::exit(i32::from(!outcome.is_success()));
}

/// Starts a launcher in a separate process.
fn launcher_command(what: &str, directory: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(LAUNCHER_ARGS).env(WHAT, what).env(DIRECTORY, directory);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn lines_of_ranks_are_prefixed_with_the_rank() {
    let directory = directory();
    let output = launcher_command("prints", directory.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    for rank in 0..3 {
        let line = format!("[{rank}] rank {rank} is done");
        assert!(text.lines().any(|found| found == line), "{text}");
    }
    assert!(output.status.success());
}

/// Waits until three ranks run.
fn running_ranks(directory: &Path) -> Vec<Pid> {
    let pid_of = |rank: usize| -> Option<Pid> {
        let text = std::fs::read_to_string(directory.join(format!("rank-{rank}.pid"))).ok()?;
        Pid::from_raw(text.parse().ok()?)
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let ranks: Option<Vec<Pid>> = (0..3).map(pid_of).collect();
        if let Some(ranks) = ranks {
            assert!(ranks.iter().all(|&rank| test_kill_process(rank).is_ok()), "all ranks run");
            return ranks;
        }
        assert!(Instant::now() < deadline, "the ranks start");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns whether the process runs and is not merely waiting for the parent to reap it.
#[cfg(target_os = "linux")]
fn is_running(rank: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", rank.as_raw_pid())).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
}

#[test]
#[cfg(target_os = "linux")]
fn ranks_do_not_outlive_a_killed_launcher() {
    let directory = directory();
    let mut child = launcher_command("runs", directory.path()).spawn().unwrap();
    let ranks = running_ranks(directory.path());
    child.kill().unwrap();
    child.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while ranks.iter().any(|&rank| is_running(rank)) {
        assert!(Instant::now() < deadline, "the ranks end");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Finds two adjacent ports: a used port, like `MASTER_PORT` in torchrun, and a free port.
fn taken_and_free() -> (TcpListener, u16) {
    loop {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let next = taken.local_addr().unwrap().port().checked_add(1);
        if let Some(next) = next.filter(|&next| TcpListener::bind((Ipv4Addr::LOCALHOST, next)).is_ok()) {
            return (taken, next - 1);
        }
    }
}

#[test]
fn processes_of_torchrun_find_each_other_next_to_its_own_store() {
    let (_store, port) = taken_and_free();
    let directory = directory();
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(RANK_ARGS).env(WHAT, "prints").env(DIRECTORY, directory.path());
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string()).env("WORLD_SIZE", "2");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.env("DFLOP_JOB_TOKEN", "token of this test").stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    for child in [0, 1].map(start) {
        let output = child.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{errors} {} {}",
            said(directory.path(), 0),
            said(directory.path(), 1)
        );
        assert!(String::from_utf8_lossy(&output.stdout).contains("is done"));
    }
}

#[test]
fn an_interrupt_ends_all_ranks() {
    for signal in [Signal::INT, Signal::TERM] {
        let directory = directory();
        let mut child = launcher_command("runs", directory.path()).spawn().unwrap();
        let ranks = running_ranks(directory.path());
        kill_process(Pid::from_child(&child), signal).unwrap();
        let begin = Instant::now();
        assert_eq!(child.wait().unwrap().code(), Some(1));
        assert!(begin.elapsed() < Duration::from_secs(10));
        assert!(ranks.iter().all(|&rank| test_kill_process(rank).is_err()), "no rank outlives the launcher");
        let outcome = std::fs::read_to_string(directory.path().join("outcome")).unwrap();
        assert_eq!(outcome, format!("Some({})", signal.as_raw()));
    }
}

#[test]
fn ranks_that_stop_in_order_take_their_time_and_succeed() {
    let directory = directory();
    let mut child = launcher_command("stops", directory.path()).spawn().unwrap();
    running_ranks(directory.path());
    // the handlers are registered in the first step
    std::thread::sleep(Duration::from_millis(500));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1), "the launcher of this test reports the interruption");
    let outcome = std::fs::read_to_string(directory.path().join("outcome")).unwrap();
    assert_eq!(outcome, format!("Some({})", Signal::TERM.as_raw()));
    assert!((0..3).all(|rank| said(directory.path(), rank).is_empty()), "no rank fails");
}

/// Not a test: a process that never stops in order.
#[test]
#[ignore = "a process of the test below"]
fn stubborn_process() {
    let Ok(directory) = std::env::var(DIRECTORY) else { return };
    let _signals = StopSignals::register().unwrap().second_ends_process().unwrap();
    std::fs::write(Path::new(&directory).join("ready"), "").unwrap();
    loop {
        std::thread::sleep(Duration::from_mins(1));
    }
}

#[test]
fn only_a_second_signal_a_while_later_ends_a_process_that_does_not_stop() {
    let directory = directory();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "launch::stubborn_process", "--ignored", "--quiet"])
        .env(DIRECTORY, directory.path());
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while !directory.path().join("ready").exists() {
        assert!(Instant::now() < deadline, "the process starts");
        std::thread::sleep(Duration::from_millis(10));
    }
    let signal = |signal| kill_process(Pid::from_child(&child), signal).unwrap();
    // at the same time: one request, as `timeout` sends it
    signal(Signal::TERM);
    signal(Signal::TERM);
    std::thread::sleep(Duration::from_secs(2));
    signal(Signal::INT);
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::INT.as_raw()));
}
