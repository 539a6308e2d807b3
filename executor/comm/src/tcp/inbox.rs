//! Reads messages from one peer into the mailbox, and exchanges status requests, each on a separate
//! connection.
//!
//! The requesting rank connects directly to the requested rank, so a rank that does not answer is the rank to
//! blame.

use std::io::{self, BufReader, Read};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::links::{Line, Links};
use super::socket::{Socket, send_all, set_read_limit};
use super::wire::{Control, Frame, HEADER_BYTES, decode};
use crate::endpoint::{Expected, Interrupt, Status};
use crate::error::Cause;
use crate::message::{Buffer, Header, Message};

/// Read buffer size in bytes: fits the headers of many small messages; large messages bypass it.
const BUFFER_BYTES: usize = 32 << 10;
/// Initial read size in bytes for a message whose length is not trusted; each further part doubles the
/// message.
const UNTRUSTED_BYTES: usize = 1 << 20;
/// Maximum time until a reader that found no room checks again.
const ROOM: Duration = Duration::from_hours(1);

impl Links {
    /// Reads messages from a peer until the data connection ends.
    pub(super) fn read_data(&self, peer: usize, stream: Socket) {
        let stream = Arc::new(stream);
        self.add_incoming(stream.clone());
        read_messages(self, peer, &*stream);
    }
}

/// Reads messages until the connection ends.
pub(super) fn read_messages(links: &Links, peer: usize, stream: impl Read) {
    let mut stream = BufReader::with_capacity(BUFFER_BYTES, stream);
    let mut header = [0; HEADER_BYTES];
    let mut has_begun = false;
    while stream.read_exact(&mut header).is_ok() {
        has_begun = true;
        match decode(&header) {
            Some(Frame::Message(header)) => {
                if read_message(links, peer, header, &mut stream).is_err() {
                    break;
                }
            }
            Some(Frame::Farewell) => {
                links.farewell(peer);
                return;
            }
            None => {
                let message = format!("rank {peer} sent bytes that are not a message");
                links.fail(Cause::Protocol, peer, message);
                break;
            }
        }
    }
    // a caller that abandoned its handshake too early calls again: nothing was sent on its first connection
    if has_begun {
        links.data_ended(peer);
    }
}

