//! Sending half of a control connection, which never blocks and never continues after a truncated message.

use super::socket::{Socket, send_now};
use std::io::ErrorKind;
use std::net::Shutdown;
use std::sync::Arc;

/// Sending half of the control connection to a peer.
#[derive(Debug, Default)]
pub(super) struct ControlLine {
    /// `None` once the connection was closed.
    stream: Option<Arc<Socket>>,
    /// Message bytes that the socket has not accepted yet.
    unsent: Vec<u8>,
}

impl ControlLine {
    pub(super) fn new(stream: Arc<Socket>) -> Self {
        Self { stream: Some(stream), unsent: Vec::new() }
    }

    /// Returns whether messages can still be sent.
    pub(super) fn is_open(&self) -> bool {
        self.stream.is_some()
    }

    /// Queues a message after all unsent messages.
    pub(super) fn push(&mut self, frame: &[u8]) {
        self.unsent.extend_from_slice(frame);
    }

    /// Sends as much as the socket accepts; closes a failed connection. Returns whether everything was sent.
    pub(super) fn flush(&mut self) -> bool {
        while let Some(stream) = self.stream.as_ref().filter(|_| !self.unsent.is_empty()) {
            match send_now(stream, &self.unsent) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                Err(_) => self.close(),
            }
        }
        self.stream.is_some()
    }

    /// Closes the connection: a peer that does not accept messages must not receive a partial message.
    pub(super) fn close(&mut self) {
        if let Some(stream) = self.stream.take() {
            // closing a connection that has already ended is not an error
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.unsent.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    fn pair() -> (ControlLine, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let line = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (ControlLine::new(Arc::new(line)), listener.accept().unwrap().0)
    }

    #[test]
    fn messages_arrive_whole_and_in_order_after_a_full_buffer() {
        let (mut line, mut peer) = pair();
        let mut expected: Vec<u8> = Vec::new();
        let mut number = 0_u32;
        // until the socket accepts no more, most likely in the middle of a message
        loop {
            let frame: Vec<u8> = number.to_le_bytes().repeat(250);
            expected.extend(&frame);
            number += 1;
            line.push(&frame);
            if !line.flush() {
                break;
            }
        }
        let total = expected.len();
        let reading = std::thread::spawn(move || {
            let mut found = vec![0; total];
            peer.read_exact(&mut found).unwrap();
            found
        });
        while !line.flush() {
            std::thread::yield_now();
        }
        assert_eq!(reading.join().unwrap(), expected);
    }

    #[test]
    fn a_closed_line_sends_nothing_more() {
        let (mut line, mut peer) = pair();
        line.push(&[7; 10]);
        assert!(line.flush() && line.is_open());
        line.push(&[8; 10]);
        line.close();
        line.push(&[9; 10]);
        assert!(!line.flush() && !line.is_open());
        let mut found = Vec::new();
        peer.read_to_end(&mut found).unwrap();
        assert_eq!(found, [7; 10]);
    }
}
