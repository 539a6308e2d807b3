//! Socket of a connection. `tests/interleavings` has one in memory, with room for a few bytes.

use rustix::net::{SendFlags, send};
use std::io;

pub(super) use std::net::TcpStream as Socket;

/// Sends as much as the socket takes without waiting.
///
/// # Errors
/// `WouldBlock` if it takes nothing.
pub(super) fn send_now(socket: &Socket, bytes: &[u8]) -> io::Result<usize> {
    send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map_err(io::Error::from)
}
