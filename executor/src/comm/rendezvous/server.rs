//! Server side of the rendezvous: holds the keys of a job.

use super::greeter::{Host, greet_callers};
use super::handshake::{Hello, Purpose};
use super::protocol::{ReplyKind, Request, RequestKind, write_answer};
use super::refusals::{Refusal, Refusals};
use super::token::JobToken;
use crate::comm::error::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
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
    refusals: Refusals,
}

#[derive(Debug, Default)]
struct Values {
    of_key: BTreeMap<String, Vec<u8>>,
    counts: BTreeMap<String, u64>,
    /// Ranks with a connection.
    admitted: BTreeSet<usize>,
    /// Ranks that have sent a request: they know that they were admitted.
    joined: BTreeSet<usize>,
    lost: Option<usize>,
}

impl RendezvousServer {
    /// Listens on the first usable address and serves `size` ranks.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] if an address is unspecified, such as `0.0.0.0`, which is open to all
    /// networks; [`Error::Listen`] if no address is usable, for example because the port is taken.
    pub fn start(addresses: &[SocketAddr], size: usize, token: JobToken) -> Result<Self> {
        if let Some(address) = addresses.iter().find(|address| address.ip().is_unspecified()) {
            let reason = format!("{} is unspecified; use an address of this machine", address.ip());
            return Err(Error::InvalidSetting { setting: "rendezvous address", reason });
        }
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
            refusals: Refusals::default(),
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

/// Admits the ranks of the job.
struct Entrance(Arc<Shared>);

impl Host for Entrance {
    /// Hands the connection to the thread of its rank.
    type Seat = SyncSender<TcpStream>;

    fn is_done(&self) -> bool {
        self.0.is_over.load(Ordering::Relaxed) || self.0.lock().joined.len() == self.0.size
    }

    fn admit(&mut self, hello: &Hello) -> Result<Self::Seat, Refusal> {
        self.0.admit(hello).map_err(Refusal::Identity)?;
        let (seat, taken) = sync_channel(1);
        let (shared, rank) = (self.0.clone(), hello.rank);
        let thread = std::thread::Builder::new().name(format!("comm-store-{rank}"));
        match thread.spawn(move || shared.serve_rank(rank, &taken)) {
            Ok(_) => Ok(seat),
            Err(source) => {
                self.0.release(hello.rank);
                Err(Refusal::Resources(source))
            }
        }
    }

    fn seat(&mut self, seat: Self::Seat, _: Hello, stream: TcpStream) {
        // the thread waits for exactly this
        let _ = seat.send(stream);
    }

    fn free(&mut self, _: Self::Seat, hello: &Hello) {
        self.0.release(hello.rank);
    }
}

impl Shared {
    /// Accepts callers until all ranks have joined.
    fn serve(self: &Arc<Self>, listener: &TcpListener) {
        let served = greet_callers(listener, &self.token, &self.refusals, &mut Entrance(self.clone()));
        if let Err(error) = served {
            tracing::warn!(%error, "the rendezvous no longer listens");
        }
    }

    fn serve_rank(&self, rank: usize, taken: &Receiver<TcpStream>) {
        // nothing comes for a caller that is gone
        let Ok(mut stream) = taken.recv() else { return };
        // a rank that disconnects without leaving fails the waits of all others immediately
        if let Err(error) = self.answer(rank, &mut stream) {
            tracing::debug!(rank, %error, "a rank left the rendezvous");
            let mut values = self.lock();
            if values.joined.contains(&rank) {
                values.lost.get_or_insert(rank);
            } else {
                // it gave up before it knew that it was admitted, and may call again
                values.admitted.remove(&rank);
            }
            drop(values);
            self.changed.notify_all();
        }
    }

    fn release(&self, rank: usize) {
        self.lock().admitted.remove(&rank);
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
        if !self.lock().admitted.insert(hello.rank) {
            return Err(format!("another process is rank {}", hello.rank));
        }
        Ok(())
    }

    /// Answers one rank until it leaves; returns an error if it disconnects without leaving.
    fn answer(&self, rank: usize, stream: &mut TcpStream) -> io::Result<()> {
        loop {
            let request = Request::read(stream)?;
            self.lock().joined.insert(rank);
            let (answer, value) = match request.ask {
                RequestKind::Set => self.set(request.key, request.value),
                RequestKind::Wait => self.wait(&request.key, Duration::from_millis(request.timeout_ms)),
                RequestKind::Count => self.count(request.key),
                RequestKind::Leave => return Ok(()),
                RequestKind::Refusals => {
                    (ReplyKind::Value, self.refusals.summary().unwrap_or_default().into_bytes())
                }
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
