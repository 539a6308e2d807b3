//! Ranks find each other over TCP, and reject strangers.

use super::support::{TcpJob, floats, patient, ring_sum};
use dflop_comm::{
    Comm, Error, JobToken, RankIdentity, RendezvousConfig, RendezvousServer, Settings, StepContext, tcp,
};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Token for jobs without strangers.
const TOKEN: &str = "token of the test";

/// Returns the identity in a job whose rank 0 hosts the rendezvous server.
fn identity(rank: usize, size: usize, port: u16, token: &str) -> RankIdentity {
    let rendezvous = RendezvousConfig {
        host: "127.0.0.1".into(),
        port,
        token: Some(JobToken::new(token).unwrap()),
        is_hosted_by_launcher: false,
        listen: None,
    };
    RankIdentity { rank, size, local_rank: rank, rendezvous: Some(rendezvous) }
}

fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

fn brief() -> Settings {
    patient().rendezvous(Duration::from_millis(800))
}

fn sum(session: &tcp::Session, size: usize) {
    let mut values = floats(session.comm.rank(), 100);
    session.comm.all_reduce(StepContext::step(0, "sum"), values.as_mut_slice().into()).unwrap();
    assert_eq!(values, ring_sum(size, 100));
}

#[test]
fn rank_0_hosts_the_server_whichever_rank_comes_first() {
    let port = free_port();
    std::thread::scope(|scope| {
        for rank in (0..3).rev() {
            scope.spawn(move || {
                let session = tcp::connect(&identity(rank, 3, port, TOKEN), patient()).unwrap();
                sum(&session, 3);
            });
            std::thread::sleep(Duration::from_millis(50));
        }
    });
}

#[test]
fn the_listen_address_is_also_used_by_the_server() {
    // the rank 0 host name resolves to an address on another machine, on which nothing can listen
    let port = free_port();
    let mut host = identity(0, 2, port, TOKEN);
    let rendezvous = host.rendezvous.as_mut().unwrap();
    rendezvous.host = "192.0.2.1".into();
    assert!(matches!(tcp::connect(&host, brief()), Err(Error::Listen { .. })));
    host.rendezvous.as_mut().unwrap().listen = Some(Ipv4Addr::LOCALHOST.into());
    std::thread::scope(|scope| {
        scope.spawn(|| sum(&tcp::connect(&host, patient()).unwrap(), 2));
        sum(&tcp::connect(&identity(1, 2, port, TOKEN), patient()).unwrap(), 2);
    });
    host.rendezvous.as_mut().unwrap().listen = Some(Ipv4Addr::UNSPECIFIED.into());
    assert!(matches!(tcp::connect(&host, brief()), Err(Error::InvalidSetting { setting: "listen", .. })));
}

#[test]
fn ipv6_works() {
    if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_err() {
        return;
    }
    let job = TcpJob::at(3, Ipv6Addr::LOCALHOST.into());
    job.run(patient(), |session| sum(&session, 3));
}

#[test]
fn names_are_resolved() {
    let mut job_identity = identity(0, 2, free_port(), TOKEN);
    job_identity.rendezvous.as_mut().unwrap().host = "localhost".into();
    let other = RankIdentity { rank: 1, ..job_identity.clone() };
    std::thread::scope(|scope| {
        scope.spawn(|| sum(&tcp::connect(&other, patient()).unwrap(), 2));
        sum(&tcp::connect(&job_identity, patient()).unwrap(), 2);
    });
}

