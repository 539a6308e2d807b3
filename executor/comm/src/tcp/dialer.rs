//! Calls other ranks over TCP.

use super::dial::{Dial, Line};
use super::door::Door;
use crate::rendezvous::{Deadline, Hello, JobToken, Purpose, Rejection, call};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// Pause between two calls.
const RETRY: Duration = Duration::from_millis(20);

/// Addresses of all ranks, and the listener of this rank.
#[derive(Debug)]
pub(super) struct Dialer {
    pub(super) rank: usize,
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) token: JobToken,
    pub(super) door: Arc<Door>,
}

impl Dial for Dialer {
    fn dial(&self, peer: usize, line: Line, patience: Duration) -> io::Result<TcpStream> {
        let purpose = match line {
            Line::Data => Purpose::Data,
            Line::Inquiry => Purpose::Inquiry,
        };
        let hello = Hello { purpose, rank: self.rank, size: self.addresses.len() };
        let deadline = Deadline::after(patience);
        loop {
            let error = match call(&self.addresses[peer], hello, &self.token, &deadline) {
                Ok(stream) => return Ok(stream),
                Err(Rejection::Io(error)) => error,
                Err(Rejection::WrongToken) => io::Error::other("another job listens on its port"),
                Err(Rejection::Refused(reason)) => io::Error::other(reason),
            };
            // a busy listener rejects for lack of room: the next call may succeed
            if error.kind() == io::ErrorKind::ConnectionRefused || deadline.left().is_zero() {
                return Err(error);
            }
            std::thread::sleep(RETRY.min(deadline.left()));
        }
    }

    fn close(&self) {
        self.door.close();
    }
}
