//! Wire format for message headers: fixed length, little-endian.

use crate::dtype::Dtype;
use crate::error::{ActionName, StepContext};
use crate::message::{Header, Op, PayloadShape};

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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
}
