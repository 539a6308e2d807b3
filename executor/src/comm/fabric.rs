//! All that the communicators of one rank share: its mailbox, the wire to the others, its failure.

use super::at::At;
use super::error::{Cause, Error, Failure, Result, seconds};
use super::handle::{Completion, Handle};
use super::hang;
use super::mailbox::{Interrupt, Mailbox, Status};
use super::message::{Header, Key, Message};
use super::payload::{Buffer, Payload};
use super::settings::Settings;
use std::sync::Arc;
use std::time::Duration;

/// A transport as the communicators see it. Ranks are those of the world.
pub(super) trait Wire: Send + Sync {
    /// Begins to send a message to another rank; returns at once.
    fn post(&self, to: usize, message: Message) -> Sent;

    /// Waits until what was [posted](Self::post) is on its way.
    fn wait_sent(&self, to: usize, sent: &Sent, at: At, timeout: Duration) -> Result<(), Interrupt>;

    /// Whether [`wait_sent`](Self::wait_sent) would return at once.
    fn is_sent(&self, to: usize, sent: &Sent) -> bool;

    /// Ends the job: tells all others, as far as they can still be reached, then this rank's mailbox. Returns
    /// what the job failed of, which is another failure if one came first.
    fn end_job(&self, failure: Failure) -> Failure;

    /// Asks a rank what it is doing; `None` if it does not answer in time.
    fn ask(&self, peer: usize, timeout: Duration) -> Option<Status>;
}

/// How far a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    /// The caller need not wait.
    Done,
    /// Sent once the peer has room.
    Delivered,
    /// Sent once so many messages were written.
    Queued(u64),
    /// The peer is no longer there.
    Closed,
}

/// One rank of a job.
pub(super) struct Fabric {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) wire: Box<dyn Wire>,
    pub(super) settings: Settings,
}

impl std::fmt::Debug for Fabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.size)
    }
}

impl Fabric {
    /// Sends; what comes back need not be waited for in order.
    pub(super) fn start_send(
        self: &Arc<Self>,
        to: usize,
        header: Header,
        buffer: Buffer,
    ) -> Result<SendOnTheWay> {
        if let Some(failure) = self.mailbox.failure() {
            return Err(self.failed(failure, header.at));
        }
        self.mailbox.note(header.at);
        let message = Message { header, buffer };
        let sent = if to == self.rank {
            self.mailbox.deliver(self.rank, message);
            Sent::Done
        } else {
            self.wire.post(to, message)
        };
        Ok(SendOnTheWay { fabric: self.clone(), to, header, sent })
    }

    /// Reserves the next message with this header's tag.
    pub(super) fn start_recv(self: &Arc<Self>, from: usize, header: Header) -> RecvOnTheWay {
        let key = header.key(from);
        let number = self.mailbox.post(key);
        RecvOnTheWay { fabric: self.clone(), from, header, key, number }
    }

    /// Receives now.
    pub(super) fn recv(self: &Arc<Self>, from: usize, header: Header) -> Result<Buffer> {
        self.start_recv(from, header).receive()
    }

    /// Ends the job for everyone and returns the error of this rank. The first failure stays.
    pub(super) fn fail(&self, failure: Failure) -> Error {
        let at = failure.at;
        self.failed(self.wire.end_job(failure), at)
    }

    /// The error of this rank in a job that is over.
    pub(super) fn failed(&self, failure: Failure, at: At) -> Error {
        Error::Failed { failure: Box::new(failure), rank: self.rank, at: Box::new(at) }
    }

    /// A failure that this rank noticed.
    pub(super) fn failure(&self, cause: Cause, culprit: Option<usize>, at: At, message: String) -> Failure {
        Failure { cause, culprit, by: self.rank, at, message }
    }

    fn interrupted(&self, interrupt: Interrupt, peer: usize, what: &str, at: At) -> Error {
        match interrupt {
            Interrupt::Failed(failure) => self.failed(failure, at),
            Interrupt::Left => {
                let message = format!("rank {peer} finished while rank {} waited to {what}", self.rank);
                self.fail(self.failure(Cause::Left, Some(peer), at, message))
            }
            Interrupt::TimedOut => {
                let blame = hang::find(self, peer);
                let waited = seconds(self.settings.wait);
                let message = format!("rank {} waited {waited} to {what}; {}", self.rank, blame.message);
                self.fail(self.failure(Cause::TimedOut, blame.culprit, at, message))
            }
        }
    }
}

/// A message that is leaving.
pub(super) struct SendOnTheWay {
    fabric: Arc<Fabric>,
    to: usize,
    header: Header,
    sent: Sent,
}

impl SendOnTheWay {
    /// Waits until the memory of the message is no longer needed.
    pub(super) fn finish(&self) -> Result<()> {
        let Self { fabric, to, header, sent } = self;
        let waited = fabric.wire.wait_sent(*to, sent, header.at, fabric.settings.wait);
        waited.map_err(|interrupt| {
            fabric.interrupted(interrupt, *to, &format!("send {header} to rank {to}"), header.at)
        })
    }
}

impl Completion<()> for SendOnTheWay {
    fn is_complete(&self) -> bool {
        self.fabric.wire.is_sent(self.to, &self.sent)
    }

    fn wait(self: Box<Self>) -> Result<()> {
        self.finish()
    }
}

/// A message that is awaited.
pub(super) struct RecvOnTheWay {
    fabric: Arc<Fabric>,
    from: usize,
    header: Header,
    key: Key,
    number: u64,
}

impl RecvOnTheWay {
    /// Waits for the message and checks what it says about itself.
    pub(super) fn receive(&self) -> Result<Buffer> {
        let Self { fabric, from, header, key, number } = self;
        let taken = fabric.mailbox.take(*key, *number, *from, header.at, fabric.settings.wait);
        let message = taken.map_err(|interrupt| {
            fabric.interrupted(interrupt, *from, &format!("receive {header} from rank {from}"), header.at)
        })?;
        if header.admits(&message.header) {
            return Ok(message.buffer);
        }
        let text = format!(
            "rank {from} sent {}, but rank {} expects {header}: their plans differ",
            message.header, fabric.rank
        );
        Err(fabric.fail(fabric.failure(Cause::Mismatch, Some(*from), header.at, text)))
    }
}

impl Completion<Payload> for RecvOnTheWay {
    fn is_complete(&self) -> bool {
        self.fabric.mailbox.is_ready(self.key, self.number)
    }

    fn wait(self: Box<Self>) -> Result<Payload> {
        let shape = self.header.shape;
        Payload::new(shape.rows, shape.cols, self.receive()?)
    }
}

/// A handle that completed at once.
pub(super) struct Done<T>(pub(super) T);

impl<T: Send> Completion<T> for Done<T> {
    fn is_complete(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<T> {
        Ok(self.0)
    }
}

impl From<SendOnTheWay> for Handle<()> {
    fn from(sending: SendOnTheWay) -> Self {
        if sending.sent == Sent::Done { Self::new(Done(())) } else { Self::new(sending) }
    }
}
