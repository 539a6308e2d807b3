//! Message and collective headers, as 64-bit words.

use std::fmt;

use dflop_comm::{ActionName, Buffer, Dtype, PayloadShape, StepContext};

const NAME_WORDS: usize = ActionName::BYTES_MAX / 8;
/// Number of words in an activity.
pub(crate) const CONTEXT_WORDS: usize = 2 + NAME_WORDS;
const NO_MICROBATCH: u64 = u64::MAX;

/// Properties on which sender and receiver of a message must agree, and the tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// Communicator.
    pub(crate) comm: u64,
    pub(crate) tag: u64,
    pub(crate) at: StepContext,
    pub(crate) shape: PayloadShape,
}

/// Message queue that a receive reads from: communicator, sender in the job, tag.
pub(crate) type Key = (u64, usize, u64);

impl Header {
    /// Number of words in a header.
    pub(crate) const WORDS: usize = CONTEXT_WORDS + 5;

    pub(crate) fn key(&self, from: usize) -> Key {
        (self.comm, from, self.tag)
    }

    /// Returns whether a receiver that expects `self` may accept a message with the header `found`.
    pub(crate) fn admits(&self, found: &Self) -> bool {
        let place = |header: &Self| (header.at.step, header.at.microbatch, header.shape);
        place(self) == place(found)
    }

    pub(crate) fn to_words(self) -> Buffer {
        let mut words = context_words(self.at);
        let PayloadShape { dtype, rows, cols } = self.shape;
        words.extend([self.comm, self.tag, code(dtype), rows as u64, cols as u64]);
        Buffer::U64(words)
    }

    pub(crate) fn from_words(words: &[u64]) -> Self {
        let (context, rest) = words.split_at(CONTEXT_WORDS);
        let (rows, cols) = (rest[3] as usize, rest[4] as usize);
        let shape = PayloadShape { dtype: dtype(rest[2]), rows, cols };
        Self { comm: rest[0], tag: rest[1], at: context_from_words(context), shape }
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "message {} of {} at {}", self.tag, self.shape, self.at)
    }
}

/// Returns the words for an activity.
pub(crate) fn context_words(at: StepContext) -> Vec<u64> {
    let mut name = [0; ActionName::BYTES_MAX];
    name[..at.action.as_str().len()].copy_from_slice(at.action.as_str().as_bytes());
    let mut words = vec![at.step, at.microbatch.map_or(NO_MICROBATCH, u64::from)];
    words.extend(name.as_chunks().0.iter().map(|&bytes| u64::from_le_bytes(bytes)));
    words
}

/// Inverse of [`context_words`].
pub(crate) fn context_from_words(words: &[u64]) -> StepContext {
    let name: Vec<u8> = words[2..CONTEXT_WORDS].iter().flat_map(|word| word.to_le_bytes()).collect();
    let name = String::from_utf8_lossy(&name);
    let action = ActionName::from(name.trim_end_matches('\0'));
    let microbatch = (words[1] != NO_MICROBATCH).then_some(words[1] as u32);
    StepContext { step: words[0], microbatch, action }
}

/// Returns the number for an element type.
pub(crate) fn code(dtype: Dtype) -> u64 {
    match dtype {
        Dtype::Bf16 => 2,
        Dtype::F32 => 3,
        Dtype::F64 => 4,
        Dtype::U64 => 5,
        _ => 1,
    }
}

/// Inverse of [`code`].
pub(crate) fn dtype(code: u64) -> Dtype {
    match code {
        2 => Dtype::Bf16,
        3 => Dtype::F32,
        4 => Dtype::F64,
        5 => Dtype::U64,
        _ => Dtype::U8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_back() {
        for at in [StepContext::microbatch(7, 3, "recv gradient, stage 3"), StepContext::step(u64::MAX, "")] {
            for dtype in [Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::F64, Dtype::U64] {
                let shape = PayloadShape { dtype, rows: 5, cols: 1 << 40 };
                let header = Header { comm: 9, tag: u64::MAX, at, shape };
                let Buffer::U64(words) = header.to_words() else { panic!("words") };
                assert_eq!(words.len(), Header::WORDS);
                assert_eq!(Header::from_words(&words), header);
            }
        }
    }
}
