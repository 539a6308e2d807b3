//! Connects a rank with its neighbors in the tree.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use super::TcpTransport;
use super::door::{Dialer, Door};
use crate::api::Settings;
use crate::communicator::Communicator;
use crate::endpoint::{Endpoint, Mailbox};
use crate::error::{Error, Result};
use crate::rendezvous::{
    Deadline, Hello, JobToken, Purpose, RankIdentity, RendezvousClient, RendezvousConfig, RendezvousServer,
    dial, resolve,
};
use crate::{endpoint, threads};

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
    let listener = TcpListener::bind((ip, 0)).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let (door, calls) = Door::open(listener, rank, size, token.clone())?;
    let door = Arc::new(door);
    let joining = Joining { rank, size, token: &token, deadline, store: &store, door: &door };
    let addresses = joining.addresses(address)?;
    let controls = joining.controls(&addresses, &calls)?;
    let mailbox = Arc::new(Mailbox::new(size, settings.buffered_bytes_max));
    let dialer = Box::new(Dialer { rank, addresses, token, door: door.clone() });
    let started = TcpTransport::start(rank, mailbox.clone(), controls, dialer);
    let started = started.and_then(|transport| door.run(transport.links()).map(|()| transport));
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
    door: &'a Door,
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
        let refused = [("the rendezvous", self.store.refusals()), ("this rank", self.door.refusals())];
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
