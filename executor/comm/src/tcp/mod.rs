//! TCP transport: one process per rank, for ranks on one machine or a few machines.
//!
//! Rank transport: control connections in the tree, and data connections to ranks that it sends to.
//!
//! Control messages (job end, farewells, digests) use a tree of connections, so that a rank has at most five
//! of them for any job size; they never wait for data. Status requests have separate connections: no rank in
//! between can be silent.
//!
//! Messages use data connections, one per direction, each created when a rank first sends to another rank. A
//! small message is written by the sending thread, as far as the socket accepts it without blocking; the
//! remainder, and every large message, is written by a connection thread. Each connection is read
//! continuously, so two ranks that send large messages to each other at the same time do not deadlock. A sum
//! over all ranks uses ring connections; in the worst case a rank has two per peer, hence the limit
//! [`RANKS_MAX`].
//!
//! A rank that is dropped sends a farewell. A control connection that ends without a farewell means that the
//! peer process died, which the tree neighbors notice immediately and pass on.

pub(super) mod fuzz;
mod inbox;
#[cfg(test)]
mod large_jobs;
mod links;
mod listener;
mod outbox;
#[cfg(test)]
mod rank_resources;
mod socket;
mod wire;

use super::endpoint::{Interrupt, Mailbox, SendState, Status, Transport, Wait};
use super::error::Failure;
use super::message::{Buffer, Message};
use super::sync::thread;
use links::{Dial, Links};
use outbox::Outbox;
use socket::Socket;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use wire::Control;

pub use listener::{RANKS_MAX, Session, connect, connect_tree};

/// All rank connections.
#[derive(Debug)]
struct TcpTransport {
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
    fn start(
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

    fn links(&self) -> &Arc<Links> {
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
