//! Rank listener, which accepts tree children while the job forms and other ranks while it runs, and calls to
//! the listeners of other ranks.
//!
//! Connects a rank with its neighbors in the tree.

use super::links::{Dial, Line, Links};
use super::tcp_transport::TcpTransport;
use crate::api::Settings;
use crate::communicator::Communicator;
use crate::endpoint::{Endpoint, Mailbox};
use crate::error::{Error, Result};
use crate::rendezvous::{
    Deadline, Hello, Host, JobToken, Purpose, RankIdentity, Refusal, Refusals, Rejection, RendezvousClient,
    RendezvousConfig, RendezvousServer, accept_callers, call, dial, resolve,
};
use crate::{endpoint, threads};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Rank listener. The listener thread ends when it is closed or dropped.
#[derive(Debug)]
pub(super) struct RankListener {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    is_closed: AtomicBool,
    refusals: Refusals,
    phase: Mutex<Phase>,
}

/// Call handling.
#[derive(Debug)]
enum Phase {
    /// The job forms: children are handed over, other calls wait.
    Forming { children: Sender<(usize, TcpStream)>, early: Vec<(Hello, TcpStream)> },
    /// The job runs.
    Running(Arc<Links>),
}

impl RankListener {
    /// Starts to accept calls, and returns the control connections of the children as they arrive.
    pub(super) fn open(
        listener: TcpListener,
        rank: usize,
        size: usize,
        token: JobToken,
    ) -> Result<(Self, Receiver<(usize, TcpStream)>), Error> {
        let failed = |source| Error::Io { action: "start to accept connections".into(), source };
        let address = listener.local_addr().map_err(failed)?;
        let (children, calls) = channel();
        let phase = Mutex::new(Phase::Forming { children, early: Vec::new() });
        let shared =
            Arc::new(Shared { is_closed: AtomicBool::new(false), refusals: Refusals::default(), phase });
        let mut entrance = Entrance { rank, size, shared: shared.clone() };
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new().name("comm-accept".into()).spawn(move || {
            if let Err(error) = accept_callers(&listener, &token, &of_thread.refusals, &mut entrance) {
                tracing::warn!(%error, "a rank no longer listens");
            }
        });
        Ok((Self { address, shared, thread: Mutex::new(Some(thread.map_err(failed)?)) }, calls))
    }

    /// Returns the number of rejected connections, and the reasons; `None` if there are none.
    pub(super) fn refusals(&self) -> Option<String> {
        self.shared.refusals.summary()
    }

    /// Hands all calls to the job, which runs from now on.
    pub(super) fn run(&self, links: &Arc<Links>) -> std::io::Result<()> {
        let mut phase = self.shared.lock();
        if let Phase::Forming { early, .. } = std::mem::replace(&mut *phase, Phase::Running(links.clone())) {
            for (hello, stream) in early {
                let _ = answer(links, &hello)?.send(stream);
            }
        }
        Ok(())
    }

    /// Stops listening.
    pub(super) fn close(&self) {
        let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        self.shared.is_closed.store(true, Ordering::Relaxed);
        // wakes the thread, which may have ended because of a listener error
        drop(TcpStream::connect_timeout(&self.address, Duration::from_millis(100)));
        if thread.join().is_err() {
            tracing::warn!("the thread that accepts connections panicked");
        }
        // the job ends with its last thread
        *self.shared.lock() = Phase::Forming { children: channel().0, early: Vec::new() };
    }
}

impl Drop for RankListener {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Admits the ranks in the job.
struct Entrance {
    rank: usize,
    size: usize,
    shared: Arc<Shared>,
}

impl Host for Entrance {
    /// Thread that serves the connection; `None` while the job forms.
    type Seat = Option<SyncSender<TcpStream>>;

    fn is_done(&self) -> bool {
        self.shared.is_closed.load(Ordering::Relaxed)
    }

    /// The end of the listener wakes the listener thread.
    fn idle(&self) -> Duration {
        Duration::from_secs(1)
    }

