//! Socket of a connection. `tests/interleavings` has one in memory, with room for a few bytes.

use rustix::net::{SendFlags, send};
use std::io::{self, Write};
use std::time::Duration;

pub(super) use std::net::TcpStream as Socket;

/// Sends as much as the socket takes without waiting.
///
/// # Errors
/// `WouldBlock` if it takes nothing.
pub(super) fn send_now(socket: &Socket, bytes: &[u8]) -> io::Result<usize> {
    send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map_err(io::Error::from)
}

/// Sends all bytes.
pub(super) fn send_all(mut socket: &Socket, bytes: &[u8]) -> io::Result<()> {
    socket.write_all(bytes)
}

/// Sets the longest time of a read.
pub(super) fn set_read_limit(socket: &Socket, limit: Duration) -> io::Result<()> {
    socket.set_read_timeout(Some(limit))
}
