//! Reads the messages of one peer into the mailbox.

use super::frame::{Frame, HEADER_BYTES, decode};
use super::links::Links;
use crate::comm::error::Cause;
use crate::comm::message::{Header, Message};
use std::io::{self, BufReader, Read};
use std::net::TcpStream;
use std::time::Duration;

/// Holds the headers of many small messages; large ones pass by it.
const BUFFER_BYTES: usize = 32 << 10;
/// A reader that found no room looks again after this, at the latest.
const ROOM: Duration = Duration::from_hours(1);

/// Reads until the connection ends.
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
                let message = format!("rank {peer} sent bytes that are no message");
                links.fail(Cause::Protocol, peer, message);
                break;
            }
        }
    }
    links.data_ended(peer);
}

fn read_message(links: &Links, peer: usize, header: Header, stream: &mut impl Read) -> io::Result<()> {
    let mailbox = &links.mailbox;
    while !mailbox.has_room(peer) {
        if mailbox.failure().is_some() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        // whoever waits for this peer, or takes a message of it, makes room
        let _ = mailbox.wait_for_room(peer, ROOM);
    }
    let elements = header.shape.elements().unwrap_or_default();
    let mut buffer = mailbox.recycled.take(header.shape.dtype, elements);
    stream.read_exact(buffer.as_bytes_mut())?;
    mailbox.deliver(peer, Message { header, buffer });
    Ok(())
}
