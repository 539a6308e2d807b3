//! Connection socket. `tests/interleavings` has an in-memory implementation, with room for a few bytes.

use rustix::net::{SendFlags, send};
use std::io::{self, Write};
use std::time::Duration;

pub(super) use std::net::TcpStream as Socket;

/// Sends as much as the socket accepts without waiting.
///
/// # Errors
/// `WouldBlock` if it accepts nothing.
pub(super) fn send_now(socket: &Socket, bytes: &[u8]) -> io::Result<usize> {
    send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map_err(io::Error::from)
}

/// Sends all bytes.
pub(super) fn send_all(mut socket: &Socket, bytes: &[u8]) -> io::Result<()> {
    socket.write_all(bytes)
}

/// Sets the time limit for a read.
pub(super) fn set_read_limit(socket: &Socket, limit: Duration) -> io::Result<()> {
    socket.set_read_timeout(Some(limit))
}
