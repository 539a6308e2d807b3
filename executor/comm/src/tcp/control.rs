//! Control messages: the end of the job, status requests and replies.

use crate::error::{Cause, Failure};
use crate::mailbox::{OpenWait, Status};
use crate::step_context::{ActionName, StepContext};
use std::io::{self, Read};
use std::time::Duration;

/// Longest text of a failure in bytes.
const TEXT_BYTES_MAX: usize = 1024;
const NO_RANK: u32 = u32::MAX;

/// One control message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Control {
    /// The job has ended.
    Abort(Failure),
    /// Asks for the status of a rank; the number identifies the request.
    StatusRequest(u64),
    /// Answers the request with this number.
    StatusReply(u64, Status),
}

impl Control {
    /// Encodes the message with its length.
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
                // bounded, so that a reader can refuse longer messages; cut at a character to stay valid
                // UTF-8
                while !failure.message.is_char_boundary(length) {
                    length -= 1;
                }
                body.extend(&failure.message.as_bytes()[..length]);
            }
            Self::StatusRequest(id) => {
                body.push(1);
                body.extend(id.to_le_bytes());
            }
            Self::StatusReply(id, status) => {
                body.push(2);
                body.extend(id.to_le_bytes());
                body.extend(wire_rank(status.wait.map(|wait| wait.peer)).to_le_bytes());
                let age_ms = status.wait.map_or(0, |wait| wait.age.as_millis() as u64);
                body.extend(age_ms.to_le_bytes());
                for at in [status.wait.map(|wait| wait.at), status.last] {
                    body.push(u8::from(at.is_some()));
                    put_at(&mut body, at.unwrap_or(StepContext::step(0, "")));
                }
            }
        }
        let mut frame = (body.len() as u32).to_le_bytes().to_vec();
        frame.append(&mut body);
        frame
    }

    /// Reads one message; returns `None` at the end of the connection.
    ///
    /// - `ranks`: number of ranks of the job
    ///
    /// # Errors
    /// `InvalidData` for a message that no rank sends, such as one with a rank that does not exist; other
    /// errors of the stream.
    pub(super) fn read(stream: &mut impl Read, ranks: usize) -> io::Result<Option<Self>> {
        let mut length = [0; 4];
        match stream.read_exact(&mut length) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        let length = u32::from_le_bytes(length) as usize;
        if length > TEXT_BYTES_MAX + 256 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body)?;
        // a body that is too short is invalid too: the connection itself has not ended
        let decoded = Self::decode(&mut body.as_slice()).ok().flatten();
        decoded.filter(|control| control.fits(ranks)).map(Some).ok_or(io::ErrorKind::InvalidData.into())
    }

    /// Returns whether all ranks of the message exist.
    fn fits(&self, ranks: usize) -> bool {
        match self {
            Self::Abort(failure) => failure.by < ranks && failure.culprit.is_none_or(|rank| rank < ranks),
            Self::StatusRequest(_) => true,
            Self::StatusReply(_, status) => status.wait.is_none_or(|wait| wait.peer < ranks),
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
            [1] => Some(Self::StatusRequest(u64::from_le_bytes(take(body)?))),
            [2] => {
                let id = u64::from_le_bytes(take(body)?);
                let rank = take_rank(body)?;
                let age = Duration::from_millis(u64::from_le_bytes(take(body)?));
                let [is_waiting] = take(body)?;
                let at = take_at(body)?;
                let [has_last] = take(body)?;
                let last = take_at(body)?;
                let wait = rank.filter(|_| is_waiting == 1).map(|peer| OpenWait { peer, at, age });
                Some(Self::StatusReply(id, Status { wait, last: (has_last == 1).then_some(last) }))
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

#[cfg(test)]
mod tests {
    use super::*;

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
            Control::StatusRequest(77),
            Control::StatusReply(77, status),
            Control::StatusReply(78, Status::default()),
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
            Control::StatusReply(1, Status { wait: Some(wait), last: None })
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
        ] {
            refused(&control.encode());
        }
        assert!(Control::read(&mut waits(3).encode().as_slice(), 4).unwrap().is_some());
        refused(&[&2_u32.to_le_bytes(), [2, 0].as_slice()].concat());
        refused(&[&1_u32.to_le_bytes(), [9].as_slice()].concat());
        refused(&u32::MAX.to_le_bytes());
    }
}
