//! Resolves host names, and connects within a deadline.

use super::handshake::{CALL, Hello, Rejection, start_handshake};
use super::token::JobToken;
use crate::error::{Error, Result};
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

const RETRY: Duration = Duration::from_millis(20);
const RETRY_NAME: Duration = Duration::from_millis(250);
/// Time limit for an address to accept a connection.
const DIAL: Duration = Duration::from_secs(3);

/// Point in time until which ranks try to find each other.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    begin: Instant,
    end: Instant,
}

impl Deadline {
    pub(crate) fn after(duration: Duration) -> Self {
        let begin = Instant::now();
        Self { begin, end: begin + duration }
    }

    pub(crate) fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    pub(crate) fn waited_seconds(&self) -> f64 {
        self.begin.elapsed().as_secs_f64()
    }
}

/// Resolves a host name or an IPv4 or IPv6 address. Unknown names are retried until the deadline.
pub(crate) fn resolve(host: &str, port: u16, deadline: &Deadline) -> Result<Vec<SocketAddr>> {
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let (answer, answers) = channel();
    let (name, begin) = (host.clone(), *deadline);
    let failed =
        |host, source| Err(Error::Resolve { host, waited_seconds: deadline.waited_seconds(), source });
    // the system resolver has its own time limits, which may exceed the deadline
    let resolving = std::thread::Builder::new().name("comm-resolve".into()).spawn(move || {
        loop {
            let found = (name.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            let is_found = found.as_ref().is_ok_and(|addresses| !addresses.is_empty());
            if answer.send(found).is_err() || is_found || begin.left().is_zero() {
                return;
            }
            std::thread::sleep(RETRY_NAME);
        }
    });
    if let Err(source) = resolving {
        return failed(host, source);
    }
    let mut source = io::Error::from(io::ErrorKind::TimedOut);
    loop {
        match answers.recv_timeout(deadline.left()) {
            Ok(Ok(addresses)) if !addresses.is_empty() => return Ok(addresses),
            Ok(Ok(_)) => source = io::ErrorKind::NotFound.into(),
            Ok(Err(error)) => source = error,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return failed(host, source),
        }
    }
}

/// Connects to any of several addresses, retrying until a peer that knows the token answers.
///
/// # Errors
/// Immediately if the token or this rank is rejected; [`Error::Connect`] after the deadline.
pub(crate) fn dial(
    addresses: &[SocketAddr],
    hello: Hello,
    token: &JobToken,
    peer: &str,
    deadline: &Deadline,
) -> Result<TcpStream> {
    let address = addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    loop {
        let mut reason = "no address".to_owned();
        for one in addresses {
            match call(one, hello, token, deadline) {
                Ok(stream) => return Ok(stream),
                Err(Rejection::WrongToken) => return Err(Error::TokenRefused { rank: hello.rank, address }),
                Err(Rejection::Refused(reason)) => return Err(Error::Refused { rank: hello.rank, reason }),
                Err(Rejection::Io(error)) => reason = error.to_string(),
            }
        }
        if deadline.left().is_zero() {
            let (rank, waited_seconds) = (hello.rank, deadline.waited_seconds());
            return Err(Error::Connect { rank, peer: peer.to_owned(), address, waited_seconds, reason });
        }
        std::thread::sleep(RETRY.min(deadline.left()));
    }
}

/// Calls an address once.
pub(crate) fn call(
    address: &SocketAddr,
    hello: Hello,
    token: &JobToken,
    deadline: &Deadline,
) -> Result<TcpStream, Rejection> {
    // a zero timeout is a system call error, and a dead address must not use up the deadline
    let patience = |limit| deadline.left().clamp(Duration::from_millis(1), limit);
    let mut stream = TcpStream::connect_timeout(address, patience(DIAL))?;
    stream.set_nodelay(true)?;
    start_handshake(&mut stream, hello, token, patience(CALL))?;
    Ok(stream)
}