fn read_message(links: &Links, peer: usize, header: Header, stream: &mut impl Read) -> io::Result<()> {
    let mailbox = &links.mailbox;
    // not reading is the back pressure: TCP then blocks the sender
    while !mailbox.has_room(peer) {
        // waiting for this peer, or receiving a message from it, frees room
        match mailbox.wait_for_room(peer, ROOM) {
            Ok(()) | Err(Interrupt::TimedOut) => {}
            Err(Interrupt::Failed(_) | Interrupt::Left) => {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
        }
    }
    let bytes = header.shape.bytes().unwrap_or_default();
    // the length is checked before memory is allocated for it, against the planned receive if there is one
    match mailbox.expected(header.key(peer)) {
        Some(Expected::Message(expected)) if expected.admits(&header) => {}
        Some(_) => {
            // the header suffices for a receiver that compares it, and for a receiver that is gone
            mailbox.deliver(peer, Message { header, buffer: Buffer::zeros(header.shape.dtype, 0) });
            return skip(stream, bytes);
        }
        None if bytes <= mailbox.buffered_bytes_max() => {}
        None => {
            let buffer = read_untrusted(links, peer, header, stream)?;
            mailbox.deliver(peer, Message { header, buffer });
            return Ok(());
        }
    }
    let elements = header.shape.elements().unwrap_or_default();
    let mut buffer = mailbox.receive_buffers.take(header.shape.dtype, elements);
    stream.read_exact(buffer.as_bytes_mut())?;
    mailbox.deliver(peer, Message { header, buffer });
    Ok(())
}

/// Reads a message that exceeds the buffered bytes limit and is not expected yet: memory grows with the bytes
/// that arrive.
fn read_untrusted(links: &Links, peer: usize, header: Header, stream: &mut impl Read) -> io::Result<Buffer> {
    let elements = header.shape.elements().unwrap_or_default();
    let mut buffer = Buffer::zeros(header.shape.dtype, 0);
    while buffer.elements() < elements {
        let read_bytes = buffer.as_bytes().len();
        let first = UNTRUSTED_BYTES / header.shape.dtype.bytes();
        let length = buffer.elements().saturating_mul(2).clamp(first, elements.max(first)).min(elements);
        if let Err(error) = buffer.grow(length) {
            let message =
                format!("rank {peer} sent {header}, for which rank {} has no memory: {error}", links.rank);
            links.fail(Cause::Protocol, peer, message);
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        stream.read_exact(&mut buffer.as_bytes_mut()[read_bytes..])?;
    }
    Ok(buffer)
}

/// Reads and discards bytes.
fn skip(stream: &mut impl Read, bytes: usize) -> io::Result<()> {
    let skipped = io::copy(&mut stream.take(bytes as u64), &mut io::sink())?;
    if skipped == bytes as u64 { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Time limit for the single message from the caller.
const MESSAGE: Duration = Duration::from_secs(5);

impl Links {
    /// Requests the status of a rank; returns `None` if the rank does not answer in time, or if the job has
    /// failed.
    pub(super) fn ask(&self, peer: usize, timeout: Duration) -> Option<Status> {
        match self.ask_once(peer, Instant::now() + timeout) {
            Ok(Some(Control::StatusReply(status))) => return Some(status),
            Ok(Some(control @ Control::Abort(_))) => self.take_control(peer, control),
            Ok(_) => {}
            Err(error) => tracing::debug!(peer, %error, "a status request failed"),
        }
        None
    }

    fn ask_once(&self, peer: usize, deadline: Instant) -> io::Result<Option<Control>> {
        let left = || deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let stream = self.dial.dial(peer, Line::Inquiry, left())?;
        set_read_limit(&stream, left())?;
        send_all(&stream, &Control::StatusRequest.encode())?;
        Control::read(&mut &stream, self.size())
    }

    /// Serves a connection from a rank that requests the status, or that passes news on directly.
    pub(super) fn answer(&self, peer: usize, stream: &Socket) {
        let read = set_read_limit(stream, MESSAGE).and_then(|()| Control::read(&mut &*stream, self.size()));
        let answered = match read {
            Ok(Some(Control::StatusRequest)) => {
                let failure = self.mailbox.failure();
                let status = || Control::StatusReply(self.mailbox.status());
                send_all(stream, &failure.map_or_else(status, Control::Abort).encode())
            }
            Ok(Some(control @ (Control::Abort(_) | Control::Leave { .. }))) => {
                self.take_control(peer, control);
                Ok(())
            }
            // the caller gave up, or is not a rank with this version: its own wait ends
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = answered {
            tracing::debug!(peer, %error, "a call could not be answered");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;

    use super::*;
    use crate::dtype::Dtype;
    use crate::endpoint::{Mailbox, Wait};
    use crate::error::{Failure, StepContext};
    use crate::message::{Op, PayloadShape};
    use crate::tcp::links::ClosedPort;
    use crate::tcp::wire::encode;

    /// Returns the failure on a rank whose peer sent these bytes and hung up.
    fn failure_after(bytes: &[u8]) -> Option<Failure> {
        let mailbox = Arc::new(Mailbox::new(2, 1 << 20));
        read_into(&mailbox, bytes);
        mailbox.failure()
    }

    /// Reads the bytes that a peer sends before it hangs up.
    fn read_into(mailbox: &Arc<Mailbox>, bytes: &[u8]) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let links = Links::new(0, mailbox.clone(), vec![None, None], Box::new(ClosedPort));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                peer.write_all(bytes).unwrap();
                drop(peer);
            });
            read_messages(&links, 1, stream);
        });
    }

    fn header(tag: u64, shape: PayloadShape) -> Header {
        Header { comm: 0, op: Op::Point, tag, at: StepContext::microbatch(6, 2, "send"), shape }
    }

    fn taken(mailbox: &Mailbox, header: Header) -> Message {
        let number = mailbox.post(header.key(1), header);
        let mut wait = Wait::new(1, header.at, false);
        mailbox.take(header.key(1), number, &mut wait, Duration::ZERO).unwrap().0
    }

    #[test]
    fn a_length_that_no_memory_holds_is_not_allocated() {
        let huge = header(1, PayloadShape::flat(Dtype::U8, isize::MAX as usize));
        let bytes = [encode(&huge).as_slice(), &vec![7; 3 * UNTRUSTED_BYTES]].concat();
        let failure = failure_after(&bytes).unwrap();
        assert_eq!((failure.cause, failure.culprit), (Cause::Died, Some(1)), "the message never ended");
    }

    #[test]
    fn a_length_that_the_plan_does_not_have_is_not_allocated() {
        let mailbox = Arc::new(Mailbox::new(2, 1 << 20));
        let planned = header(1, PayloadShape::f32(2, 2));
        let number = mailbox.post(planned.key(1), planned);
        let huge = header(1, PayloadShape::flat(Dtype::U8, isize::MAX as usize));
        read_into(&mailbox, &encode(&huge));
        let mut wait = Wait::new(1, planned.at, false);
        let found = mailbox.take(planned.key(1), number, &mut wait, Duration::ZERO).unwrap().0;
        assert_eq!(found.header, huge, "the receiver names the difference");
        assert!(!planned.admits(&found.header) && found.buffer.elements() == 0);
    }

    #[test]
    fn messages_above_the_bound_arrive_whole_expected_or_not() {
        let elements = 3 * UNTRUSTED_BYTES / 4 + 5;
        let large = |tag| header(tag, PayloadShape::f32(1, elements));
        let values: Vec<f32> = (0..elements).map(|value| value as f32).collect();
        let message = |tag| [encode(&large(tag)).as_slice(), bytemuck::cast_slice(&values)].concat();
        let mailbox = Arc::new(Mailbox::new(2, 1024));
        let number = mailbox.post(large(1).key(1), large(1));
        // its receive is dropped: the bytes are read, and there is room for the next message
        mailbox.discard(large(0).key(1), mailbox.post(large(0).key(1), large(0)), 1);
        let mut wait = Wait::new(1, large(1).at, false);
        mailbox.begin_wait(&mut wait);
        let farewell = crate::tcp::wire::farewell().to_vec();
        read_into(&mailbox, &[message(0), message(1), message(2), farewell].concat());
        mailbox.end_wait(&mut wait);
        let expected = mailbox.take(large(1).key(1), number, &mut wait, Duration::ZERO).unwrap().0;
        assert_eq!(expected.buffer, Buffer::F32(values.clone()));
        assert_eq!(taken(&mailbox, large(2)).buffer, Buffer::F32(values));
        assert_eq!(mailbox.failure(), None);
    }

    #[test]
    fn invalid_and_truncated_messages_blame_the_sender() {
        let whole = [encode(&header(1, PayloadShape::f32(2, 2))).as_slice(), &[0; 16]].concat();
        let cut = failure_after(&whole[..whole.len() - 1]).unwrap();
        assert_eq!((cut.cause, cut.culprit), (Cause::Died, Some(1)));
        assert!(cut.message.contains("before it sent anything"), "{cut}");
        let heard = failure_after(&whole).unwrap();
        assert!(heard.message.contains("last heard of at step 6, microbatch 2, `send`"), "{heard}");
        let noise = failure_after(&[whole.as_slice(), &[9; HEADER_BYTES]].concat()).unwrap();
        assert_eq!((noise.cause, noise.culprit), (Cause::Protocol, Some(1)));
        assert_eq!(failure_after(&[whole, crate::tcp::wire::farewell().to_vec()].concat()), None);
    }
}
