//! Rendezvous server: holds job keys.
//!
//! Job key values, and ranks that have joined or left: state shared by the server threads.

use super::accept::{Host, accept_callers};
use super::handshake::{Hello, JobToken, Purpose};
use super::protocol::{ReplyKind, Request, RequestKind, write_answer};
use super::refusals::{Refusal, Refusals};
use crate::error::{Error, Result};
use crate::sync::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Key-value store for one job. Serves on separate threads until it is dropped.
#[derive(Debug)]
pub struct RendezvousServer {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    size: usize,
    token: JobToken,
    values: Values,
    refusals: Refusals,
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
        let shared =
            Arc::new(Shared { size, token, values: Values::default(), refusals: Refusals::default() });
        let serving = shared.clone();
        std::thread::Builder::new()
            .name("comm-store".into())
            .spawn(move || serving.serve(&listener))
            .map_err(failed)?;
        Ok(Self { address, shared })
    }

    /// Returns the address that the server listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for RendezvousServer {
    fn drop(&mut self) {
        self.shared.values.close();
    }
}

/// Admits the ranks in the job.
struct Entrance(Arc<Shared>);

impl Host for Entrance {
    /// Hands the connection to the thread for the rank.
    type Seat = SyncSender<TcpStream>;

    fn is_done(&self) -> bool {
        self.0.values.is_over() || self.0.values.joined() == self.0.size
    }

    fn admit(&mut self, hello: &Hello) -> Result<Self::Seat, Refusal> {
        self.0.admit(hello).map_err(Refusal::Identity)?;
        let (seat, taken) = sync_channel(1);
        let (shared, rank) = (self.0.clone(), hello.rank);
        let thread = std::thread::Builder::new().name(format!("comm-store-{rank}"));
        match thread.spawn(move || shared.serve_rank(rank, &taken)) {
            Ok(_) => Ok(seat),
            Err(source) => {
                self.0.values.release(hello.rank);
                Err(Refusal::Resources(source))
            }
        }
    }

    fn seat(&mut self, seat: Self::Seat, _: Hello, stream: TcpStream) {
        // the thread waits for this stream
        let _ = seat.send(stream);
    }

    fn free(&mut self, _: Self::Seat, hello: &Hello) {
        self.0.values.release(hello.rank);
    }
}

impl Shared {
    /// Accepts callers until all ranks have joined.
    fn serve(self: &Arc<Self>, listener: &TcpListener) {
        let served = accept_callers(listener, &self.token, &self.refusals, &mut Entrance(self.clone()));
        if let Err(error) = served {
            tracing::warn!(%error, "the rendezvous no longer listens");
        }
    }

    fn serve_rank(&self, rank: usize, taken: &Receiver<TcpStream>) {
        // nothing arrives for a caller that is gone
        let Ok(mut stream) = taken.recv() else { return };
        // a rank that disconnects without leaving fails all remaining ranks' waits immediately
        if let Err(error) = self.answer(rank, &mut stream) {
            tracing::debug!(rank, %error, "a rank left the rendezvous");
            self.values.lose(rank);
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
        if !self.values.admit(hello.rank) {
            return Err(format!("another process is rank {}", hello.rank));
        }
        Ok(())
    }

    /// Answers one rank until it leaves; returns an error if it disconnects without leaving.
    fn answer(&self, rank: usize, stream: &mut TcpStream) -> io::Result<()> {
        loop {
            let request = Request::read(stream)?;
            self.values.join(rank);
            let (answer, value) = match request.ask {
                RequestKind::Set => self.values.set(request.key, request.value),
                RequestKind::Wait => {
                    self.values.wait(&request.key, Duration::from_millis(request.timeout_ms))
                }
                RequestKind::Addresses => {
                    let limit = Duration::from_millis(request.timeout_ms);
                    self.values.exchange_address(rank, request.value, self.size, limit)
                }
                RequestKind::Count => self.values.count(request.key),
                RequestKind::Leave => return Ok(()),
                RequestKind::Refusals => {
                    (ReplyKind::Value, self.refusals.summary().unwrap_or_default().into_bytes())
                }
            };
            write_answer(stream, answer, &value)?;
        }
    }
}

/// Values that are set once, and waits for them.
#[derive(Debug, Default)]
pub(super) struct Values {
    state: Mutex<ValuesState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ValuesState {
    of_key: BTreeMap<String, Vec<u8>>,
    counts: BTreeMap<String, u64>,
    /// Published address for every rank.
    addresses: BTreeMap<usize, Vec<u8>>,
    /// Ranks with a connection.
    admitted: BTreeSet<usize>,
    /// Ranks that have sent a request: they know that they were admitted.
    joined: BTreeSet<usize>,
    lost: Option<usize>,
    /// Whether the server is gone, and with it all waits.
    is_over: bool,
}

impl Values {
    /// Sets the value for a key that has none.
    pub(super) fn set(&self, key: String, value: Vec<u8>) -> (ReplyKind, Vec<u8>) {
        let mut state = self.lock();
        if state.of_key.contains_key(&key) {
            return (ReplyKind::Taken, Vec::new());
        }
        state.of_key.insert(key, value);
        self.changed.notify_all();
        (ReplyKind::Value, Vec::new())
    }

