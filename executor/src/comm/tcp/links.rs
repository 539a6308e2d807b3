//! State that the connection threads of a rank share: control connections, and how each peer ended.

use super::control::Control;
use crate::comm::error::{Cause, Failure};
use crate::comm::mailbox::{Mailbox, Status};
use crate::comm::step_context::StepContext;
use std::collections::BTreeMap;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Connections of a peer that have ended, and whether it sent a farewell.
#[derive(Debug, Default, Clone, Copy)]
struct Ended {
    data: bool,
    control: bool,
    farewell: bool,
}

/// Connections of one rank.
#[derive(Debug)]
pub(super) struct Links {
    pub(super) rank: usize,
    pub(super) mailbox: Arc<Mailbox>,
    /// Control connection to each peer; `None` for this rank.
    controls: Vec<Option<Mutex<TcpStream>>>,
    ended: Mutex<Vec<Ended>>,
    answers: Mutex<BTreeMap<u64, Option<Status>>>,
    answered: Condvar,
    asked: AtomicU64,
    /// Failure of the job; locked while other ranks are notified.
    failure: Mutex<Option<Failure>>,
    /// Whether this rank is leaving, so that ending connections are expected.
    is_closing: AtomicBool,
}

impl Links {
    /// Time limit for sending a control message to a peer.
    const CONTROL_PATIENCE: Duration = Duration::from_secs(1);

    pub(super) fn new(
        rank: usize,
        mailbox: Arc<Mailbox>,
        controls: Vec<Option<TcpStream>>,
    ) -> std::io::Result<Self> {
        for control in controls.iter().flatten() {
            // a stopped peer must not block the notification of the others
            control.set_write_timeout(Some(Self::CONTROL_PATIENCE))?;
        }
        Ok(Self {
            rank,
            mailbox,
            ended: Mutex::new(vec![Ended::default(); controls.len()]),
            controls: controls.into_iter().map(|control| control.map(Mutex::new)).collect(),
            answers: Mutex::default(),
            answered: Condvar::new(),
            asked: AtomicU64::new(0),
            failure: Mutex::default(),
            is_closing: AtomicBool::new(false),
        })
    }

    /// Sends a control message; returns whether it was sent. A peer that does not take it is noticed
    /// elsewhere.
    fn tell(&self, peer: usize, control: &Control) -> bool {
        let Some(stream) = &self.controls[peer] else { return false };
        let mut stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
        control.write(&mut *stream).is_ok()
    }

    /// Aborts the job: notifies all peers, then unblocks all local waits. Returns the first failure, which is
    /// kept.
    ///
    /// A rank that learns of a failure passes it on before its own waits end. Otherwise other ranks could
    /// notice the end of that rank before its reason.
    pub(super) fn end_job(&self, failure: Failure) -> Failure {
        // held while peers are notified, so that a second failure cannot overtake the first
        let mut kept = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = &*kept {
            return kept.clone();
        }
        let control = Control::Abort(failure.clone());
        for peer in (0..self.controls.len()).filter(|&peer| peer != self.rank) {
            self.tell(peer, &control);
        }
        self.mailbox.set_failure(failure.clone());
        kept.insert(failure).clone()
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
    pub(super) fn read_controls(&self, peer: usize, mut stream: TcpStream) {
        while let Ok(Some(control)) = Control::read(&mut stream) {
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
        self.end(peer, |ended| ended.control = true);
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
        let at = status.wait.map(|(_, at)| at).or(status.last).unwrap_or(StepContext::step(0, "start"));
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
        for stream in self.controls.iter().flatten() {
            let stream = stream.lock().unwrap_or_else(PoisonError::into_inner);
            // closing a connection that has already ended is not an error
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}
