//! Server side of the rendezvous: holds the keys of a job.

use super::address::accept_until;
use super::handshake::{Hello, Purpose, accept_handshake};
use super::protocol::{ReplyKind, Request, RequestKind, write_answer};
use super::token::JobToken;
use crate::comm::error::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Key-value store of one job. Serves on its own threads until it is dropped.
#[derive(Debug)]
pub struct RendezvousServer {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    size: usize,
    token: JobToken,
    values: Mutex<Values>,
    changed: Condvar,
    is_over: AtomicBool,
    greeting: AtomicUsize,
}

#[derive(Debug, Default)]
struct Values {
    of_key: BTreeMap<String, Vec<u8>>,
    counts: BTreeMap<String, u64>,
    ranks: BTreeSet<usize>,
    lost: Option<usize>,
}

impl RendezvousServer {
    /// Number of concurrent handshakes; further callers are disconnected.
    const GREETINGS_MAX: usize = 256;

    /// Listens on the first usable address and serves `size` ranks.
    ///
    /// # Errors
    /// [`Error::Listen`] if no address is usable, for example because the port is taken.
    pub fn start(addresses: &[SocketAddr], size: usize, token: JobToken) -> Result<Self> {
        let failed = |source| {
            let address = addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            Error::Listen { rank: 0, address, source }
        };
        let listener = TcpListener::bind(addresses).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let shared = Arc::new(Shared {
            size,
            token,
            values: Mutex::default(),
            changed: Condvar::new(),
            is_over: AtomicBool::new(false),
            greeting: AtomicUsize::new(0),
        });
        let serving = shared.clone();
        std::thread::Builder::new()
            .name("comm-store".into())
            .spawn(move || serving.serve(&listener))
            .map_err(failed)?;
        Ok(Self { address, shared })
    }

    /// Address that the server listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for RendezvousServer {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.shared.changed.notify_all();
    }
}

impl Shared {
    /// Accepts callers until all ranks have joined.
    fn serve(self: &Arc<Self>, listener: &TcpListener) {
        let take = |stream: TcpStream| {
            // each handshake has a thread: strangers must not be able to start any number of them
            if self.greeting.fetch_add(1, Ordering::Relaxed) >= RendezvousServer::GREETINGS_MAX {
                self.greeting.fetch_sub(1, Ordering::Relaxed);
                return;
            }
            let shared = self.clone();
            std::thread::spawn(move || shared.serve_one(stream));
        };
        let is_done = || self.is_over.load(Ordering::Relaxed) || self.lock().ranks.len() == self.size;
        if let Err(error) = accept_until(listener, take, is_done) {
            tracing::warn!(%error, "the rendezvous no longer listens");
        }
    }

    fn serve_one(&self, mut stream: TcpStream) {
        let greeted = accept_handshake(&mut stream, &self.token, |hello| self.admit(hello));
        self.greeting.fetch_sub(1, Ordering::Relaxed);
        let hello = match greeted {
            Ok(Some(hello)) => hello,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%error, "refused a connection that is not of this job");
                return;
            }
        };
        // a rank that disconnects without leaving fails the waits of all others immediately
        if let Err(error) = self.answer(&mut stream) {
            tracing::debug!(rank = hello.rank, %error, "a rank left the rendezvous");
            self.lock().lost.get_or_insert(hello.rank);
            self.changed.notify_all();
        }
    }

    fn admit(&self, hello: &Hello) -> Result<(), String> {
        if hello.purpose != Purpose::RendezvousClient {
            return Err("this is the rendezvous server, not a rank".into());
        }
        if hello.size != self.size {
            return Err(format!("expected a job of {} ranks, found {}", self.size, hello.size));
        }
        if hello.rank >= self.size {
            return Err(format!("rank {} does not exist in a job of {} ranks", hello.rank, self.size));
        }
        if !self.lock().ranks.insert(hello.rank) {
            return Err(format!("another process is rank {}", hello.rank));
        }
        Ok(())
    }

    /// Answers one rank until it leaves; returns an error if it disconnects without leaving.
    fn answer(&self, stream: &mut TcpStream) -> io::Result<()> {
        loop {
            let request = Request::read(stream)?;
            let (answer, value) = match request.ask {
                RequestKind::Set => self.set(request.key, request.value),
                RequestKind::Wait => self.wait(&request.key, Duration::from_millis(request.timeout_ms)),
                RequestKind::Count => self.count(request.key),
                RequestKind::Leave => return Ok(()),
            };
            write_answer(stream, answer, &value)?;
        }
    }

    fn set(&self, key: String, value: Vec<u8>) -> (ReplyKind, Vec<u8>) {
        let mut values = self.lock();
        if values.of_key.contains_key(&key) {
            return (ReplyKind::Taken, Vec::new());
        }
        values.of_key.insert(key, value);
        self.changed.notify_all();
        (ReplyKind::Value, Vec::new())
    }

    fn count(&self, key: String) -> (ReplyKind, Vec<u8>) {
        let mut values = self.lock();
        let count = values.counts.entry(key).or_default();
        *count += 1;
        (ReplyKind::Value, count.to_le_bytes().to_vec())
    }

    fn wait(&self, key: &str, timeout: Duration) -> (ReplyKind, Vec<u8>) {
        let deadline = Instant::now() + timeout;
        let mut values = self.lock();
        loop {
            if let Some(value) = values.of_key.get(key) {
                return (ReplyKind::Value, value.clone());
            }
            if let Some(rank) = values.lost {
                return (ReplyKind::Lost, (rank as u32).to_le_bytes().to_vec());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_over.load(Ordering::Relaxed) {
                return (ReplyKind::TimedOut, Vec::new());
            }
            values = self.changed.wait_timeout(values, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Values> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
