//! State shared by the connection threads of a rank: control connections in the tree, how ranks leave and
//! how the job ends, and the interface by which a rank calls other ranks.

use std::fmt::Debug;
use std::io;
use std::net::Shutdown;
use std::sync::{Arc, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::socket::{Socket, send_all};
use super::wire::{Control, ControlLine};
use crate::endpoint;
use crate::endpoint::Mailbox;
use crate::error::{Cause, Failure, StepContext};
use crate::message::{Buffer, Header, Message};
use crate::sync::{AtomicBool, Condvar, Mutex, MutexGuard, Ordering, thread};

/// Job failure.
#[derive(Debug, Default)]
struct Ending {
    failure: Option<Failure>,
    /// Whether all neighbors have been notified, as far as possible.
    is_passed_on: bool,
}

/// Rank connections.
#[derive(Debug)]
pub(super) struct Links {
    pub(super) rank: usize,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) dial: Box<dyn Dial>,
    /// Control connection to each neighbor in the tree; `None` for other ranks.
    controls: Vec<Option<Mutex<ControlLine>>>,
    /// Leave progress for each rank.
    pub(super) leaving: Mutex<Vec<Leaving>>,
    /// Notified when a rank leaves, and when the job fails.
    pub(super) left: Condvar,
    /// Data connections from other ranks to this rank.
    incoming: Mutex<Vec<Arc<Socket>>>,
    ending: Mutex<Ending>,
    /// Notified once all neighbors know the failure.
    passed_on: Condvar,
    /// Whether this rank is leaving, so that ending connections are expected.
    is_closing: AtomicBool,
}

impl Links {
    /// Time limit for sending a control message, to a single neighbor or to all.
    const CONTROL_PATIENCE: Duration = Duration::from_secs(1);
    /// Interval at which a full socket is tried again.
    const CONTROL_RETRY: Duration = Duration::from_millis(1);
    /// Time limit for the arrival, over the tree, of the reason why a data connection ended.
    pub(super) const NEWS: Duration = Duration::from_secs(2);

    pub(super) fn new(
        rank: usize,
        mailbox: Arc<Mailbox>,
        controls: Vec<Option<Arc<Socket>>>,
        dial: Box<dyn Dial>,
    ) -> Self {
        let line = |stream| Mutex::new(ControlLine::new(stream));
        Self {
            rank,
            mailbox,
            dial,
            leaving: Mutex::new(vec![Leaving::default(); controls.len()]),
            left: Condvar::new(),
            controls: controls.into_iter().map(|control| control.map(line)).collect(),
            incoming: Mutex::default(),
            ending: Mutex::default(),
            passed_on: Condvar::new(),
            is_closing: AtomicBool::new(false),
        }
    }

    /// Returns the number of ranks in the job.
    pub(super) fn size(&self) -> usize {
        self.controls.len()
    }

    /// Sends a control message to a neighbor; returns whether it was sent. A neighbor that does not accept it
    /// is detected elsewhere.
    pub(super) fn tell(&self, peer: usize, control: &Control) -> bool {
        self.tell_all(vec![peer], control)
    }

    /// Sends a control message to several neighbors at the same time; returns whether all accepted it.
    ///
    /// The connection to a neighbor that does not accept it in time is closed, because the neighbor may have
    /// received a part.
    fn tell_all(&self, peers: Vec<usize>, control: &Control) -> bool {
        let (frame, deadline) = (control.encode(), Instant::now() + Self::CONTROL_PATIENCE);
        let lines = peers.into_iter().filter_map(|peer| self.controls.get(peer)?.as_ref());
        let mut waiting: Vec<(&Mutex<ControlLine>, bool)> = lines.map(|line| (line, false)).collect();
        let mut is_sent = true;
        loop {
            waiting.retain_mut(|(line, is_queued)| {
                // another thread may be sending; meanwhile continue with the other neighbors
                let mut line = match line.try_lock() {
                    Ok(line) => line,
                    Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                    Err(TryLockError::WouldBlock) => return true,
                };
                if !std::mem::replace(is_queued, true) {
                    line.push(&frame);
                }
                let is_done = line.flush();
                if !is_done && Instant::now() >= deadline {
                    line.close();
                }
                is_sent &= is_done || line.is_open();
                !is_done && line.is_open()
            });
            if waiting.is_empty() {
                return is_sent;
            }
            if Instant::now() >= deadline {
                return false;
            }
            thread::sleep(Self::CONTROL_RETRY);
        }
    }

