//! State that the communicators of one rank share: mailbox, transport, failure.

use super::error::{Cause, Error, Failure, Result, seconds};
use super::handle::{Completion, Handle};
use super::mailbox::{Interrupt, Mailbox};
use super::message::{Header, Key, Message};
use super::payload::{Buffer, Payload};
use super::settings::Settings;
use super::step_context::StepContext;
use super::timeout_report;
use super::transport::{SendState, Transport};
use std::sync::Arc;

/// One rank of a job, as its communicators see it.
pub(super) struct Endpoint {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) transport: Box<dyn Transport>,
    pub(super) settings: Settings,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.size)
    }
}

impl Endpoint {
    /// Starts to send. Results may be awaited in any order.
    pub(super) fn start_send(
        self: &Arc<Self>,
        to: usize,
        header: Header,
        buffer: Buffer,
    ) -> Result<PendingSend> {
        if let Some(failure) = self.mailbox.failure() {
            return Err(self.failed(failure, header.at));
        }
        self.mailbox.note(header.at);
        let message = Message { header, buffer };
        let sent = if to == self.rank {
            self.mailbox.deliver(self.rank, message);
            SendState::Done
        } else {
            self.transport.post(to, message)
        };
        Ok(PendingSend { endpoint: self.clone(), to, header, sent })
    }

    /// Reserves the next message with this header's tag.
    pub(super) fn start_recv(self: &Arc<Self>, from: usize, header: Header) -> PendingRecv {
        let key = header.key(from);
        // reserved now, so that several pending receives take messages in the order of these calls
        let number = self.mailbox.post(key, header);
        PendingRecv { endpoint: self.clone(), from, header, key, number, is_taken: false }
    }

    /// Receives, and waits for the message.
    pub(super) fn recv(self: &Arc<Self>, from: usize, header: Header) -> Result<Buffer> {
        self.start_recv(from, header).receive()
    }

    /// Ends the job on all ranks and returns the error of this rank. The first failure is kept.
    pub(super) fn fail(&self, failure: Failure) -> Error {
        let at = failure.at;
        self.failed(self.transport.end_job(failure), at)
    }

    /// Error of this rank in a job that has ended.
    pub(super) fn failed(&self, failure: Failure, at: StepContext) -> Error {
        Error::Failed { failure: Box::new(failure), rank: self.rank, at: Box::new(at) }
    }

    /// Failure that this rank noticed.
    pub(super) fn failure(
        &self,
        cause: Cause,
        culprit: Option<usize>,
        at: StepContext,
        message: String,
    ) -> Failure {
        Failure { cause, culprit, by: self.rank, at, message }
    }

    fn interrupted(&self, interrupt: Interrupt, peer: usize, what: &str, at: StepContext) -> Error {
        match interrupt {
            Interrupt::Failed(failure) => self.failed(failure, at),
            Interrupt::Left => {
                let message = format!("rank {peer} finished while rank {} waited to {what}", self.rank);
                self.fail(self.failure(Cause::Left, Some(peer), at, message))
            }
            Interrupt::TimedOut => {
                let blame = timeout_report::find(self.rank, &*self.transport, &self.mailbox, peer);
                let waited = seconds(self.settings.wait);
                let message = format!("rank {} waited {waited} to {what}; {}", self.rank, blame.message);
                self.fail(self.failure(Cause::TimedOut, blame.culprit, at, message))
            }
        }
    }
}

/// Message that is being sent.
pub(super) struct PendingSend {
    endpoint: Arc<Endpoint>,
    to: usize,
    header: Header,
    sent: SendState,
}

impl PendingSend {
    /// Waits until the message has left.
    pub(super) fn finish(&self) -> Result<()> {
        let Self { endpoint, to, header, sent } = self;
        let waited = endpoint.transport.wait_sent(*to, sent, header.at, endpoint.settings.wait);
        waited.map_err(|interrupt| {
            endpoint.interrupted(interrupt, *to, &format!("send {header} to rank {to}"), header.at)
        })
    }
}

impl Completion<()> for PendingSend {
    fn is_complete(&self) -> bool {
        self.endpoint.transport.is_sent(self.to, &self.sent)
    }

    fn wait(self: Box<Self>) -> Result<()> {
        self.finish()
    }
}

/// Message that is being received.
pub(super) struct PendingRecv {
    endpoint: Arc<Endpoint>,
    from: usize,
    header: Header,
    key: Key,
    number: u64,
    /// Whether the message has left the mailbox.
    is_taken: bool,
}

impl PendingRecv {
    /// Waits for the message and checks its header.
    pub(super) fn receive(mut self) -> Result<Buffer> {
        let Self { endpoint, from, header, key, number, is_taken } = &mut self;
        let taken = endpoint.mailbox.take(*key, *number, *from, header.at, endpoint.settings.wait);
        let message = taken.map_err(|interrupt| {
            endpoint.interrupted(interrupt, *from, &format!("receive {header} from rank {from}"), header.at)
        })?;
        *is_taken = true;
        // tags match already; a difference in step, microbatch or shape means different plans
        if header.admits(&message.header) {
            return Ok(message.buffer);
        }
        let text = format!(
            "rank {from} sent {}, but rank {} expects {header}: their plans differ",
            message.header, endpoint.rank
        );
        Err(endpoint.fail(endpoint.failure(Cause::Mismatch, Some(*from), header.at, text)))
    }
}

impl Drop for PendingRecv {
    fn drop(&mut self) {
        // a message that no one receives must not keep its share of the bound on buffered bytes
        if !self.is_taken {
            self.endpoint.mailbox.discard(self.key, self.number, self.from);
        }
    }
}

impl Completion<Payload> for PendingRecv {
    fn is_complete(&self) -> bool {
        self.endpoint.mailbox.is_ready(self.key, self.number)
    }

    fn wait(self: Box<Self>) -> Result<Payload> {
        let shape = self.header.shape;
        Payload::new(shape.rows, shape.cols, self.receive()?)
    }
}

/// Completion of an operation that finished immediately.
pub(super) struct Completed<T>(pub(super) T);

impl<T: Send> Completion<T> for Completed<T> {
    fn is_complete(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<T> {
        Ok(self.0)
    }
}

impl From<PendingSend> for Handle<()> {
    fn from(sending: PendingSend) -> Self {
        if sending.sent == SendState::Done { Self::new(Completed(())) } else { Self::new(sending) }
    }
}