    fn admit(&mut self, hello: &Hello) -> Result<Self::Seat, Refusal> {
        let unexpected = || Refusal::Identity(format!("rank {} does not expect this connection", self.rank));
        if hello.size != self.size || hello.rank >= self.size || hello.rank == self.rank {
            return Err(unexpected());
        }
        let phase = self.shared.lock();
        match (hello.purpose, &*phase) {
            (Purpose::Control, Phase::Forming { .. })
                if endpoint::children(self.rank, self.size).any(|child| child == hello.rank) =>
            {
                Ok(None)
            }
            (Purpose::Data | Purpose::Inquiry, Phase::Forming { .. }) => Ok(None),
            (Purpose::Data | Purpose::Inquiry, Phase::Running(links)) => {
                answer(links, hello).map(Some).map_err(Refusal::Resources)
            }
            _ => Err(unexpected()),
        }
    }

    fn seat(&mut self, seat: Self::Seat, hello: Hello, stream: TcpStream) {
        let mut phase = self.shared.lock();
        match (seat, &mut *phase) {
            // the thread waits for this stream
            (Some(seat), _) => drop(seat.send(stream)),
            // a dropped receiver already has all connections that it needs
            (None, Phase::Forming { children, .. }) if hello.purpose == Purpose::Control => {
                drop(children.send((hello.rank, stream)));
            }
            (None, Phase::Forming { early, .. }) => early.push((hello, stream)),
            // the job started to run in between: the caller calls again
            (None, Phase::Running(links)) => drop(answer(links, &hello).map(|seat| seat.send(stream))),
        }
    }

    fn free(&mut self, _: Self::Seat, _: &Hello) {}
}

/// Starts the thread that serves a connection, and returns a channel for the connection.
fn answer(links: &Arc<Links>, hello: &Hello) -> std::io::Result<SyncSender<TcpStream>> {
    let (seat, taken) = sync_channel(1);
    let (links, peer, purpose) = (links.clone(), hello.rank, hello.purpose);
    let name = if purpose == Purpose::Data { "recv" } else { "answer" };
    std::thread::Builder::new().name(format!("comm-{name}-{peer}")).spawn(move || {
        // nothing arrives for a caller that is gone
        let Ok(stream) = taken.recv() else { return };
        if purpose == Purpose::Data {
            links.read_data(peer, stream);
        } else {
            links.answer(peer, &stream);
        }
    })?;
    Ok(seat)
}

/// Pause between two calls.
const RETRY: Duration = Duration::from_millis(20);

/// Addresses of all ranks, and the listener of this rank.
#[derive(Debug)]
pub(super) struct Dialer {
    pub(super) rank: usize,
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) token: JobToken,
    pub(super) listener: Arc<RankListener>,
}

impl Dial for Dialer {
    fn dial(&self, peer: usize, line: Line, patience: Duration) -> io::Result<TcpStream> {
        let purpose = match line {
            Line::Data => Purpose::Data,
            Line::Inquiry => Purpose::Inquiry,
        };
        let hello = Hello { purpose, rank: self.rank, size: self.addresses.len() };
        let deadline = Deadline::after(patience);
        loop {
            let error = match call(&self.addresses[peer], hello, &self.token, &deadline) {
                Ok(stream) => return Ok(stream),
                Err(Rejection::Io(error)) => error,
                Err(Rejection::WrongToken) => io::Error::other("another job listens on its port"),
                Err(Rejection::Refused(reason)) => io::Error::other(reason),
            };
            // a busy listener rejects for lack of room: the next call may succeed
            if error.kind() == io::ErrorKind::ConnectionRefused || deadline.left().is_zero() {
                return Err(error);
            }
            std::thread::sleep(RETRY.min(deadline.left()));
        }
    }

    fn close(&self) {
        self.listener.close();
    }
}

/// Maximum number of ranks for the TCP transport.
///
/// The transport is designed for up to 64 ranks on one machine. Twice as many still work; beyond that, a data
/// connection and two threads for every two ranks that exchange messages do not scale, nor do messages
/// through host memory: NCCL and MPI have better means.
pub const RANKS_MAX: usize = 128;

