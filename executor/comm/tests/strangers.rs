//! Strangers that connect to job listeners delay the job by seconds at most, regardless of the bytes they
//! send.

#![cfg(target_os = "linux")]

mod support;

use dflop_comm::{Comm, Error, Settings, StepContext, tcp};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use support::{TcpJob, floats, patient, ring_sum};

/// Time limit longer than a job takes to form on a busy machine, but shorter than strangers could once delay
/// it.
const SOON: Duration = Duration::from_secs(12);

/// Listeners are found by process, so only a single test at a time has a job.
static ALONE: Mutex<()> = Mutex::new(());

/// Waits for other tests, and until the listeners of the previous test are closed.
fn alone() -> MutexGuard<'static, ()> {
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let begin = Instant::now();
    while !listeners().is_empty() {
        assert!(begin.elapsed() < SOON, "{:?}", listeners());
        std::thread::sleep(Duration::from_millis(5));
    }
    guard
}

/// Returns the loopback addresses on which this process listens.
fn listeners() -> Vec<SocketAddr> {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap();
    let targets = descriptors.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let sockets: Vec<String> = targets
        .filter_map(|target| Some(target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let listener = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_own = fields[3] == "0A" && sockets.iter().any(|inode| inode == fields[9]);
        let port = u16::from_str_radix(fields[1].rsplit_once(':')?.1, 16).ok()?;
        is_own.then(|| SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port))
    };
    table.lines().skip(1).filter_map(listener).collect()
}

/// Waits until the rendezvous server and one rank listen.
fn two_listeners() -> Vec<SocketAddr> {
    let begin = Instant::now();
    loop {
        let found = listeners();
        if found.len() == 2 {
            return found;
        }
        assert!(begin.elapsed() < SOON, "{found:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs a two-rank job, whose second rank starts once `attack` has run for a second on both listeners;
/// returns the time that the job took from then on.
fn formed_under(attack: impl Fn(&[SocketAddr], &AtomicBool) + Sync) -> Duration {
    formed_after(|| true, attack)
}

/// Runs the same job, once the strangers are also connected.
fn formed_after(
    are_there: impl Fn() -> bool,
    attack: impl Fn(&[SocketAddr], &AtomicBool) + Sync,
) -> Duration {
    let (job, is_over) = (TcpJob::new(2), AtomicBool::new(false));
    let run = |rank| {
        let session = tcp::connect(&job.identity(rank), patient()).unwrap();
        let mut values = floats(rank, 100);
        session.comm.all_reduce(StepContext::step(0, "sum"), values.as_mut_slice().into()).unwrap();
        assert_eq!(values, ring_sum(2, 100));
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| run(0));
        let addresses = two_listeners();
        let (attack, is_over_too) = (&attack, &is_over);
        let attacking = scope.spawn(move || attack(&addresses, is_over_too));
        std::thread::sleep(Duration::from_secs(1));
        let patience = Instant::now() + Duration::from_secs(30);
        while !are_there() && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(5));
        }
        let begin = Instant::now();
        let second = scope.spawn(|| run(1));
        let joined = [first.join(), second.join()];
        is_over.store(true, Ordering::Relaxed);
        let elapsed = begin.elapsed();
        attacking.join().unwrap();
        for rank in joined {
            rank.unwrap();
        }
        elapsed
    })
}

/// Connection that sends bytes individually, with pauses, and restarts when it is ended.
struct Drip {
    address: SocketAddr,
    bytes: Vec<u8>,
    pause: Duration,
    open: Option<(TcpStream, usize, Instant)>,
}

impl Drip {
    fn go_on(&mut self, begun: &AtomicUsize) {
        let Some((stream, sent, next)) = &mut self.open else {
            if let Ok(stream) = TcpStream::connect_timeout(&self.address, Duration::from_millis(50)) {
                stream.set_nonblocking(true).unwrap();
                begun.fetch_add(1, Ordering::Relaxed);
                self.open = Some((stream, 0, Instant::now()));
            }
            return;
        };
        let is_ended = match stream.read(&mut [0; 64]) {
            Ok(0) => true,
            Ok(_) => false,
            Err(error) => error.kind() != ErrorKind::WouldBlock,
        };
        if is_ended || *sent == self.bytes.len() {
            self.open = None;
        } else if Instant::now() >= *next {
            // the connection may have ended meanwhile, which the next call notices
            let _ = stream.write(&self.bytes[*sent..=*sent]);
            (*sent, *next) = (*sent + 1, Instant::now() + self.pause);
        }
    }
}

