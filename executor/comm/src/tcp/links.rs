//! State that the connection threads of a rank share: control connections, and how each peer ended.

use super::control::Control;
use super::control_line::ControlLine;
use super::socket::Socket;
use crate::error::{Cause, Failure};
use crate::mailbox::{Mailbox, Status};
use crate::step_context::StepContext;
use crate::sync::{AtomicBool, AtomicU64, Condvar, Mutex, Ordering, thread};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// Connections of a peer that have ended, and whether it sent a farewell.
#[derive(Debug, Default, Clone, Copy)]
struct Ended {
    data: bool,
    control: bool,
    farewell: bool,
}

/// Failure of the job.
#[derive(Debug, Default)]
struct Ending {
    failure: Option<Failure>,
    /// Whether all peers have been notified, as far as possible.
    is_passed_on: bool,
}

/// Connections of one rank.
#[derive(Debug)]
pub(super) struct Links {
    pub(super) rank: usize,
    pub(super) mailbox: Arc<Mailbox>,
    /// Control connection to each peer; `None` for this rank.
    controls: Vec<Option<Mutex<ControlLine>>>,
    ended: Mutex<Vec<Ended>>,
    answers: Mutex<BTreeMap<u64, Option<Status>>>,
    answered: Condvar,
    asked: AtomicU64,
    ending: Mutex<Ending>,
    /// Notified once all peers know the failure.
    passed_on: Condvar,
    /// Whether this rank is leaving, so that ending connections are expected.
    is_closing: AtomicBool,
}

impl Links {
    /// Time limit for sending a control message, to one peer or to all of them.
    const CONTROL_PATIENCE: Duration = Duration::from_secs(1);
    /// Interval at which a full socket is tried again.
    const CONTROL_RETRY: Duration = Duration::from_millis(1);

    pub(super) fn new(rank: usize, mailbox: Arc<Mailbox>, controls: Vec<Option<Socket>>) -> Self {
        let line = |stream| Mutex::new(ControlLine::new(stream));
        Self {
            rank,
            mailbox,
            ended: Mutex::new(vec![Ended::default(); controls.len()]),
            controls: controls.into_iter().map(|control| control.map(line)).collect(),
            answers: Mutex::default(),
            answered: Condvar::new(),
            asked: AtomicU64::new(0),
            ending: Mutex::default(),
            passed_on: Condvar::new(),
            is_closing: AtomicBool::new(false),
        }
    }

    /// Sends a control message; returns whether it was sent. A peer that does not take it is noticed
    /// elsewhere.
    fn tell(&self, peer: usize, control: &Control) -> bool {
        self.tell_all(vec![peer], control)
    }