/// Rank that has joined a job.
#[derive(Debug)]
pub struct Session {
    /// Communicator for all ranks in the job.
    pub comm: Communicator,
    /// Job key-value store; `None` in a single-rank job. The store host has a connection and a thread for
    /// every rank that keeps it, so a job that does not need it sets it to `None`.
    pub store: Option<RendezvousClient>,
    _server: Option<RendezvousServer>,
}

/// Joins the job that `identity` describes: finds all ranks and connects with the tree neighbors. Data
/// connections are created on first use.
///
/// Rank 0 hosts the rendezvous server unless the launcher does. A rank listens on the address by which it
/// reaches the rendezvous server, or on the address in the identity, on a port that the system chooses. A
/// single-rank job opens no socket.
///
/// # Errors
/// Within the rendezvous time limit of the settings: [`Error::Resolve`], [`Error::Listen`],
/// [`Error::Connect`], [`Error::Missing`]; immediately: [`Error::TooManyRanks`] beyond [`RANKS_MAX`],
/// [`Error::TokenMissing`], [`Error::TokenRefused`], [`Error::Refused`], [`Error::InvalidSetting`].
pub fn connect(identity: &RankIdentity, settings: Settings) -> Result<Session> {
    if identity.size > RANKS_MAX {
        return Err(Error::TooManyRanks { size: identity.size, max: RANKS_MAX });
    }
    connect_tree(identity, settings)
}

/// Joins a job with any number of ranks, whose data use a different transport, such as NCCL.
///
/// Without messages between ranks, a rank has at most five connections. Ranks that exchange messages, or call
/// collectives other than the tree collectives ([`Comm`](crate::Comm)), connect with each other, as in every
/// job.
///
/// # Errors
/// Same as [`connect`], except for the number of ranks.
pub fn connect_tree(identity: &RankIdentity, settings: Settings) -> Result<Session> {
    settings.check()?;
    // a single rank needs no connections: threads have the same interface
    let Some(rendezvous) = &identity.rendezvous else {
        let mut ranks = threads::world(1, settings)?;
        return Ok(Session { comm: ranks.remove(0), store: None, _server: None });
    };
    if rendezvous.listen.is_some_and(|ip| ip.is_unspecified()) {
        let reason = "an unspecified address; use one by which other ranks reach this one".into();
        return Err(Error::InvalidSetting { setting: "listen", reason });
    }
    let deadline = Deadline::after(settings.rendezvous);
    let Some(token) = rendezvous.token.clone() else {
        return Err(Error::TokenMissing { size: identity.size });
    };
    let addresses = resolve(&rendezvous.host, rendezvous.port, &deadline)?;
    if addresses.iter().any(|address| address.ip().is_unspecified()) {
        let reason = format!(
            "`{}` is an unspecified address; set `MASTER_ADDR` to the name or address of the machine of rank 0",
            rendezvous.host
        );
        return Err(Error::InvalidSetting { setting: "rendezvous host", reason });
    }
    let is_hosting = identity.rank == 0 && !rendezvous.is_hosted_by_launcher;
    let server =
        is_hosting.then(|| start_server(rendezvous, &addresses, identity.size, &token)).transpose()?;
    let addresses = server.as_ref().map_or(addresses, |server| vec![server.address()]);
    let store = RendezvousClient::connect(&addresses, identity.rank, identity.size, &token, &deadline)?;
    let (rank, size) = (identity.rank, identity.size);
    let ip = rendezvous.listen.map_or_else(|| store.local_ip(), Ok)?;
    let failed = |source| Error::Listen { rank, address: ip.to_string(), source };
    // port 0: the system chooses, and the store publishes the choice
    let socket = TcpListener::bind((ip, 0)).map_err(failed)?;
    let address = socket.local_addr().map_err(failed)?;
    let (listener, calls) = RankListener::open(socket, rank, size, token.clone())?;
    let listener = Arc::new(listener);
    let joining = Joining { rank, size, token: &token, deadline, store: &store, listener: &listener };
    let addresses = joining.addresses(address)?;
    let controls = joining.controls(&addresses, &calls)?;
    let mailbox = Arc::new(Mailbox::new(size, settings.buffered_bytes_max));
    let dialer = Box::new(Dialer { rank, addresses, token, listener: listener.clone() });
    let started = TcpTransport::start(rank, mailbox.clone(), controls, dialer);
    let started = started.and_then(|transport| listener.run(transport.links()).map(|()| transport));
    let transport = Box::new(
        started.map_err(|source| Error::Io { action: "start threads of connections".into(), source })?,
    );
    store.join();
    let endpoint = Endpoint::new(rank, size, mailbox, transport, settings);
    Ok(Session { comm: Communicator::world(Arc::new(endpoint)), store: Some(store), _server: server })
}