#[test]
fn strangers_are_refused_and_the_job_continues() {
    let job = TcpJob::new(2);
    let address = job.host.address();
    // a stranger that sends nothing, one that sends other bytes, and one that hangs up
    let _silent = TcpStream::connect(address).unwrap();
    let mut other = TcpStream::connect(address).unwrap();
    other.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: someone\r\n\r\n").unwrap();
    drop(TcpStream::connect(address).unwrap());
    let mut wrong = job.identity(1);
    wrong.rendezvous.as_mut().unwrap().token = Some(JobToken::new("guess of a stranger").unwrap());
    let refused = tcp::connect(&wrong, patient()).unwrap_err();
    assert!(matches!(&refused, Error::TokenRefused { rank: 1, .. }), "{refused}");
    assert!(refused.to_string().contains("DFLOP_JOB_TOKEN"), "{refused}");
    job.run(patient(), |session| sum(&session, 2));
    let mut answer = Vec::new();
    other.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    // a nonce and "refused", or nothing; never more
    let _ = other.read_to_end(&mut answer);
    assert!(answer.len() <= 33, "{} bytes", answer.len());
}

#[test]
fn a_server_without_the_token_is_refused() {
    // accepts everyone, without a proof
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let impostor = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut hello = [0; 45];
        stream.read_exact(&mut hello).unwrap();
        stream.write_all(&[7; 32]).unwrap();
        let mut proof = [0; 32];
        stream.read_exact(&mut proof).unwrap();
        stream.write_all(&[0; 33]).unwrap();
        proof
    });
    let refused = tcp::connect(&identity(1, 2, port, "secret of the job"), patient()).unwrap_err();
    assert!(matches!(refused, Error::TokenRefused { .. }), "{refused}");
    assert!(
        !impostor.join().unwrap().windows(6).any(|bytes| bytes == b"secret" || bytes == b"of the"),
        "the token does not travel"
    );
}

#[test]
fn several_ranks_need_a_token() {
    let mut without = identity(0, 2, free_port(), TOKEN);
    without.rendezvous.as_mut().unwrap().token = None;
    let error = tcp::connect(&without, brief()).unwrap_err();
    assert!(matches!(error, Error::TokenMissing { size: 2 }), "{error}");
    assert!(JobToken::new("").is_err() && JobToken::new("short").is_err());
}

#[test]
fn an_unspecified_address_of_the_rendezvous_is_refused() {
    for host in ["0.0.0.0", "::", "[::]", "0"] {
        for rank in [0, 1] {
            let mut open = identity(rank, 2, free_port(), TOKEN);
            open.rendezvous.as_mut().unwrap().host = host.into();
            let error = tcp::connect(&open, brief()).unwrap_err();
            assert!(
                matches!(&error, Error::InvalidSetting { setting: "rendezvous host", .. }),
                "{host}: {error}"
            );
            assert!(error.to_string().contains("MASTER_ADDR"), "{error}");
        }
    }
    let everywhere = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
    let server = RendezvousServer::start(&[everywhere], 2, JobToken::random().unwrap());
    assert!(matches!(server, Err(Error::InvalidSetting { .. })));
}

