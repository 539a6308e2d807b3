//! Connects a rank with all others.

use super::tcp_transport::{Pair, TcpTransport};
use crate::communicator::Communicator;
use crate::endpoint::Endpoint;
use crate::error::{Error, Result};
use crate::mailbox::Mailbox;
use crate::rank_identity::{RankIdentity, RendezvousConfig};
use crate::rendezvous::{
    Deadline, Hello, Host, JobToken, Purpose, Refusal, Refusals, RendezvousClient, RendezvousServer, dial,
    greet_callers, resolve,
};
use crate::settings::Settings;
use crate::threads;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// Rank that is connected with all others.
#[derive(Debug)]
pub struct Session {
    /// Communicator of all ranks of the job.
    pub comm: Communicator,
    /// Key-value store of the job; `None` in a job of one rank.
    pub store: Option<RendezvousClient>,
    _server: Option<RendezvousServer>,
}

/// Joins the job that `identity` describes: finds all other ranks and connects with each.
///
/// Rank 0 hosts the rendezvous server unless the launcher does. A rank listens on the address by which it
/// reaches the rendezvous server, or the one in the identity, on a port that the system chooses. A job of one
/// rank opens no socket.
///
/// # Errors
/// Within the rendezvous time limit of the settings: [`Error::Resolve`], [`Error::Listen`],
/// [`Error::Connect`], [`Error::Missing`]; immediately: [`Error::TokenMissing`], [`Error::TokenRefused`],
/// [`Error::Refused`], [`Error::InvalidSetting`].
pub fn connect(identity: &RankIdentity, settings: Settings) -> Result<Session> {
    settings.check()?;
    // one rank needs no connections: threads give the same interface
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
    let (has_all, refusals) = (Arc::default(), Arc::default());
    let joining = Joining { identity, rendezvous, token, deadline, store: &store, has_all, refusals };
    let pairs = joining.pairs()?;
    let mailbox = Arc::new(Mailbox::new(identity.size, settings.buffered_bytes_max));
    let transport = TcpTransport::start(identity.rank, mailbox.clone(), pairs);
    let transport = Box::new(
        transport.map_err(|source| Error::Io { action: "start threads of connections".into(), source })?,
    );
    store.join();
    let endpoint = Endpoint::new(identity.rank, identity.size, mailbox, transport, settings);
    Ok(Session { comm: Communicator::world(Arc::new(endpoint)), store: Some(store), _server: server })
}

/// Starts the rendezvous server of rank 0, on the listen address if one is set, else on those of the
/// rendezvous.
fn start_server(
    rendezvous: &RendezvousConfig,
    addresses: &[SocketAddr],
    size: usize,
    token: &JobToken,
) -> Result<RendezvousServer> {
    let given = rendezvous.listen.map(|ip| vec![SocketAddr::new(ip, rendezvous.port)]);
    RendezvousServer::start(given.as_deref().unwrap_or(addresses), size, token.clone())
}

struct Joining<'a> {
    identity: &'a RankIdentity,
    rendezvous: &'a RendezvousConfig,
    token: JobToken,
    deadline: Deadline,
    store: &'a RendezvousClient,
    /// Stops the accepting thread.
    has_all: Arc<AtomicBool>,
    /// Connections that the accepting thread refused.
    refusals: Arc<Refusals>,
}

/// Receiver of the connections that higher ranks make.
struct Entrance {
    rank: usize,
    size: usize,
    deadline: Deadline,
    has_all: Arc<AtomicBool>,
    calls: Sender<(Hello, TcpStream)>,
}

impl Host for Entrance {
    type Seat = ();

    fn is_done(&self) -> bool {
        self.has_all.load(Ordering::Relaxed) || self.deadline.left().is_zero()
    }

    fn admit(&mut self, hello: &Hello) -> Result<(), Refusal> {
        let is_expected = hello.size == self.size && (self.rank + 1..self.size).contains(&hello.rank);
        if is_expected && hello.purpose != Purpose::RendezvousClient {
            Ok(())
        } else {
            Err(Refusal::Identity(format!("rank {} does not expect this connection", self.rank)))
        }
    }

    fn seat(&mut self, (): (), hello: Hello, stream: TcpStream) {
        // a dropped receiver already has all connections that it needs
        let _ = self.calls.send((hello, stream));
    }

    fn free(&mut self, (): (), _: &Hello) {}
}

