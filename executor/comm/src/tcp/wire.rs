//! Wire format for message headers and control messages, and the sending half of control connections.

use std::io::{self, ErrorKind, Read};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

use super::socket::{Socket, send_now};
use crate::communicator::NUMBERS_MAX;
use crate::dtype::Dtype;
use crate::endpoint::{OpenWait, Status};
use crate::error::{ActionName, Cause, Failure, StepContext};
use crate::message::{Header, Op, PayloadShape};

/// Maximum failure text length in bytes.
const TEXT_BYTES_MAX: usize = 1024;
const NO_RANK: u32 = u32::MAX;

/// Control message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Control {
    /// The job has ended.
    Abort(Failure),
    /// Requests the status of a rank.
    StatusRequest,
    /// Answers a request.
    StatusReply(Status),
    /// A rank has finished.
    Leave {
        /// Rank number.
        rank: usize,
        /// Ranks to which it has a data connection, which ends with a separate farewell.
        to: Vec<usize>,
    },
    /// Message in a tree collective.
    Facts(Header, Vec<u64>),
}

impl Control {
    /// Encodes the message, prefixed with the length.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        match self {
            Self::Abort(failure) => {
                body.push(0);
                body.push(failure.cause.code());
                body.extend(wire_rank(failure.culprit).to_le_bytes());
                body.extend(wire_rank(Some(failure.by)).to_le_bytes());
                put_at(&mut body, failure.at);
                let mut length = failure.message.len().min(TEXT_BYTES_MAX);
                // bounded, so that a reader can reject longer messages; cut at a character to stay valid
                // UTF-8
                while !failure.message.is_char_boundary(length) {
                    length -= 1;
                }
                body.extend(&failure.message.as_bytes()[..length]);
            }
            Self::StatusRequest => body.push(1),
            Self::StatusReply(status) => {
                body.push(2);
                body.extend(wire_rank(status.wait.map(|wait| wait.peer)).to_le_bytes());
                let age_ms = status.wait.map_or(0, |wait| wait.age.as_millis() as u64);
                body.extend(age_ms.to_le_bytes());
                for at in [status.wait.map(|wait| wait.at), status.last] {
                    body.push(u8::from(at.is_some()));
                    put_at(&mut body, at.unwrap_or(StepContext::step(0, "")));
                }
            }
            Self::Leave { rank, to } => {
                body.push(3);
                for rank in [rank].into_iter().chain(to) {
                    body.extend((*rank as u32).to_le_bytes());
                }
            }
            Self::Facts(header, numbers) => {
                body.push(4);
                body.extend(encode(header));
                body.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
            }
        }
        let mut frame = (body.len() as u32).to_le_bytes().to_vec();
        frame.append(&mut body);
        frame
    }

    /// Reads a message; returns `None` at the end of the connection.
    ///
    /// - `ranks`: number of ranks in the job
    ///
    /// # Errors
    /// `InvalidData` for a message that no rank sends, such as a message with a rank that does not exist;
    /// other stream errors.
    pub(super) fn read(stream: &mut impl Read, ranks: usize) -> io::Result<Option<Self>> {
        let mut length = [0; 4];
        match stream.read_exact(&mut length) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        let length = u32::from_le_bytes(length) as usize;
        if length > TEXT_BYTES_MAX + 256 + NUMBERS_MAX * 8 * ranks {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body)?;
        // a body that is too short is invalid too: the connection itself has not ended
        let decoded = Self::decode(&mut body.as_slice()).ok().flatten();
        decoded.filter(|control| control.fits(ranks)).map(Some).ok_or(io::ErrorKind::InvalidData.into())
    }

    /// Returns whether all ranks in the message exist.
    fn fits(&self, ranks: usize) -> bool {
        match self {
            Self::Abort(failure) => failure.by < ranks && failure.culprit.is_none_or(|rank| rank < ranks),
            Self::StatusRequest => true,
            Self::Leave { rank, to } => *rank < ranks && to.iter().all(|&rank| rank < ranks),
            Self::Facts(header, numbers) => {
                header.shape == PayloadShape::flat(Dtype::U64, numbers.len())
                    && numbers.len() <= NUMBERS_MAX * ranks
            }
            Self::StatusReply(status) => status.wait.is_none_or(|wait| wait.peer < ranks),
        }
    }

    fn decode(body: &mut &[u8]) -> io::Result<Option<Self>> {
        Ok(match take::<1>(body)? {
            [0] => {
                let Some(cause) = Cause::from_code(take::<1>(body)?[0]) else { return Ok(None) };
                let culprit = take_rank(body)?;
                let Some(by) = take_rank(body)? else { return Ok(None) };
                let at = take_at(body)?;
                let message = String::from_utf8_lossy(body).into_owned();
                Some(Self::Abort(Failure { cause, culprit, by, at, message }))
            }
            [1] => Some(Self::StatusRequest),
            [2] => {
                let rank = take_rank(body)?;
                let age = Duration::from_millis(u64::from_le_bytes(take(body)?));
                let [is_waiting] = take(body)?;
                let at = take_at(body)?;
                let [has_last] = take(body)?;
                let last = take_at(body)?;
                let wait = rank.filter(|_| is_waiting == 1).map(|peer| OpenWait { peer, at, age });
                Some(Self::StatusReply(Status { wait, last: (has_last == 1).then_some(last) }))
            }
            [3] => {
                let rank = u32::from_le_bytes(take(body)?) as usize;
                let (ranks, rest) = body.as_chunks::<4>();
                let to = ranks.iter().map(|&rank| u32::from_le_bytes(rank) as usize).collect();
                rest.is_empty().then_some(Self::Leave { rank, to })
            }
            [4] => {
                let Some(Frame::Message(header)) = decode(&take(body)?) else { return Ok(None) };
                let (numbers, rest) = body.as_chunks::<8>();
                let numbers = numbers.iter().map(|&number| u64::from_le_bytes(number)).collect();
                rest.is_empty().then_some(Self::Facts(header, numbers))
            }
            _ => None,
        })
    }
}

