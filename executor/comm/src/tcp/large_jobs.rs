//! Jobs beyond the data connection limit: only the tree.

use super::listener::{Session, connect_tree};
use crate::api::{Comm, Settings};
use crate::error::{Cause, Failure, StepContext};
use crate::rendezvous::{JobToken, RankIdentity, RendezvousConfig, RendezvousServer};
use rustix::process::{Resource, getrlimit, setrlimit};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

const RANKS: usize = 256;
/// Time within which all ranks have joined and passed a barrier, generous for a busy machine: usually a
/// second.
const CONNECTED: Duration = Duration::from_secs(20);

/// Runs every job rank as a thread, with some patience for a busy machine.
fn run<T: Send>(size: usize, rank: impl Fn(Session) -> T + Sync) -> Vec<T> {
    let token = JobToken::random().unwrap();
    let local = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
    let server = RendezvousServer::start(&[local], size, token.clone()).unwrap();
    let rendezvous = RendezvousConfig {
        host: Ipv4Addr::LOCALHOST.to_string(),
        port: server.address().port(),
        token: Some(token),
        is_hosted_by_launcher: true,
        listen: None,
    };
    let settings = Settings::default().rendezvous(Duration::from_mins(2));
    std::thread::scope(|scope| {
        let (rendezvous, run) = (&rendezvous, &rank);
        let start = |rank| {
            scope.spawn(move || {
                let rendezvous = Some(rendezvous.clone());
                let identity = RankIdentity { rank, size, local_rank: rank, rendezvous };
                run(connect_tree(&identity, settings).unwrap())
            })
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// All ranks are threads in this process: it needs the files for all ranks.
fn allow_files(files: u64) {
    let limit = getrlimit(Resource::Nofile);
    let current = Some(limit.current.unwrap_or(files).max(files));
    setrlimit(Resource::Nofile, rustix::process::Rlimit { current, ..limit }).unwrap();
}

/// Returns the number of entries in a directory for this process.
fn entries(directory: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{directory}")).map_or(0, Iterator::count)
}

#[test]
fn the_tree_connects_many_ranks_with_few_files() {
    allow_files(4096);
    let begin = Instant::now();
    let counts = run(RANKS, |session| {
        let (comm, at) = (&session.comm, StepContext::step(0, "tree"));
        comm.barrier(at).unwrap();
        let connected = begin.elapsed();
        let files = (comm.rank() == 0).then(|| entries("fd"));
        let numbers = comm.gather(at, &[comm.rank() as u64]).unwrap();
        assert!(numbers.into_iter().eq(0..RANKS as u64));
        comm.check_digest(1, 77).unwrap();
        let part = comm.split(at, Some(comm.rank() as u64 % 2), 0).unwrap().unwrap();
        assert_eq!((part.size(), part.world_rank(1)), (RANKS / 2, 2 + comm.rank() % 2));
        comm.barrier(at).unwrap();
        (files, connected)
    });
    // a listener and both ends of two connections per rank: to the rendezvous and to its parent
    let (files, connected) = (counts[0].0.unwrap(), counts.iter().map(|(_, connected)| connected).max());
    assert!(files < 5 * RANKS + 100, "{files} files");
    assert!(connected < Some(&CONNECTED), "connected after {connected:?}");
}

#[test]
fn a_digest_that_differs_is_named_to_all_of_many_ranks() {
    allow_files(4096);
    let failures = run(RANKS, |session| {
        let digest = if session.comm.rank() == 200 { 1 } else { 2 };
        let error = session.comm.check_digest(3, digest).unwrap_err();
        (error.failure().unwrap().clone(), session)
    });
    let is_named = |(failure, _): &(Failure, Session)| {
        (failure.cause, failure.culprit) == (Cause::Digest, Some(200)) && failure.message.contains("step 3")
    };
    assert!(failures.iter().all(is_named));
}

/// The root, and the path between its children, is gone when rank 9 fails.
#[test]
fn a_failure_reaches_the_ranks_beyond_one_that_has_left() {
    const LAST: usize = 9;
    let failures = run(12, |session| {
        let (comm, at) = (session.comm, StepContext::step(5, "end"));
        comm.barrier(at).unwrap();
        match comm.rank() {
            0 => {
                drop(comm);
                None
            }
            LAST => {
                // after the root has waited for its children
                std::thread::sleep(Duration::from_millis(2500));
                Some(comm.abort(at, "enough").failure().unwrap().clone())
            }
            rank => {
                // the parent of the last rank cannot leave before it; no rank has a data connection
                let from = if rank == 1 { 2 } else { 1 };
                let received = comm.recv(from, 0, at, crate::message::PayloadShape::f32(1, 1));
                Some(received.unwrap_err().failure().unwrap().clone())
            }
        }
    });
    for failure in failures.into_iter().flatten() {
        assert_eq!((failure.cause, failure.culprit), (Cause::Caller, Some(LAST)), "{failure}");
    }
}

/// A child of the root finishes after the root; a rank in another part of the tree waits for it.
#[test]
fn a_rank_that_finishes_after_the_root_is_named() {
    let failures = run(6, |session| {
        let (comm, at) = (session.comm, StepContext::step(5, "end"));
        comm.barrier(at).unwrap();
        match comm.rank() {
            0 => drop(comm),
            1 => std::thread::sleep(Duration::from_secs(2)),
            2 => {
                let received = comm.recv(1, 0, at, crate::message::PayloadShape::f32(1, 1));
                return Some(received.unwrap_err().failure().unwrap().clone());
            }
            _ => {
                // in the job until rank 2 has failed
                let received = comm.recv(2, 0, at, crate::message::PayloadShape::f32(1, 1));
                received.unwrap_err();
            }
        }
        None
    });
    let failure = failures.into_iter().flatten().next().unwrap();
    assert_eq!((failure.cause, failure.culprit), (Cause::Left, Some(1)), "{failure}");
}
