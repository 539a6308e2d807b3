//! Rendezvous server: holds job keys.

use super::accept::{Host, accept_callers};
use super::handshake::{Hello, JobToken, Purpose};
use super::protocol::{ReplyKind, Request, RequestKind, write_answer};
use super::refusals::{Refusal, Refusals};
use super::values::Values;
use crate::error::{Error, Result};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

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