fn wire_rank(rank: Option<usize>) -> u32 {
    rank.map_or(NO_RANK, |rank| rank as u32)
}

fn put_at(body: &mut Vec<u8>, at: StepContext) {
    body.extend(at.step.to_le_bytes());
    body.extend(at.wire_microbatch().to_le_bytes());
    body.extend(at.action.padded());
}

fn take<const N: usize>(body: &mut &[u8]) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    body.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn take_rank(body: &mut &[u8]) -> io::Result<Option<usize>> {
    let rank = u32::from_le_bytes(take(body)?);
    Ok((rank != NO_RANK).then_some(rank as usize))
}

fn take_at(body: &mut &[u8]) -> io::Result<StepContext> {
    let step = u64::from_le_bytes(take(body)?);
    let microbatch = u32::from_le_bytes(take(body)?);
    Ok(StepContext::from_wire(step, microbatch, ActionName::from_padded(take(body)?)))
}

/// Header length in bytes.
pub(super) const HEADER_BYTES: usize = 80;
/// Header start, by which a reader notices that it lost synchronization.
const MAGIC: [u8; 4] = *b"dflM";
/// Operation code in the last frame from a rank that finished.
const FAREWELL: u8 = 0xff;

/// Decoded frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Frame {
    Message(Header),
    Farewell,
}

pub(super) fn encode(header: &Header) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4] = header.op as u8;
    bytes[5] = header.shape.dtype.code();
    let words = [header.comm, header.tag, header.at.step, header.shape.rows as u64, header.shape.cols as u64];
    for (index, word) in words.into_iter().enumerate() {
        bytes[8 + 8 * index..][..8].copy_from_slice(&word.to_le_bytes());
    }
    bytes[48..52].copy_from_slice(&header.at.wire_microbatch().to_le_bytes());
    bytes[52..76].copy_from_slice(header.at.action.padded());
    bytes
}

pub(super) fn farewell() -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4] = FAREWELL;
    bytes
}