    /// Passes a message on in the tree, away from the neighbor that sent it. The ranks beyond a neighbor that
    /// is gone are called directly, so that no part of the tree is cut off.
    ///
    /// - `silent`: a rank that does not answer, and therefore passes nothing on
    pub(super) fn pass_on(&self, from: Option<usize>, control: &Control, silent: Option<usize>) {
        let onward = |&peer: &usize| self.controls[peer].is_some() && Some(peer) != from;
        let ranks = self.leaving().clone();
        let is_gone = |rank: usize| ranks[rank].is_announced || silent == Some(rank);
        let (gone, here): (Vec<_>, Vec<_>) = (0..self.size()).filter(onward).partition(|&neighbor| {
            // a leaving rank passes messages on until its connection ends
            silent == Some(neighbor) || is_gone(neighbor) && ranks[neighbor].is_disconnected
        });
        self.tell_all(here, control);
        let deadline = Instant::now() + Self::CONTROL_PATIENCE;
        for neighbor in gone {
            for rank in endpoint::beyond(self.rank, neighbor, self.size(), is_gone) {
                let left = deadline.saturating_duration_since(Instant::now());
                let called = self.dial.dial(rank, Line::Inquiry, left);
                if let Err(error) = called.and_then(|stream| send_all(&stream, &control.encode())) {
                    tracing::debug!(rank, %error, "a rank beyond one that is gone could not be told");
                }
            }
        }
    }

    /// Aborts the job: notifies all ranks over the tree, then unblocks all local waits. Returns the first
    /// failure, which is kept.
    ///
    /// A rank that learns about a failure passes it on before its own waits end. Otherwise other ranks could
    /// notice the end of that rank before the reason. Notifying takes one time limit, for any number of
    /// neighbors that do not accept the message.
    pub(super) fn end_job(&self, failure: Failure) -> Failure {
        let mut ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = ending.failure.clone() {
            // a caller that ends its process must not do so while another thread notifies the neighbors
            let patience = 2 * Self::CONTROL_PATIENCE;
            let is_open = |ending: &mut Ending| !ending.is_passed_on;
            drop(self.passed_on.wait_timeout_while(ending, patience, is_open));
            return kept;
        }
        // kept before neighbors are notified, so that a second failure cannot overtake the first
        ending.failure = Some(failure.clone());
        drop(ending);
        let silent = failure.culprit.filter(|_| failure.cause == Cause::TimedOut);
        self.pass_on(None, &Control::Abort(failure.clone()), silent);
        self.mailbox.set_failure(failure.clone());
        self.ending.lock().unwrap_or_else(PoisonError::into_inner).is_passed_on = true;
        self.passed_on.notify_all();
        self.notify_left();
        // last, because it may not read; a rank that is merely slow must not continue alone
        if let Some(rank) = silent.filter(|&rank| self.controls[rank].is_some()) {
            self.tell_all(vec![rank], &Control::Abort(failure.clone()));
        }
        failure
    }

