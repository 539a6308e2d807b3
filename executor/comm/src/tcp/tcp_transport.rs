//! Rank transport: control connections in the tree, and data connections to ranks that it sends to.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::links::{Dial, Links};
use super::outbox::Outbox;
use super::socket::Socket;
use super::wire::Control;
use crate::endpoint::{Interrupt, Mailbox, SendState, Status, Transport, Wait};
use crate::error::Failure;
use crate::message::{Buffer, Message};
use crate::sync::thread;

/// All rank connections.
#[derive(Debug)]
pub(super) struct TcpTransport {
    links: Arc<Links>,
    /// One outbox per rank in the job.
    outboxes: Vec<Outbox>,
}

impl TcpTransport {
    /// Time that a leaving rank waits for all other ranks to accept the last messages.
    const FAREWELL: Duration = Duration::from_secs(5);
    /// Time that a leaving rank waits for its children in the tree, which reach other ranks through it.
    const CHILDREN: Duration = Duration::from_secs(1);

    /// Starts the control connection threads.
    ///
    /// - `controls`: connection to every tree neighbor, `None` for all other ranks
    pub(super) fn start(
        rank: usize,
        mailbox: Arc<Mailbox>,
        controls: Vec<Option<Socket>>,
        dial: Box<dyn Dial>,
    ) -> io::Result<Self> {
        let controls: Vec<_> = controls.into_iter().map(|control| control.map(Arc::new)).collect();
        let links = Arc::new(Links::new(rank, mailbox, controls.clone(), dial));
        for (peer, control) in controls.into_iter().enumerate() {
            if let Some(control) = control {
                let links = links.clone();
                let name = format!("comm-control-{peer}");
                thread::Builder::new().name(name).spawn(move || links.read_controls(peer, &control))?;
            }
        }
        let outboxes = (0..links.size()).map(|peer| Outbox::new(peer, links.clone())).collect();
        Ok(Self { links, outboxes })
    }

    pub(super) fn links(&self) -> &Arc<Links> {
        &self.links
    }
}

impl Transport for TcpTransport {
    fn post(&self, to: usize, message: Message) -> SendState {
        if self.links.mailbox.has_left(to) {
            return SendState::Closed;
        }
        self.outboxes[to].post(message)
    }

    fn wait_sent(&self, sent: &SendState, wait: &mut Wait, timeout: Duration) -> Result<(), Interrupt> {
        match sent {
            SendState::Done | SendState::Delivered => Ok(()),
            SendState::Closed => Err(Interrupt::Left),
            SendState::Queued(count) => self.links.mailbox.wait_written(*count, wait, timeout),
        }
    }

    fn is_sent(&self, to: usize, sent: &SendState) -> bool {
        match sent {
            SendState::Queued(count) => self.links.mailbox.written(to) >= *count,
            _ => true,
        }
    }

    fn send_control(&self, to: usize, Message { header, buffer }: Message) {
        if let Buffer::U64(numbers) = buffer {
            self.links.tell(to, &Control::Facts(header, numbers));
        }
    }

    fn end_job(&self, failure: Failure) -> Failure {
        self.links.end_job(failure)
    }

    fn ask(&self, peer: usize, timeout: Duration) -> Option<Status> {
        self.links.ask(peer, timeout)
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.links.close();
        // without a farewell, neighbors notice that this rank failed
        let is_well = self.links.mailbox.failure().is_none() && !std::thread::panicking();
        let used = || self.outboxes.iter().enumerate().filter(|(_, outbox)| outbox.is_used());
        if is_well {
            self.links.leave(used().map(|(peer, _)| peer).collect());
            used().for_each(|(_, outbox)| outbox.farewell());
        }
        let deadline = Instant::now() + if is_well { Self::FAREWELL } else { Duration::ZERO };
        for outbox in &self.outboxes {
            outbox.close(deadline.saturating_duration_since(Instant::now()));
        }
        if is_well {
            self.links.wait_for_children(Self::CHILDREN);
        }
        self.links.dial.close();
        // readers that wait for room: nobody receives any more
        self.links.mailbox.close();
        self.links.shut_down();
    }
}
