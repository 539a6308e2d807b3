//! Stand-in for other ranks in single-rank tests.

use super::dial::{Dial, Line};
use super::socket::Socket;
use std::io;
use std::time::Duration;

/// No other rank can be called.
#[derive(Debug)]
pub(super) struct NoOne;

impl Dial for NoOne {
    fn dial(&self, _: usize, _: Line, _: Duration) -> io::Result<Socket> {
        Err(io::ErrorKind::ConnectionRefused.into())
    }

    fn close(&self) {}
}