/// A complete introduction for rank 1 in a two-rank job, for the rendezvous, and a wrong proof.
fn introduction() -> Vec<u8> {
    [b"DFL\x02\x00\x01\x00\x00\x00\x02\x00\x00\x00".as_slice(), &[b'a'; 64]].concat()
}

#[test]
fn callers_that_send_a_byte_a_second_do_not_keep_a_job_from_forming() {
    let _alone = alone();
    let begun = AtomicUsize::new(0);
    let elapsed = formed_under(|addresses, is_over| {
        let drip = |index: usize| Drip {
            address: addresses[index % addresses.len()],
            bytes: introduction(),
            pause: Duration::from_secs(1),
            open: None,
        };
        // as many on each listener as were once enough to fill it
        let mut drips: Vec<Drip> = (0..520).map(drip).collect();
        while !is_over.load(Ordering::Relaxed) {
            for drip in &mut drips {
                drip.go_on(&begun);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    assert!(begun.load(Ordering::Relaxed) >= 520, "all strangers have connected");
    assert!(elapsed < SOON, "{elapsed:?}");
}

#[test]
fn callers_that_stop_before_their_proof_do_not_keep_a_job_from_forming() {
    let _alone = alone();
    let begun = AtomicUsize::new(0);
    let are_there = || begun.load(Ordering::Relaxed) > 600;
    let elapsed = formed_after(are_there, |addresses, is_over| {
        let mut open = Vec::new();
        while !is_over.load(Ordering::Relaxed) {
            for address in addresses {
                if let Ok(mut stream) = TcpStream::connect_timeout(address, Duration::from_millis(50)) {
                    let _ = stream.write_all(&introduction()[..45]);
                    open.push(stream);
                    begun.fetch_add(1, Ordering::Relaxed);
                }
            }
            if open.len() > 600 {
                open.drain(..100);
            }
        }
    });
    assert!(begun.load(Ordering::Relaxed) > 600, "{begun:?}");
    assert!(elapsed < SOON, "{elapsed:?}");
}

#[test]
fn garbage_does_not_keep_a_job_from_forming() {
    let _alone = alone();
    let garbage = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        b"\x16\x03\x01\x02\x00\x01".to_vec(),
        [b"DFL\x02\xff".as_slice(), &[0xff; 72]].concat(),
        introduction(),
        Vec::new(),
        vec![0xa5; 200_000],
    ];
    let elapsed = formed_under(|addresses, is_over| {
        let mut open = Vec::new();
        for number in 0..600 {
            if is_over.load(Ordering::Relaxed) {
                break;
            }
            let address = &addresses[number % addresses.len()];
            let Ok(mut stream) = TcpStream::connect_timeout(address, Duration::from_millis(500)) else {
                continue;
            };
            stream.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
            // a refused connection takes no more bytes
            let _ = stream.write_all(&garbage[number / 2 % garbage.len()]);
            if number % 5 == 0 {
                open.push(stream);
            }
        }
    });
    assert!(elapsed < SOON, "{elapsed:?}");
}

#[test]
fn a_rank_that_waited_in_vain_names_the_strangers() {
    let _alone = alone();
    let job = TcpJob::new(2);
    let settings = Settings::default().rendezvous(Duration::from_secs(4));
    let error = std::thread::scope(|scope| {
        let waits = scope.spawn(|| tcp::connect(&job.identity(0), settings).unwrap_err());
        let addresses = two_listeners();
        let mut open = Vec::new();
        for address in addresses {
            for _ in 0..3 {
                TcpStream::connect(address).unwrap().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            }
            // sends nothing, until its time is over
            open.push(TcpStream::connect(address).unwrap());
            let mut wrong = TcpStream::connect(address).unwrap();
            wrong.write_all(&introduction()).unwrap();
            open.push(wrong);
        }
        waits.join().unwrap()
    });
    assert!(matches!(&error, Error::Missing { missing, .. } if *missing == [1]), "{error}");
    let text = error.to_string();
    for by in ["the rendezvous", "this rank"] {
        let counts = format!(
            "; {by} refused 5 connections: 3 of another protocol, 1 too slow, 1 with a wrong job token"
        );
        assert!(text.contains(&counts), "{text}");
    }
}