    /// Sends a control message to several peers at the same time; returns whether all have taken it.
    ///
    /// The connection to a peer that does not take it in time is closed, because it may have taken a part.
    fn tell_all(&self, peers: Vec<usize>, control: &Control) -> bool {
        let (frame, deadline) = (control.encode(), Instant::now() + Self::CONTROL_PATIENCE);
        let lines = peers.into_iter().filter_map(|peer| self.controls.get(peer)?.as_ref());
        let mut waiting: Vec<(&Mutex<ControlLine>, bool)> = lines.map(|line| (line, false)).collect();
        let mut is_sent = true;
        loop {
            waiting.retain_mut(|(line, is_queued)| {
                // another thread may be sending; meanwhile the other peers have their turn
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

    /// Aborts the job: notifies all peers, then unblocks all local waits. Returns the first failure, which is
    /// kept.
    ///
    /// A rank that learns of a failure passes it on before its own waits end. Otherwise other ranks could
    /// notice the end of that rank before its reason. Notifying takes one time limit, however many peers do
    /// not take the message.
    pub(super) fn end_job(&self, failure: Failure) -> Failure {
        let mut ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = ending.failure.clone() {
            // a caller that ends its process must not do so while another thread notifies the peers
            let patience = 2 * Self::CONTROL_PATIENCE;
            let is_open = |ending: &mut Ending| !ending.is_passed_on;
            drop(self.passed_on.wait_timeout_while(ending, patience, is_open));
            return kept;
        }
        // kept before peers are notified, so that a second failure cannot overtake the first
        ending.failure = Some(failure.clone());
        drop(ending);
        let peers = (0..self.controls.len()).filter(|&peer| peer != self.rank).collect();
        self.tell_all(peers, &Control::Abort(failure.clone()));
        self.mailbox.set_failure(failure.clone());
        self.ending.lock().unwrap_or_else(PoisonError::into_inner).is_passed_on = true;
        self.passed_on.notify_all();
        failure
    }

    /// Requests the status of a peer.
    pub(super) fn ask(&self, peer: usize, timeout: Duration) -> Option<Status> {
        let deadline = Instant::now() + timeout;
        let id = self.asked.fetch_add(1, Ordering::Relaxed);
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        answers.insert(id, None);
        // sending may block, and the thread that reads the answer needs this lock
        drop(answers);
        let was_told = self.tell(peer, &Control::StatusRequest(id));
        answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        while was_told && answers.get(&id).is_some_and(Option::is_none) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            answers = self.answered.wait_timeout(answers, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        answers.remove(&id).flatten()
    }

    /// Reads the control connection of a peer until it ends.
    pub(super) fn read_controls(&self, peer: usize, mut stream: Socket) {
        loop {
            match Control::read(&mut stream, self.controls.len()) {
                Ok(Some(control)) => self.take_control(peer, control),
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    let message = format!("rank {peer} sent a control message that no rank sends");
                    self.fail(Cause::Protocol, peer, message);
                    break;
                }
                Ok(None) | Err(_) => break,
            }
        }
        self.end(peer, |ended| ended.control = true);
    }

    fn take_control(&self, peer: usize, control: Control) {
        match control {
            Control::Abort(failure) => {
                self.end_job(failure);
            }
            Control::StatusRequest(id) => {
                self.tell(peer, &Control::StatusReply(id, self.mailbox.status()));
            }
            Control::StatusReply(id, status) => {
                let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(answer) = answers.get_mut(&id) {
                    *answer = Some(status);
                    self.answered.notify_all();
                }
            }
        }
    }

    /// Records the farewell of a peer: all its messages have arrived.
    pub(super) fn farewell(&self, peer: usize) {
        self.end(peer, |ended| ended.farewell = true);
        self.mailbox.set_left(peer);
    }

    /// Records the end of a peer's data connection.
    pub(super) fn data_ended(&self, peer: usize) {
        self.end(peer, |ended| ended.data = true);
    }

    /// Records the end of a connection. A process is dead once both connections have ended: by then its last
    /// control message, which may name the actual failure, has been read.
    fn end(&self, peer: usize, change: impl FnOnce(&mut Ended)) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut ended[peer]);
        let now = ended[peer];
        drop(ended);
        if now.data && now.control && !now.farewell && !self.is_closing() {
            let heard = self.mailbox.heard(peer);
            let heard =
                heard.map_or("before it sent anything".to_owned(), |at| format!("last heard of at {at}"));
            self.fail(Cause::Died, peer, format!("rank {peer} died: its connections closed, {heard}"));
        }
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
    }

    pub(super) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Relaxed)
    }

    /// Closes the control connections.
    pub(super) fn shut_down(&self) {
        for line in self.controls.iter().flatten() {
            line.lock().unwrap_or_else(PoisonError::into_inner).close();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mailbox::OpenWait;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    fn failure() -> Failure {
        let at = StepContext::step(3, "forward");
        Failure { cause: Cause::Caller, culprit: Some(0), by: 0, at, message: "enough".into() }
    }

    /// Links of rank 0 and the peers' ends of the control connections.
    fn links(peers: usize) -> (Arc<Links>, Vec<TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let pair = |_| (TcpStream::connect(address).unwrap(), listener.accept().unwrap().0);
        let (own, theirs): (Vec<_>, Vec<_>) = (0..peers).map(pair).unzip();
        let controls = std::iter::once(None).chain(own.into_iter().map(Some)).collect();
        let mailbox = Arc::new(Mailbox::new(peers + 1, 1 << 20));
        (Arc::new(Links::new(0, mailbox, controls)), theirs)
    }

    /// Fills the buffers of the connection to a peer that reads nothing.
    fn fill(links: &Links, peer: usize) {
        let mut line = links.controls[peer].as_ref().unwrap().lock().unwrap();
        // the system may move bytes to the receiver later, or enlarge its buffers
        let mut full = 0;
        while full < 20 {
            if line.flush() {
                full = 0;
                line.push(&Control::StatusRequest(0).encode().repeat(100));
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
        assert!(!links.tell(1, &Control::StatusRequest(1)), "the buffers are full");
        let mut peer = peers.remove(0);
        let reading = std::thread::spawn(move || {
            let mut found = Vec::new();
            peer.read_to_end(&mut found).unwrap();
            found
        });
        let found = reading.join().unwrap();
        assert!(!links.tell(1, &Control::StatusRequest(2)), "the connection is closed");
        let frame = Control::StatusRequest(0).encode();
        // whole messages, and at most a part of one at the end
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
        peer.write_all(&Control::StatusReply(0, status).encode()).unwrap();
        links.read_controls(1, own);
        let failure = links.mailbox.failure().unwrap();
        assert_eq!((failure.cause, failure.culprit), (Cause::Protocol, Some(1)));
        assert!(failure.message.contains("rank 1 sent a control message"), "{failure}");
    }
}
