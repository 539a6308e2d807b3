//! Thread transport: all ranks in one process, messages move into the mailbox of the receiver.

use crate::api::Settings;
use crate::communicator::Communicator;
use crate::endpoint::{Endpoint, Interrupt, Mailbox, SendState, Status, Transport, Wait};
use crate::error::{Cause, Error, Failure, Result, StepContext};
use crate::message::Message;
use crate::sync::Mutex;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Communicator for a rank that is a thread.
pub type ThreadComm = Communicator;

/// Creates the communicators for all ranks, in order. Each belongs on a separate thread.
///
/// A rank leaves when its communicators are dropped; a rank whose thread panics has died, which ends the job.
///
/// # Errors
/// [`Error::InvalidSetting`] if there are no ranks or a time limit is zero.
pub fn world(size: usize, settings: Settings) -> Result<Vec<ThreadComm>> {
    settings.check()?;
    if size == 0 {
        return Err(Error::InvalidSetting { setting: "size", reason: "must be at least 1".into() });
    }
    let mailboxes = (0..size).map(|_| Arc::new(Mailbox::new(size, settings.buffered_bytes_max)));
    let mailboxes: Arc<[_]> = mailboxes.collect();
    let failure = Arc::default();
    let comm = |rank: usize| {
        let mailbox = mailboxes[rank].clone();
        let transport =
            Box::new(ThreadTransport { rank, mailboxes: mailboxes.clone(), failure: Arc::clone(&failure) });
        Communicator::world(Arc::new(Endpoint::new(rank, size, mailbox, transport, settings)))
    };
    Ok((0..size).map(comm).collect())
}

/// Rank transport: the mailboxes of all ranks.
struct ThreadTransport {
    rank: usize,
    mailboxes: Arc<[Arc<Mailbox>]>,
    /// Job failure.
    failure: Arc<Mutex<Option<Failure>>>,
}

impl ThreadTransport {
    fn others(&self) -> impl Iterator<Item = &Arc<Mailbox>> {
        self.mailboxes.iter().enumerate().filter(|(rank, _)| *rank != self.rank).map(|(_, mailbox)| mailbox)
    }
}

impl Transport for ThreadTransport {
    fn post(&self, to: usize, message: Message) -> SendState {
        if self.mailboxes[self.rank].has_left(to) {
            return SendState::Closed;
        }
        let mailbox = &self.mailboxes[to];
        mailbox.deliver(self.rank, message);
        if mailbox.has_room(self.rank) { SendState::Done } else { SendState::Delivered }
    }

    fn wait_sent(&self, sent: &SendState, wait: &mut Wait, timeout: Duration) -> Result<(), Interrupt> {
        match sent {
            SendState::Done => return Ok(()),
            SendState::Closed => return Err(Interrupt::Left),
            SendState::Delivered | SendState::Queued(_) => {}
        }
        let own = &self.mailboxes[self.rank];
        own.begin_wait(wait);
        let waited = self.mailboxes[wait.peer].wait_for_room(self.rank, timeout);
        if !matches!(waited, Err(Interrupt::TimedOut)) {
            own.end_wait(wait);
        }
        waited
    }

    fn is_sent(&self, to: usize, sent: &SendState) -> bool {
        matches!(sent, SendState::Done | SendState::Closed) || self.mailboxes[to].has_room(self.rank)
    }

    fn send_control(&self, to: usize, message: Message) {
        self.mailboxes[to].deliver(self.rank, message);
    }

    fn end_job(&self, failure: Failure) -> Failure {
        let mut kept = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = kept.get_or_insert(failure);
        for mailbox in self.mailboxes.iter() {
            mailbox.set_failure(kept.clone());
        }
        kept.clone()
    }

    fn ask(&self, peer: usize, _timeout: Duration) -> Option<Status> {
        Some(self.mailboxes[peer].status())
    }
}

impl Drop for ThreadTransport {
    fn drop(&mut self) {
        // dropped while unwinding: the rank died, peers must not wait for the time limit
        if std::thread::panicking() {
            let at = self.mailboxes[self.rank].status().last.unwrap_or(StepContext::step(0, "start"));
            let message = format!("the thread of rank {} panicked at {at}", self.rank);
            let culprit = Some(self.rank);
            self.end_job(Failure { cause: Cause::Died, culprit, by: self.rank, at, message });
        }
        for mailbox in self.others() {
            mailbox.set_left(self.rank);
        }
    }
}