    /// Reads the control connection of a neighbor until it ends.
    pub(super) fn read_controls(&self, peer: usize, mut stream: &Socket) {
        loop {
            match Control::read(&mut stream, self.size()) {
                Ok(Some(control)) => self.take_control(peer, control),
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    let message = format!("rank {peer} sent a control message that no rank sends");
                    self.fail(Cause::Protocol, peer, message);
                    break;
                }
                Ok(None) | Err(_) => break,
            }
        }
        // by now its last control message, which may name the actual failure, has been read
        self.leaving()[peer].is_disconnected = true;
        if !self.is_leaving(peer) && !self.is_closing() {
            self.died(peer);
        }
    }

    /// Processes a message that a rank sent over the tree, or directly.
    pub(super) fn take_control(&self, peer: usize, control: Control) {
        match control {
            Control::Abort(failure) => {
                self.end_job(failure);
            }
            Control::Leave { rank, to } => self.set_leaving(peer, rank, to),
            Control::Facts(header, numbers) => self.deliver_facts(peer, header, numbers),
            // status messages have separate connections
            Control::StatusRequest | Control::StatusReply(_) => {}
        }
    }

    fn deliver_facts(&self, peer: usize, header: Header, numbers: Vec<u64>) {
        self.mailbox.deliver(peer, Message { header, buffer: Buffer::U64(numbers) });
    }

    /// Records a data connection from another rank, which [`shut_down`](Self::shut_down) closes.
    pub(super) fn add_incoming(&self, stream: Arc<Socket>) {
        self.incoming.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
        if self.mailbox.is_closed() {
            self.shut_down();
        }
    }

    /// Records that a data connection ended without a farewell. The reason arrives over the tree; without a
    /// reason, the peer process died.
    pub(super) fn data_ended(&self, peer: usize) {
        if !self.is_closing() && !self.mailbox.wait_for_end(peer, Self::NEWS) {
            self.died(peer);
        }
    }

    fn died(&self, peer: usize) {
        let heard = self.mailbox.heard(peer);
        let heard = heard.map_or("before it sent anything".to_owned(), |at| format!("last heard of at {at}"));
        self.fail(Cause::Died, peer, format!("rank {peer} died: its connections closed, {heard}"));
    }

    /// Aborts the job and blames a peer.
    pub(super) fn fail(&self, cause: Cause, peer: usize, message: String) {
        let status = self.mailbox.status();
        let at = status.wait.map(|wait| wait.at).or(status.last).unwrap_or(StepContext::step(0, "start"));
        let failure = Failure { cause, culprit: Some(peer), by: self.rank, at, message };
        self.end_job(failure);
    }

    /// Ignores ending connections from now on.
    pub(super) fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
        self.notify_left();
    }

    pub(super) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Relaxed)
    }

    /// Closes the connections that other threads read.
    pub(super) fn shut_down(&self) {
        for line in self.controls.iter().flatten() {
            line.lock().unwrap_or_else(PoisonError::into_inner).close();
        }
        for stream in self.incoming.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // closing a connection that has already ended is not an error
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Leave progress of a rank.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Leaving {
    /// Whether the rank has announced that it leaves, after the last control message.
    pub(super) is_announced: bool,
    /// Whether the data connection has ended with a farewell, after the last message.
    pub(super) has_said_farewell: bool,
    /// Whether the control connection has ended.
    pub(super) is_disconnected: bool,
}

impl Links {
    /// Announces that this rank leaves.
    ///
    /// - `to`: ranks to which it has a data connection
    pub(super) fn leave(&self, to: Vec<usize>) {
        self.pass_on(None, &Control::Leave { rank: self.rank, to }, None);
    }

    /// Records and passes on that a rank leaves.
    pub(super) fn set_leaving(&self, from: usize, rank: usize, to: Vec<usize>) {
        let mut leaving = self.leaving();
        let is_known = std::mem::replace(&mut leaving[rank].is_announced, true);
        let has_said_farewell = leaving[rank].has_said_farewell;
        drop(leaving);
        if is_known {
            return;
        }
        self.left.notify_all();
        // the last message comes before the farewell on the data connection
        if has_said_farewell || !to.contains(&self.rank) {
            self.mailbox.set_left(rank);
        }
        self.pass_on(Some(from), &Control::Leave { rank, to }, None);
    }

    pub(super) fn leaving(&self) -> MutexGuard<'_, Vec<Leaving>> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes threads that wait for ranks to leave.
    pub(super) fn notify_left(&self) {
        // a wait that has just checked would miss the notification
        drop(self.leaving());
        self.left.notify_all();
    }

    pub(super) fn is_leaving(&self, rank: usize) -> bool {
        self.leaving()[rank].is_announced
    }

    /// Waits until all children leave as well: they may need this rank to reach other ranks.
    pub(super) fn wait_for_children(&self, timeout: Duration) {
        let stays = |leaving: &mut Vec<Leaving>| {
            let mut children = endpoint::children(self.rank, self.size());
            self.mailbox.failure().is_none() && children.any(|child| !leaving[child].is_announced)
        };
        drop(self.left.wait_timeout_while(self.leaving(), timeout, stays));
    }

    /// Records the farewell of a peer: all messages have arrived on the data connection. The peer has left
    /// once the announcement also arrives, or cannot arrive over a tree that falls apart.
    pub(super) fn farewell(&self, peer: usize) {
        let mut leaving = self.leaving();
        leaving[peer].has_said_farewell = true;
        let is_open = |leaving: &mut Vec<Leaving>| {
            !leaving[peer].is_announced && !self.is_closing() && self.mailbox.failure().is_none()
        };
        drop(self.left.wait_timeout_while(leaving, Self::NEWS, is_open));
        self.mailbox.set_left(peer);
    }
}

/// Purpose of a connection that is created while the job runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Line {
    /// Messages from the caller.
    Data,
    /// One control message from the caller, and the reply.
    Inquiry,
}

