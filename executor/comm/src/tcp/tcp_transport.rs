//! Transport over one pair of connections with every other rank.

use super::inbox::read_messages;
use super::links::Links;
use super::outbox::Outbox;
use super::socket::Socket;
use crate::error::Failure;
use crate::mailbox::{Interrupt, Mailbox, Status, Wait};
use crate::message::Message;
use crate::sync::thread;
use crate::transport::{SendState, Transport};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connections with a peer.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) data: Socket,
    pub(super) control: Socket,
}

/// All connections of a rank.
#[derive(Debug)]
pub(super) struct TcpTransport {
    links: Arc<Links>,
    outboxes: Vec<Option<Outbox>>,
}

impl TcpTransport {
    /// Time that a leaving rank waits for all others to take its messages.
    const FAREWELL: Duration = Duration::from_secs(5);

    /// Starts the threads of all connections.
    pub(super) fn start(rank: usize, mailbox: Arc<Mailbox>, pairs: Vec<Option<Pair>>) -> io::Result<Self> {
        let controls =
            pairs.iter().map(|pair| pair.as_ref().map(|pair| pair.control.try_clone()).transpose());
        let links = Arc::new(Links::new(rank, mailbox, controls.collect::<io::Result<_>>()?));
        let mut outboxes = Vec::new();
        for (peer, pair) in pairs.into_iter().enumerate() {
            outboxes.push(pair.map(|pair| start_pair(&links, peer, pair)).transpose()?);
        }
        Ok(Self { links, outboxes })
    }
}

fn start_pair(links: &Arc<Links>, peer: usize, pair: Pair) -> io::Result<Outbox> {
    let thread = |name: &str| thread::Builder::new().name(format!("comm-{name}-{peer}"));
    let (of_data, data) = (links.clone(), pair.data.try_clone()?);
    thread("recv").spawn(move || read_messages(&of_data, peer, data))?;
    let of_control = links.clone();
    thread("control").spawn(move || of_control.read_controls(peer, pair.control))?;
    Outbox::start(peer, links.clone(), pair.data)
}

impl Transport for TcpTransport {
    fn post(&self, to: usize, message: Message) -> SendState {
        match &self.outboxes[to] {
            Some(outbox) if !self.links.mailbox.has_left(to) => outbox.post(message),
            _ => SendState::Closed,
        }
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
        let is_panicking = std::thread::panicking();
        let has_failed = self.links.mailbox.failure().is_some();
        let outboxes = || self.outboxes.iter().flatten();
        // without a farewell, peers notice that this rank failed
        if !has_failed && !is_panicking {
            outboxes().for_each(Outbox::farewell);
        }
        let patience = if has_failed || is_panicking { Duration::ZERO } else { Self::FAREWELL };
        let deadline = Instant::now() + patience;
        outboxes().for_each(|outbox| outbox.close(deadline.saturating_duration_since(Instant::now())));
        // readers that wait for room: nobody receives any more
        self.links.mailbox.close();
        self.links.shut_down();
    }
}