impl Joining<'_> {
    /// Interval at which a waiting rank checks whether another one is gone.
    const CHECK_INTERVAL: Duration = Duration::from_millis(100);

    /// Connects to the lower ranks and accepts connections of the higher ones.
    fn pairs(&self) -> Result<Vec<Option<Pair>>> {
        let (rank, size) = (self.identity.rank, self.identity.size);
        let ip = self.rendezvous.listen.map_or_else(|| self.store.local_ip(), Ok)?;
        let listener = self.listen(ip)?;
        let calls = self.accept(listener)?;
        let addresses = self.addresses()?;
        let mut pairs: Vec<Option<Pair>> = (0..size).map(|_| None).collect();
        // the higher rank of a pair connects, so that each pair connects exactly once
        for (peer, address) in addresses.into_iter().enumerate().take(rank) {
            let call = |purpose| {
                let hello = Hello { purpose, rank, size };
                dial(&[address], hello, &self.token, &format!("rank {peer}"), &self.deadline)
            };
            pairs[peer] = Some(Pair { data: call(Purpose::Data)?, control: call(Purpose::Control)? });
        }
        self.answer_calls(&calls, &mut pairs)?;
        self.has_all.store(true, Ordering::Relaxed);
        Ok(pairs)
    }

    fn listen(&self, ip: IpAddr) -> Result<TcpListener> {
        let rank = self.identity.rank;
        let failed = |source| Error::Listen { rank, address: ip.to_string(), source };
        // port 0: the system chooses, and the store publishes the choice
        let listener = TcpListener::bind((ip, 0)).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        self.store.set(&format!("address/{rank}"), address.to_string().as_bytes())?;
        Ok(listener)
    }

    /// Returns the addresses of all ranks, or fails with the missing ones.
    fn addresses(&self) -> Result<Vec<SocketAddr>> {
        let mut missing = Vec::new();
        let mut addresses = Vec::new();
        for rank in 0..self.identity.size {
            let value = self.store.wait(&format!("address/{rank}"), self.deadline.left())?;
            match value.and_then(|value| String::from_utf8(value).ok()?.parse().ok()) {
                Some(address) => addresses.push(address),
                None => missing.push(rank),
            }
        }
        if missing.is_empty() { Ok(addresses) } else { Err(self.missing(missing)) }
    }

    fn missing(&self, missing: Vec<usize>) -> Error {
        let (rank, size) = (self.identity.rank, self.identity.size);
        // strangers that took up the time of the listeners are a likely cause
        let refused = [("the rendezvous", self.store.refusals()), ("this rank", self.refusals.summary())];
        let refused = refused.into_iter().filter_map(|(by, summary)| Some(format!("; {by} {}", summary?)));
        let (refused, waited_seconds) = (refused.collect(), self.deadline.waited_seconds());
        Error::Missing { rank, size, missing, waited_seconds, refused }
    }

    /// Accepts on a thread, until the deadline or until all ranks are connected.
    fn accept(&self, listener: TcpListener) -> Result<Receiver<(Hello, TcpStream)>> {
        let (calls, called) = channel();
        let (rank, size) = (self.identity.rank, self.identity.size);
        let (deadline, has_all) = (self.deadline, self.has_all.clone());
        let mut entrance = Entrance { rank, size, deadline, has_all, calls };
        let (token, refusals) = (self.token.clone(), self.refusals.clone());
        let accepting = std::thread::Builder::new().name("comm-accept".into());
        let thread = accepting.spawn(move || greet_callers(&listener, &token, &refusals, &mut entrance));
        thread.map_err(|source| Error::Io { action: "start a thread".into(), source })?;
        Ok(called)
    }

    fn answer_calls(&self, calls: &Receiver<(Hello, TcpStream)>, pairs: &mut [Option<Pair>]) -> Result<()> {
        let mut halves: Vec<[Option<TcpStream>; 2]> = pairs.iter().map(|_| [None, None]).collect();
        while let Some(missing) = self.not_connected(pairs) {
            if self.deadline.left().is_zero() {
                return Err(self.missing(missing));
            }
            let Ok((hello, stream)) = calls.recv_timeout(Self::CHECK_INTERVAL.min(self.deadline.left()))
            else {
                // fails if a rank is gone; the key itself is never set
                self.store.wait("never", Duration::ZERO)?;
                continue;
            };
            let peer = hello.rank;
            halves[peer][usize::from(hello.purpose == Purpose::Control)] = Some(stream);
            // the two connections of a peer may arrive in either order
            if let [data @ Some(_), control @ Some(_)] = &mut halves[peer] {
                pairs[peer] = data.take().zip(control.take()).map(|(data, control)| Pair { data, control });
            }
        }
        Ok(())
    }

    fn not_connected(&self, pairs: &[Option<Pair>]) -> Option<Vec<usize>> {
        let is_open = |peer: &usize| *peer != self.identity.rank && pairs[*peer].is_none();
        let open: Vec<usize> = (0..self.identity.size).filter(is_open).collect();
        (!open.is_empty()).then_some(open)
    }
}
