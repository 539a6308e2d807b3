//! Files and threads for every rank in a job with one process per rank: neither grows with the job.

use super::listener::connect_tree;
use crate::api::{Comm, Settings};
use crate::error::StepContext;
use crate::rendezvous::{JobToken, RankIdentity, RendezvousConfig};
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Name of the test that runs one rank.
const RANK_TEST: &str = "tcp::rank_resources::one_rank";
/// Variable with rank, size, port and token.
const VARIABLE: &str = "DFLOP_TEST_RANK";
/// Variable with the directory that ranks write their counts to.
const DIRECTORY: &str = "DFLOP_TEST_DIRECTORY";

/// Maximum number of files and threads that a rank has once it has joined, beyond those of its process: for a
/// listener and five tree neighbors.
const COUNT_MAX: usize = 6;
/// Time within which the connections and threads for joining are gone.
const SETTLED: Duration = Duration::from_secs(20);

/// Returns the number of files and threads in this process.
fn resources() -> [usize; 2] {
    ["fd", "task"].map(|directory| std::fs::read_dir(format!("/proc/self/{directory}")).unwrap().count())
}

#[test]
#[ignore = "one rank of a job, which the other test of this file starts"]
fn one_rank() {
    let before = resources();
    let text = std::env::var(VARIABLE).expect("started by the other test");
    let [rank, size, port, token] = text.split(' ').collect::<Vec<_>>()[..] else { panic!("{text}") };
    let (rank, size): (usize, usize) = (rank.parse().unwrap(), size.parse().unwrap());
    let rendezvous = RendezvousConfig {
        host: Ipv4Addr::LOCALHOST.to_string(),
        port: port.parse().unwrap(),
        token: Some(JobToken::new(token).unwrap()),
        is_hosted_by_launcher: false,
        listen: None,
    };
    let identity = RankIdentity { rank, size, local_rank: rank, rendezvous: Some(rendezvous) };
    let mut session =
        connect_tree(&identity, Settings::default().rendezvous(Duration::from_mins(2))).unwrap();
    // rank 0 hosts the store, and has a connection and a thread for every rank that keeps it
    session.store = None;
    let (comm, at) = (&session.comm, StepContext::step(0, "tree"));
    comm.barrier(at).unwrap();
    let begin = Instant::now();
    let counts = loop {
        let now = resources();
        let counts = [now[0] - before[0], now[1] - before[1]];
        if counts.iter().all(|&count| count <= COUNT_MAX) || begin.elapsed() > SETTLED {
            break counts;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let directory = std::env::var(DIRECTORY).unwrap();
    std::fs::write(Path::new(&directory).join(rank_text(rank)), format!("{} {}", counts[0], counts[1]))
        .unwrap();
    let gathered = comm.gather(at, &[rank as u64, counts[0] as u64]).unwrap();
    assert!(gathered.chunks(2).map(|row| row[0]).eq(0..size as u64));
    let part = comm.split(at, Some(rank as u64 % 4), 0).unwrap().unwrap();
    assert_eq!((part.size(), part.world_rank(1)), (size / 4, 4 + rank % 4));
    comm.barrier(at).unwrap();
}

fn rank_text(rank: usize) -> String {
    format!("rank-{rank}")
}

/// Runs a job and returns the files and threads for every rank.
fn counts(size: usize) -> Vec<[usize; 2]> {
    let directory = tempfile::tempdir().unwrap();
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", RANK_TEST, "--ignored", "--test-threads", "1"])
            .env(VARIABLE, format!("{rank} {size} {port} a-token-of-the-test-{port}"))
            .env(DIRECTORY, directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut ranks: Vec<Child> = (0..size).map(start).collect();
    let ends: Vec<bool> = ranks.iter_mut().map(|rank| rank.wait().unwrap().success()).collect();
    assert!(ends.iter().all(|&end| end), "{size} ranks: {ends:?}");
    let read = |rank: usize| {
        let text = std::fs::read_to_string(directory.path().join(rank_text(rank))).unwrap();
        let numbers: Vec<usize> = text.split(' ').map(|number| number.parse().unwrap()).collect();
        [numbers[0], numbers[1]]
    };
    (0..size).map(read).collect()
}

#[test]
fn files_and_threads_of_every_rank_do_not_grow_with_the_job() {
    for size in [16, 64, 256] {
        let counts = counts(size);
        for (rank, [files, threads]) in counts.iter().enumerate() {
            assert!(*files <= COUNT_MAX, "rank {rank} of {size} has {files} files");
            assert!(*threads <= COUNT_MAX, "rank {rank} of {size} has {threads} threads");
        }
        // the root has four neighbors, its children five
        assert!(counts[1] > counts[size - 1], "a leaf has fewer than an inner rank: {counts:?}");
    }
}