/// Calls other ranks.
pub(super) trait Dial: Send + Sync + Debug {
    /// Connects to a rank, within a time limit.
    ///
    /// # Errors
    /// `ConnectionRefused` immediately if the rank process no longer listens.
    fn dial(&self, peer: usize, line: Line, patience: Duration) -> io::Result<Socket>;

    /// Accepts no more calls.
    fn close(&self);
}

/// No other rank can be called.
#[derive(Debug)]
pub(super) struct ClosedPort;

impl Dial for ClosedPort {
    fn dial(&self, _: usize, _: Line, _: Duration) -> io::Result<Socket> {
        Err(io::ErrorKind::ConnectionRefused.into())
    }

    fn close(&self) {}
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::{ClosedPort, *};
    use crate::endpoint::{OpenWait, Status};

    fn failure() -> Failure {
        let at = StepContext::step(3, "forward");
        Failure { cause: Cause::Caller, culprit: Some(0), by: 0, at, message: "enough".into() }
    }

    /// Returns the links for rank 0 and the peer ends of the control connections.
    fn links(peers: usize) -> (Arc<Links>, Vec<TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let pair = |_| (TcpStream::connect(address).unwrap(), listener.accept().unwrap().0);
        let (own, theirs): (Vec<_>, Vec<_>) = (0..peers).map(pair).unzip();
        let own = own.into_iter().map(|stream| Some(Arc::new(stream)));
        let controls = std::iter::once(None).chain(own).collect();
        let mailbox = Arc::new(Mailbox::new(peers + 1, 1 << 20));
        (Arc::new(Links::new(0, mailbox, controls, Box::new(ClosedPort))), theirs)
    }

    /// Fills the buffers of the connection to a peer that reads nothing.
    fn fill(links: &Links, peer: usize) {
        let mut line = links.controls[peer].as_ref().unwrap().lock().unwrap();
        // the system may move bytes to the receiver later, or enlarge its buffers
        let mut full = 0;
        while full < 20 {
            if line.flush() {
                full = 0;
                line.push(&Control::StatusRequest.encode().repeat(100));
            } else {
                full += 1;
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    #[test]
    fn the_end_of_a_job_takes_one_time_limit_however_many_peers_take_nothing() {
        let (links, mut peers) = links(8);
        (1..8).for_each(|peer| fill(&links, peer));
        let begin = Instant::now();
        let others: Vec<_> = (0..3)
            .map(|_| {
                let links = links.clone();
                std::thread::spawn(move || links.end_job(failure()))
            })
            .collect();
        assert_eq!(links.end_job(failure()), failure());
        for other in others {
            assert_eq!(other.join().unwrap(), failure());
        }
        assert!(begin.elapsed() < 3 * Links::CONTROL_PATIENCE, "{:?}", begin.elapsed());
        assert_eq!(links.mailbox.failure(), Some(failure()));
        // the last peer reads: it knows the reason
        let told = Control::read(&mut peers[7], 9).unwrap();
        assert_eq!(told, Some(Control::Abort(failure())));
    }

    #[test]
    fn a_peer_that_took_half_a_message_gets_nothing_more() {
        let (links, mut peers) = links(1);
        fill(&links, 1);
        assert!(!links.tell(1, &Control::StatusRequest), "the buffers are full");
        let mut peer = peers.remove(0);
        let reading = std::thread::spawn(move || {
            let mut found = Vec::new();
            peer.read_to_end(&mut found).unwrap();
            found
        });
        let found = reading.join().unwrap();
        assert!(!links.tell(1, &Control::StatusRequest), "the connection is closed");
        let frame = Control::StatusRequest.encode();
        // complete messages, and at most a partial message at the end
        assert!(found.len() > frame.len());
        assert!(found.chunks(frame.len()).all(|chunk| chunk == &frame[..chunk.len()]));
    }

    #[test]
    fn a_message_with_a_rank_that_does_not_exist_ends_the_job_by_name() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let own = listener.accept().unwrap().0;
        let (links, _peers) = links(1);
        let wait = OpenWait { peer: 5, at: StepContext::step(0, "recv"), age: Duration::ZERO };
        let status = Status { wait: Some(wait), last: None };
        peer.write_all(&Control::StatusReply(status).encode()).unwrap();
        links.read_controls(1, &own);
        let failure = links.mailbox.failure().unwrap();
        assert_eq!((failure.cause, failure.culprit), (Cause::Protocol, Some(1)));
        assert!(failure.message.contains("rank 1 sent a control message"), "{failure}");
    }
}