    /// Adds one to a counter.
    pub(super) fn count(&self, key: String) -> (ReplyKind, Vec<u8>) {
        let mut state = self.lock();
        let count = state.counts.entry(key).or_default();
        *count += 1;
        (ReplyKind::Value, count.to_le_bytes().to_vec())
    }

    /// Waits for the value of a key, at most until a rank is lost, the server is gone or the time limit is
    /// reached.
    pub(super) fn wait(&self, key: &str, timeout: Duration) -> (ReplyKind, Vec<u8>) {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            if let Some(value) = state.of_key.get(key) {
                return (ReplyKind::Value, value.clone());
            }
            if let Some(rank) = state.lost {
                return (ReplyKind::Lost, (rank as u32).to_le_bytes().to_vec());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || state.is_over {
                return (ReplyKind::TimedOut, Vec::new());
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Publishes the address of a rank and waits for the addresses of all ranks, which are returned in rank
    /// order, one per line. If the time limit is reached first, the value contains the missing ranks, four
    /// bytes each.
    pub(super) fn exchange_address(
        &self,
        rank: usize,
        address: Vec<u8>,
        size: usize,
        timeout: Duration,
    ) -> (ReplyKind, Vec<u8>) {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        state.addresses.insert(rank, address);
        if state.addresses.len() == size {
            self.changed.notify_all();
        }
        loop {
            if state.addresses.len() == size {
                let addresses: Vec<_> = state.addresses.values().map(Vec::as_slice).collect();
                return (ReplyKind::Value, addresses.join(&b'\n'));
            }
            if let Some(rank) = state.lost {
                return (ReplyKind::Lost, (rank as u32).to_le_bytes().to_vec());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || state.is_over {
                let missing = (0..size).filter(|rank| !state.addresses.contains_key(rank));
                return (ReplyKind::TimedOut, missing.flat_map(|rank| (rank as u32).to_le_bytes()).collect());
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Records a rank connection; returns whether it is the only connection of the rank.
    pub(super) fn admit(&self, rank: usize) -> bool {
        self.lock().admitted.insert(rank)
    }

    /// Forgets a rank that was admitted but is gone: the rank may call again.
    pub(super) fn release(&self, rank: usize) {
        self.lock().admitted.remove(&rank);
    }

    /// Records that a rank knows about its admission.
    pub(super) fn join(&self, rank: usize) {
        self.lock().joined.insert(rank);
    }

    /// Returns the number of ranks that have joined.
    pub(super) fn joined(&self) -> usize {
        self.lock().joined.len()
    }

    /// Records that a rank disconnected without leaving, which ends the waits of all remaining ranks if it
    /// had joined.
    pub(super) fn lose(&self, rank: usize) {
        let mut state = self.lock();
        if state.joined.contains(&rank) {
            state.lost.get_or_insert(rank);
        } else {
            // it gave up before it knew that it was admitted, and may call again
            state.admitted.remove(&rank);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends all waits.
    pub(super) fn close(&self) {
        // changed under the lock: a wait that has just checked it would miss the notification
        self.lock().is_over = true;
        self.changed.notify_all();
    }

    /// Returns whether [`close`](Self::close) was called.
    pub(super) fn is_over(&self) -> bool {
        self.lock().is_over
    }

    fn lock(&self) -> MutexGuard<'_, ValuesState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
