//! Rank listener, which accepts tree children while the job forms and other ranks while it runs, and calls to
//! the listeners of other ranks.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::links::{Dial, Line, Links};
use crate::endpoint;
use crate::error::Error;
use crate::rendezvous::{
    Deadline, Hello, Host, JobToken, Purpose, Refusal, Refusals, Rejection, call, greet_callers,
};

/// Rank listener. The listener thread ends when it is closed or dropped.
#[derive(Debug)]
pub(super) struct Door {
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

impl Door {
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
            if let Err(error) = greet_callers(&listener, &token, &of_thread.refusals, &mut entrance) {
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

impl Drop for Door {
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
    pub(super) door: Arc<Door>,
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
        self.door.close();
    }
}
