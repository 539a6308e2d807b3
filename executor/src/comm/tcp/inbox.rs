//! Reads the messages of one peer into the mailbox.

use super::frame::{Frame, HEADER_BYTES, decode};
use super::links::Links;
use crate::comm::error::Cause;
use crate::comm::message::{Header, Message};
use std::io::{self, BufReader, Read};
use std::net::TcpStream;
use std::time::Duration;

/// Size of the read buffer: fits the headers of many small messages; large messages bypass it.
const BUFFER_BYTES: usize = 32 << 10;
/// Longest time after which a reader that found no room checks again.
const ROOM: Duration = Duration::from_hours(1);

/// Reads messages until the connection ends.
pub(super) fn read_messages(links: &Links, peer: usize, stream: TcpStream) {
    let mut stream = BufReader::with_capacity(BUFFER_BYTES, stream);
    let mut header = [0; HEADER_BYTES];
    while stream.read_exact(&mut header).is_ok() {
        match decode(&header) {
            Some(Frame::Message(header)) => {
                if read_message(links, peer, header, &mut stream).is_err() {
                    break;
                }
            }
            Some(Frame::Farewell) => {
                links.farewell(peer);
                break;
            }
            None => {
                let message = format!("rank {peer} sent bytes that are not a message");
                links.fail(Cause::Protocol, peer, message);
                break;
            }
        }
    }
    links.data_ended(peer);
}

fn read_message(links: &Links, peer: usize, header: Header, stream: &mut impl Read) -> io::Result<()> {
    let mailbox = &links.mailbox;
    // not reading is the back pressure: TCP then blocks the sender
    while !mailbox.has_room(peer) {
        if mailbox.failure().is_some() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        // waiting for this peer, or receiving one of its messages, makes room
        let _ = mailbox.wait_for_room(peer, ROOM);
    }
    let elements = header.shape.elements().unwrap_or_default();
    let mut buffer = mailbox.receive_buffers.take(header.shape.dtype, elements);
    stream.read_exact(buffer.as_bytes_mut())?;
    mailbox.deliver(peer, Message { header, buffer });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::frame::encode;
    use super::*;
    use crate::comm::error::Failure;
    use crate::comm::mailbox::Mailbox;
    use crate::comm::message::Op;
    use crate::comm::payload::PayloadShape;
    use crate::comm::step_context::StepContext;
    use std::io::Write;
    use std::net::TcpListener;
    use std::sync::Arc;

    /// Returns the failure of a rank whose peer sent these bytes and hung up.
    fn failure_after(bytes: &[u8]) -> Option<Failure> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        peer.write_all(bytes).unwrap();
        drop(peer);
        let mailbox = Arc::new(Mailbox::new(2, 1 << 20));
        let links = Links::new(0, mailbox.clone(), vec![None, None]).unwrap();
        read_messages(&links, 1, stream.try_clone().unwrap());
        // the control connection has ended as well
        links.read_controls(1, stream);
        mailbox.failure()
    }

    #[test]
    fn invalid_and_truncated_messages_blame_the_sender() {
        let at = StepContext::microbatch(6, 2, "send");
        let header = Header { comm: 0, op: Op::Point, tag: 1, at, shape: PayloadShape::f32(2, 2) };
        let whole = [encode(&header).as_slice(), &[0; 16]].concat();
        let cut = failure_after(&whole[..whole.len() - 1]).unwrap();
        assert_eq!((cut.cause, cut.culprit), (Cause::Died, Some(1)));
        assert!(cut.message.contains("before it sent anything"), "{cut}");
        let heard = failure_after(&whole).unwrap();
        assert!(heard.message.contains("last heard of at step 6, microbatch 2, `send`"), "{heard}");
        let noise = failure_after(&[whole.as_slice(), &[9; HEADER_BYTES]].concat()).unwrap();
        assert_eq!((noise.cause, noise.culprit), (Cause::Protocol, Some(1)));
        assert_eq!(failure_after(&[whole, super::super::frame::farewell().to_vec()].concat()), None);
    }
}
