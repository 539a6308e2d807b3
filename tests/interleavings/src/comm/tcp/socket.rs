//! In-memory socket. It accepts a few bytes at a time, so writes are cut in the middle of messages.

use crate::sync::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of queued bytes per direction: less than two headers.
const PIPE_BYTES: usize = 150;

#[derive(Debug, Default)]
struct Pipe {
    state: Mutex<PipeState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct PipeState {
    bytes: VecDeque<u8>,
    is_closed: bool,
}

/// Connection end.
#[derive(Debug)]
pub(crate) struct Socket {
    incoming: Arc<Pipe>,
    outgoing: Arc<Pipe>,
}

/// Returns both ends of a connection.
pub(crate) fn connection() -> (Socket, Socket) {
    let (there, back) = (Arc::<Pipe>::default(), Arc::<Pipe>::default());
    let other = Socket { incoming: there.clone(), outgoing: back.clone() };
    (Socket { incoming: back, outgoing: there }, other)
}

/// Sends as much as there is room for.
pub(super) fn send_now(socket: &Socket, bytes: &[u8]) -> io::Result<usize> {
    match socket.outgoing.put(bytes, false) {
        Ok(0) if !bytes.is_empty() => Err(ErrorKind::WouldBlock.into()),
        sent => sent,
    }
}

impl Socket {
    /// Ends both directions; bytes that were sent still arrive.
    pub(crate) fn shutdown(&self, _: Shutdown) -> io::Result<()> {
        for pipe in [&self.incoming, &self.outgoing] {
            pipe.state.lock().unwrap().is_closed = true;
            pipe.changed.notify_all();
        }
        Ok(())
    }
}

impl Pipe {
    fn put(&self, bytes: &[u8], is_patient: bool) -> io::Result<usize> {
        let mut state = self.state.lock().unwrap();
        while is_patient && state.bytes.len() == PIPE_BYTES && !state.is_closed {
            state = self.changed.wait(state).unwrap();
        }
        if state.is_closed {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let taken = bytes.len().min(PIPE_BYTES - state.bytes.len());
        state.bytes.extend(&bytes[..taken]);
        drop(state);
        self.changed.notify_all();
        Ok(taken)
    }
}

/// Sends all bytes.
pub(super) fn send_all(mut socket: &Socket, bytes: &[u8]) -> io::Result<()> {
    socket.write_all(bytes)
}

/// Does nothing: time does not pass.
pub(super) fn set_read_limit(_: &Socket, _: Duration) -> io::Result<()> {
    Ok(())
}

impl Read for &Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let pipe = &self.incoming;
        let mut state = pipe.state.lock().unwrap();
        while state.bytes.is_empty() && !state.is_closed && !into.is_empty() {
            state = pipe.changed.wait(state).unwrap();
        }
        let length = into.len().min(state.bytes.len());
        for (byte, from) in into.iter_mut().zip(state.bytes.drain(..length)) {
            *byte = from;
        }
        drop(state);
        pipe.changed.notify_all();
        Ok(length)
    }
}

impl Write for &Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.outgoing.put(bytes, true)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
