//! Sends, receives and sums that a caller waits for.

use std::sync::Arc;

use dflop_comm::{Buffer, Cause, Completion, Error, Payload, Result, StepContext};

use crate::engine::Job;
use crate::header::Header;
use crate::shared::Wait;

/// Message that is being sent.
pub(crate) struct PendingSend {
    pub(crate) job: Arc<Job>,
    pub(crate) to: usize,
    pub(crate) header: Header,
    /// Operation number; `None` for a message from the rank to itself, which is sent at once.
    pub(crate) number: Option<u64>,
}

/// Message that is being received.
pub(crate) struct PendingReceive {
    pub(crate) job: Arc<Job>,
    pub(crate) from: usize,
    pub(crate) header: Header,
    pub(crate) number: u64,
    pub(crate) is_taken: bool,
}

/// Collective that is in progress.
pub(crate) struct PendingCollective {
    pub(crate) job: Arc<Job>,
    /// Job ranks that take part.
    pub(crate) members: Arc<[usize]>,
    pub(crate) at: StepContext,
    pub(crate) name: &'static str,
    pub(crate) number: u64,
    pub(crate) is_taken: bool,
}

impl Completion<()> for PendingSend {
    fn is_complete(&self) -> bool {
        let state = self.job.shared.lock();
        let is_done = self.number.is_none_or(|number| state.done.contains_key(&number));
        is_done || state.failure.is_some()
    }

    fn wait(mut self: Box<Self>) -> Result<()> {
        let Some(number) = self.number else { return Ok(()) };
        let (to, header) = (self.to, self.header);
        let operation = || format!("send {header} to rank {to}");
        let wait = Wait { peers: &[to], at: header.at, operation: &operation };
        self.job.shared.wait(&wait, |state| state.done.remove(&number).map(drop))?;
        self.number = None;
        Ok(())
    }
}

impl Drop for PendingSend {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.job.shared.lock().give_up(number);
        }
    }
}

impl Completion<Payload> for PendingReceive {
    fn is_complete(&self) -> bool {
        let state = self.job.shared.lock();
        state.mailbox.is_ready(self.header.key(self.from), self.number) || state.failure.is_some()
    }

    fn wait(mut self: Box<Self>) -> Result<Payload> {
        let (shared, from, header) = (&self.job.shared, self.from, self.header);
        let (key, number) = (header.key(from), self.number);
        let operation = || format!("receive {header} from rank {from}");
        let wait = Wait { peers: &[from], at: header.at, operation: &operation };
        let (found, buffer) = shared.wait(&wait, |state| state.mailbox.take(key, number))?;
        if !header.admits(&found) {
            let text = format!(
                "rank {from} sent {found}, but rank {} expects {header}: their plans differ",
                shared.rank
            );
            let error = shared.fail(shared.failure(Cause::Mismatch, Some(from), header.at, text));
            self.is_taken = true;
            return Err(error);
        }
        self.is_taken = true;
        Payload::new(header.shape.rows, header.shape.cols, buffer)
    }
}

impl Drop for PendingReceive {
    fn drop(&mut self) {
        if !self.is_taken {
            self.job.shared.lock().mailbox.give_up(self.header.key(self.from), self.number);
        }
    }
}

impl Completion<Buffer> for PendingCollective {
    fn is_complete(&self) -> bool {
        let state = self.job.shared.lock();
        state.done.contains_key(&self.number) || state.failure.is_some()
    }

    fn wait(mut self: Box<Self>) -> Result<Buffer> {
        self.finish()
    }
}

impl PendingCollective {
    pub(crate) fn finish(&mut self) -> Result<Buffer> {
        let (number, name) = (self.number, self.name);
        let operation = || format!("finish the {name} of {} ranks", self.members.len());
        let wait = Wait { peers: &self.members, at: self.at, operation: &operation };
        let result = self.job.shared.wait(&wait, |state| state.done.remove(&number))?;
        self.is_taken = true;
        result.ok_or_else(|| no_result(name))
    }
}

impl Drop for PendingCollective {
    fn drop(&mut self) {
        if !self.is_taken {
            self.job.shared.lock().give_up(self.number);
        }
    }
}

fn no_result(name: &str) -> Error {
    Error::Length { found: 0, expected: format!("the result of {name}") }
}
