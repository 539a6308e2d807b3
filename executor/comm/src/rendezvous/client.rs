//! Rendezvous client: sets and awaits job keys.
//!
//! Resolves host names, and connects within a deadline.

use super::handshake::{CALL, Hello, JobToken, Purpose, Rejection, start_handshake};
use super::protocol::{ReplyKind, Request, RequestKind, read_answer};
use crate::error::{Error, Result};
use std::io::{self, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Rank connection to the job key-value store.
///
/// Keys are written once. In addition to addresses, the store can hold other data that a transport must
/// distribute, such as the unique id of an NCCL communicator under the group name.
#[derive(Debug)]
pub struct RendezvousClient {
    stream: Mutex<TcpStream>,
    rank: usize,
    size: usize,
    has_joined: AtomicBool,
}

impl RendezvousClient {
    /// Connects to the store and proves knowledge of the token.
    pub(crate) fn connect(
        addresses: &[SocketAddr],
        rank: usize,
        size: usize,
        token: &JobToken,
        deadline: &Deadline,
    ) -> Result<Self> {
        let hello = Hello { purpose: Purpose::RendezvousClient, rank, size };
        let stream = dial(addresses, hello, token, "the rendezvous", deadline)?;
        Ok(Self { stream: Mutex::new(stream), rank, size, has_joined: AtomicBool::new(false) })
    }

    /// Marks this rank as connected with all ranks; before that, the end of this rank fails the rendezvous
    /// for all ranks.
    pub(crate) fn join(&self) {
        self.has_joined.store(true, Ordering::Relaxed);
    }

    /// Returns the address by which this machine reaches the store.
    pub(crate) fn local_ip(&self) -> Result<IpAddr> {
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream
            .local_addr()
            .map(|address| address.ip())
            .map_err(|source| self.io("ask for the local address", source))
    }

    /// Sets a key with at most 256 bytes to a value with at most 64 KiB.
    ///
    /// # Errors
    /// [`Error::Refused`] if the key has a value; [`Error::Io`] if the store is gone.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        match self.ask(RequestKind::Set, key, value, Duration::ZERO)? {
            (ReplyKind::Taken, _) => {
                Err(Error::Refused { rank: self.rank, reason: format!("`{key}` was set before") })
            }
            _ => Ok(()),
        }
    }

    /// Publishes the address of this rank and waits for the addresses of all ranks, in one request.
    ///
    /// # Errors
    /// `Err` with the missing ranks in the inner result if some do not publish an address in time; errors
    /// from [`wait`](Self::wait).
    pub(crate) fn exchange_address(
        &self,
        own: SocketAddr,
        timeout: Duration,
    ) -> Result<Result<Vec<SocketAddr>, Vec<usize>>> {
        let (kind, value) = self.ask(RequestKind::Addresses, "", own.to_string().as_bytes(), timeout)?;
        if kind == ReplyKind::Lost {
            return Err(self.lost(value));
        }
        if kind == ReplyKind::TimedOut {
            let missing = value.as_chunks::<4>().0.iter();
            return Ok(Err(missing.map(|&rank| u32::from_le_bytes(rank) as usize).collect()));
        }
        let text = String::from_utf8_lossy(&value);
        let addresses: Vec<SocketAddr> = text.lines().filter_map(|address| address.parse().ok()).collect();
        if addresses.len() == self.size {
            return Ok(Ok(addresses));
        }
        Err(self.io("read the addresses of all ranks", io::ErrorKind::InvalidData.into()))
    }

    /// Waits for the value of a key; returns `None` if it is not set in time.
    ///
    /// # Errors
    /// [`Error::Refused`] if a job rank disconnected before; [`Error::Io`] if the store is gone.
    pub fn wait(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>> {
        match self.ask(RequestKind::Wait, key, &[], timeout)? {
            (ReplyKind::Value, value) => Ok(Some(value)),
            (ReplyKind::Lost, rank) => Err(self.lost(rank)),
            _ => Ok(None),
        }
    }

    /// Waits until all ranks have entered the barrier with this name, which can be used once.
    ///
    /// # Errors
    /// [`Error::Connect`] if some ranks do not enter in time; errors from [`wait`](Self::wait).
    pub fn barrier(&self, name: &str, timeout: Duration) -> Result<()> {
        let (_, count) = self.ask(RequestKind::Count, name, &[], Duration::ZERO)?;
        let open = format!("barrier/{name}");
        // the last rank to enter opens the barrier for all
        if count == (self.size as u64).to_le_bytes() {
            self.set(&open, &[])?;
        }
        match self.wait(&open, timeout)? {
            Some(_) => Ok(()),
            None => Err(Error::Connect {
                rank: self.rank,
                peer: "all ranks".into(),
                address: open,
                waited_seconds: timeout.as_secs_f64(),
                reason: "some ranks did not enter the barrier".into(),
            }),
        }
    }

    /// Returns the number of connections that the server has rejected, and the reasons; `None` if there are
    /// none or the server is gone.
    pub(crate) fn refusals(&self) -> Option<String> {
        let (_, summary) = self.ask(RequestKind::Refusals, "", &[], Duration::ZERO).ok()?;
        String::from_utf8(summary).ok().filter(|summary| !summary.is_empty())
    }

    fn ask(
        &self,
        ask: RequestKind,
        key: &str,
        value: &[u8],
        timeout: Duration,
    ) -> Result<(ReplyKind, Vec<u8>)> {
        let timeout_ms = timeout.as_millis() as u64;
        let request = Request { ask, key: key.into(), value: value.into(), timeout_ms };
        let failed = |source| self.io("ask the rendezvous", source);
        let bytes = request.encode().map_err(failed)?;
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        // the store answers within the requested time, or its machine is gone
        let patience = timeout + Duration::from_secs(5);
        let answer = stream
            .set_read_timeout(Some(patience))
            .and_then(|()| stream.write_all(&bytes))
            .and_then(|()| read_answer(&mut *stream));
        answer.map_err(|source| {
            // a late or partial answer must not be mistaken for the answer to a later request
            let _ = stream.shutdown(Shutdown::Both);
            failed(source)
        })
    }

    fn lost(&self, rank: Vec<u8>) -> Error {
        let rank = rank.try_into().map_or(0, u32::from_le_bytes);
        let reason = format!("rank {rank} disconnected before all ranks were connected");
        Error::Refused { rank: self.rank, reason }
    }

    fn io(&self, action: &str, source: io::Error) -> Error {
        Error::Io { action: format!("{action}, as rank {}", self.rank), source }
    }
}

impl Drop for RendezvousClient {
    fn drop(&mut self) {
        let leave = Request { ask: RequestKind::Leave, key: String::new(), value: Vec::new(), timeout_ms: 0 };
        // a store that is gone needs no farewell; a rank that never joined must count as lost
        if self.has_joined.load(Ordering::Relaxed) {
            let stream = self.stream.get_mut().unwrap_or_else(PoisonError::into_inner);
            let _ = leave.encode().and_then(|bytes| stream.write_all(&bytes));
        }
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn an_answer_after_an_error_is_not_taken_for_that_of_the_next_request() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut server = listener.accept().unwrap().0;
        let has_joined = AtomicBool::new(false);
        let client = RendezvousClient { stream: Mutex::new(stream), rank: 1, size: 2, has_joined };
        // no reply has this code; the second reply is complete
        server.write_all(&[9, 0, 0, 0, 0, 0]).unwrap();
        assert!(client.set("key", &vec![0; 70_000]).is_err(), "a value that is too long is never sent");
        assert!(matches!(client.set("key", b"value"), Err(Error::Io { .. })), "the reply is invalid");
        assert!(matches!(client.set("key", b"value"), Err(Error::Io { .. })), "the connection is closed");
    }
}