/// Starts the rendezvous server on rank 0, on the listen address if set, otherwise on the rendezvous
/// addresses.
fn start_server(
    rendezvous: &RendezvousConfig,
    addresses: &[SocketAddr],
    size: usize,
    token: &JobToken,
) -> Result<RendezvousServer> {
    let given = rendezvous.listen.map(|ip| vec![SocketAddr::new(ip, rendezvous.port)]);
    RendezvousServer::start(given.as_deref().unwrap_or(addresses), size, token.clone())
}

/// Rank that has not found all ranks.
struct Joining<'a> {
    rank: usize,
    size: usize,
    token: &'a JobToken,
    deadline: Deadline,
    store: &'a RendezvousClient,
    listener: &'a RankListener,
}

impl Joining<'_> {
    /// Interval at which a waiting rank checks whether another rank is gone.
    const CHECK_INTERVAL: Duration = Duration::from_millis(100);

    /// Returns all rank addresses, or fails with the missing ranks.
    fn addresses(&self, own: SocketAddr) -> Result<Vec<SocketAddr>> {
        self.store.exchange_address(own, self.deadline.left())?.map_err(|missing| self.missing(missing))
    }

    fn missing(&self, missing: Vec<usize>) -> Error {
        // strangers that used up the listeners' time are a likely cause
        let refused = [("the rendezvous", self.store.refusals()), ("this rank", self.listener.refusals())];
        let refused = refused.into_iter().filter_map(|(by, summary)| Some(format!("; {by} {}", summary?)));
        let (refused, waited_seconds) = (refused.collect(), self.deadline.waited_seconds());
        Error::Missing { rank: self.rank, size: self.size, missing, waited_seconds, refused }
    }

    /// Connects to the parent in the tree and waits for calls from the children.
    fn controls(
        &self,
        addresses: &[SocketAddr],
        calls: &Receiver<(usize, TcpStream)>,
    ) -> Result<Vec<Option<TcpStream>>> {
        let mut controls: Vec<Option<TcpStream>> = (0..self.size).map(|_| None).collect();
        if let Some(parent) = endpoint::parent(self.rank) {
            let hello = Hello { purpose: Purpose::Control, rank: self.rank, size: self.size };
            let peer = format!("rank {parent}");
            controls[parent] = Some(dial(&[addresses[parent]], hello, self.token, &peer, &self.deadline)?);
        }
        loop {
            let is_missing = |child: &usize| controls[*child].is_none();
            let missing: Vec<usize> = endpoint::children(self.rank, self.size).filter(is_missing).collect();
            if missing.is_empty() {
                return Ok(controls);
            }
            if self.deadline.left().is_zero() {
                return Err(self.missing(missing));
            }
            match calls.recv_timeout(Self::CHECK_INTERVAL.min(self.deadline.left())) {
                // the last call counts: a child that abandoned its first call calls again
                Ok((child, stream)) => controls[child] = Some(stream),
                // fails if a rank is gone; the key itself is never set
                Err(_) => drop(self.store.wait("never", Duration::ZERO)?),
            }
        }
    }
}