/// Decodes a header; returns `None` if it is invalid.
pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Frame> {
    if bytes[..4] != MAGIC {
        return None;
    }
    if bytes[4] == FAREWELL {
        return Some(Frame::Farewell);
    }
    let word = |index: usize| bytes[8 + 8 * index..][..8].try_into().map(u64::from_le_bytes).ok();
    let microbatch = bytes[48..52].try_into().map(u32::from_le_bytes).ok()?;
    let action = ActionName::from_padded(bytes[52..76].try_into().ok()?);
    let shape = PayloadShape {
        dtype: Dtype::from_code(bytes[5])?,
        rows: usize::try_from(word(3)?).ok()?,
        cols: usize::try_from(word(4)?).ok()?,
    };
    // reject lengths that no allocation can satisfy before memory is reserved for them
    shape.bytes().filter(|&bytes| isize::try_from(bytes).is_ok())?;
    let at = StepContext::from_wire(word(2)?, microbatch, action);
    Some(Frame::Message(Header { comm: word(0)?, op: Op::from_code(bytes[4])?, tag: word(1)?, at, shape }))
}

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
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    use proptest::prelude::*;

    use super::*;
    use crate::message::Op;

    fn facts(numbers: usize) -> Header {
        let shape = PayloadShape::flat(Dtype::U64, numbers);
        Header { comm: 0, op: Op::Digest, tag: 5, at: StepContext::step(2, "check digest"), shape }
    }

    #[test]
    fn control_messages_round_trip() {
        let at = StepContext::microbatch(7, 3, "forward");
        let failure = Failure {
            cause: Cause::Digest,
            culprit: None,
            by: 3,
            at,
            message: "rank 2 \u{2192} 3".to_owned(),
        };
        let wait = OpenWait { peer: 2, at, age: Duration::from_millis(1700) };
        let status = Status { wait: Some(wait), last: Some(StepContext::step(8, "barrier")) };
        let all = [
            Control::Abort(failure.clone()),
            Control::Abort(Failure { culprit: Some(1), ..failure }),
            Control::StatusRequest,
            Control::StatusReply(status),
            Control::StatusReply(Status::default()),
            Control::Leave { rank: 3, to: vec![0, 2] },
            Control::Leave { rank: 0, to: Vec::new() },
            Control::Facts(facts(3), vec![1, u64::MAX, 0]),
            Control::Facts(facts(0), Vec::new()),
        ];
        let bytes: Vec<u8> = all.iter().flat_map(Control::encode).collect();
        let mut bytes = bytes.as_slice();
        for control in all {
            assert_eq!(Control::read(&mut bytes, 4).unwrap(), Some(control));
        }
        assert_eq!(Control::read(&mut bytes, 4).unwrap(), None);
    }

    #[test]
    fn ranks_that_do_not_exist_and_short_messages_are_invalid() {
        let at = StepContext::step(1, "recv");
        let failure = |culprit, by| Failure { cause: Cause::Died, culprit, by, at, message: String::new() };
        let waits = |peer| {
            let wait = OpenWait { peer, at, age: Duration::ZERO };
            Control::StatusReply(Status { wait: Some(wait), last: None })
        };
        let refused = |bytes: &[u8]| {
            let error = Control::read(&mut &*bytes, 4).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        };
        for control in [
            Control::Abort(failure(Some(4), 0)),
            Control::Abort(failure(None, 4)),
            waits(4),
            waits(usize::MAX >> 33),
            Control::Leave { rank: 4, to: Vec::new() },
            Control::Leave { rank: 1, to: vec![0, 4] },
            Control::Facts(facts(3), vec![1; 2]),
            Control::Facts(facts(65), vec![1; 65]),
        ] {
            refused(&control.encode());
        }
        assert!(Control::read(&mut waits(3).encode().as_slice(), 4).unwrap().is_some());
        refused(&[&2_u32.to_le_bytes(), [2, 0].as_slice()].concat());
        refused(&[&1_u32.to_le_bytes(), [9].as_slice()].concat());
        refused(&u32::MAX.to_le_bytes());
    }

    proptest! {
        #[test]
        fn headers_round_trip(
            words in any::<[u64; 3]>(), rows in 0_usize..1 << 20, cols in 0_usize..1 << 20,
            microbatch in any::<Option<u32>>(), action in "[a-z ]{0,24}", code in 1_u8..=5, op in 0_u8..8,
        ) {
            let microbatch = microbatch.filter(|&microbatch| microbatch != u32::MAX);
            let at = StepContext { step: words[2], microbatch, action: action.as_str().into() };
            let shape = PayloadShape { dtype: Dtype::from_code(code).unwrap(), rows, cols };
            let header = Header { comm: words[0], op: Op::from_code(op).unwrap(), tag: words[1], at, shape };
            prop_assert_eq!(decode(&encode(&header)), Some(Frame::Message(header)));
        }

        #[test]
        fn any_bytes_are_refused_or_decode_to_what_encodes_back(mut bytes in any::<[u8; HEADER_BYTES]>(), op in 0_u8..9) {
            prop_assert_eq!(decode(&bytes), None);
            bytes[..4].copy_from_slice(&MAGIC);
            (bytes[4], bytes[5]) = (op, op);
            if let Some(Frame::Message(header)) = decode(&bytes) {
                prop_assert_eq!(decode(&encode(&header)), Some(Frame::Message(header)));
            }
        }
    }

    #[test]
    fn lengths_beyond_all_memory_are_refused() {
        let at = StepContext::step(0, "");
        let shape = PayloadShape { dtype: Dtype::F64, rows: usize::MAX / 2, cols: 3 };
        assert_eq!(decode(&encode(&Header { comm: 0, op: Op::Point, tag: 0, at, shape })), None);
        assert_eq!(decode(&farewell()), Some(Frame::Farewell));
    }

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