#[test]
fn a_taken_port_is_named() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = tcp::connect(&identity(0, 2, port, TOKEN), brief()).unwrap_err();
    assert!(matches!(&error, Error::Listen { rank: 0, .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains(&format!("127.0.0.1:{port}")) && text.contains("DFLOP_PORT"), "{text}");
}

#[test]
fn an_unresolvable_name_is_reported_in_time() {
    let begin = Instant::now();
    let mut unknown = identity(1, 2, 1, TOKEN);
    unknown.rendezvous.as_mut().unwrap().host = "no-such-host.invalid".into();
    let error = tcp::connect(&unknown, brief()).unwrap_err();
    assert!(matches!(&error, Error::Resolve { host, .. } if host == "no-such-host.invalid"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_missing_rendezvous_is_an_error_in_time() {
    let begin = Instant::now();
    let error = tcp::connect(&identity(1, 2, free_port(), TOKEN), brief()).unwrap_err();
    assert!(matches!(&error, Error::Connect { rank: 1, .. }), "{error}");
    assert!(error.to_string().contains("the rendezvous"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(5));
}

#[test]
fn ranks_that_never_come_are_listed_in_time() {
    let job = TcpJob::new(4);
    let begin = Instant::now();
    let errors = std::thread::scope(|scope| {
        let start = |rank: usize| {
            let identity = job.identity(rank);
            scope.spawn(move || tcp::connect(&identity, brief()).unwrap_err())
        };
        [0, 2].map(start).map(|thread| thread.join().unwrap())
    });
    assert!(begin.elapsed() < Duration::from_secs(5));
    for error in errors {
        let is_late = matches!(&error, Error::Missing { missing, size: 4, .. } if *missing == [1, 3]);
        // the peer may have given up first
        assert!(is_late || error.to_string().contains("disconnected"), "{error}");
    }
}

#[test]
fn a_rank_that_dies_before_all_are_connected_fails_the_others() {
    let job = TcpJob::new(3);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let identity = job.identity(1);
        let waits = scope.spawn(move || tcp::connect(&identity, patient()).unwrap_err());
        let gives_up = tcp::connect(&job.identity(2), brief()).unwrap_err();
        assert!(matches!(gives_up, Error::Missing { .. }), "{gives_up}");
        let error = waits.join().unwrap();
        assert!(error.to_string().contains("rank 2 disconnected"), "{error}");
    });
    assert!(begin.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_rank_joins_once_and_jobs_do_not_mix() {
    let job = TcpJob::new(2);
    std::thread::scope(|scope| {
        let identity = job.identity(0);
        scope.spawn(move || sum(&tcp::connect(&identity, patient()).unwrap(), 2));
        std::thread::sleep(Duration::from_millis(200));
        let again = tcp::connect(&job.identity(0), patient()).unwrap_err();
        assert!(again.to_string().contains("another process is rank 0"), "{again}");
        let mut larger = job.identity(1);
        larger.size = 3;
        let larger = tcp::connect(&larger, patient()).unwrap_err();
        assert!(larger.to_string().contains("expected a job of 2 ranks, found 3"), "{larger}");
        sum(&tcp::connect(&job.identity(1), patient()).unwrap(), 2);
    });
}

#[test]
fn the_server_distributes_values() {
    let job = TcpJob::new(3);
    job.run(patient(), |session| {
        let store = session.store.as_ref().unwrap();
        let rank = session.comm.rank();
        if rank == 0 {
            store.set("group/encoder", b"unique id").unwrap();
            assert!(store.set("group/encoder", b"another").is_err(), "keys are written once");
        }
        let value = store.wait("group/encoder", Duration::from_secs(10)).unwrap();
        assert_eq!(value.as_deref(), Some(b"unique id".as_slice()));
        assert_eq!(store.wait("nothing", Duration::from_millis(20)).unwrap(), None);
        assert!(store.set("large", &vec![0; 70_000]).is_err());
        session.comm.barrier(StepContext::step(0, "x")).unwrap();
    });
    job.run_again();
}

#[test]
fn a_job_that_is_too_large_is_refused_with_the_alternatives() {
    let error = tcp::connect(&identity(0, tcp::RANKS_MAX + 1, free_port(), TOKEN), brief()).unwrap_err();
    assert!(matches!(&error, Error::TooManyRanks { size: 129, max: 128 }), "{error}");
    assert!(error.to_string().contains("NCCL or MPI"), "{error}");
}

trait RunAgain {
    fn run_again(&self);
}

impl RunAgain for TcpJob {
    /// A rendezvous server serves one job: a second job is not admitted.
    fn run_again(&self) {
        let error = tcp::connect(&self.identity(1), brief()).unwrap_err();
        assert!(matches!(error, Error::Connect { .. } | Error::Refused { .. }), "{error}");
    }
}

#[test]
fn the_server_listens_only_on_the_given_address() {
    let host = RendezvousServer::start(
        &[SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0)],
        2,
        JobToken::random().unwrap(),
    );
    let address = host.as_ref().unwrap().address();
    assert!(address.ip().is_loopback());
    // another address on this machine, if it has one
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    if socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).is_ok() {
        let ip = socket.local_addr().unwrap().ip();
        if !ip.is_loopback() {
            let elsewhere = SocketAddr::new(ip, address.port());
            assert!(TcpStream::connect_timeout(&elsewhere, Duration::from_millis(500)).is_err());
        }
    }
}
