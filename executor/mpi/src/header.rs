//! Message and collective headers, and control messages, as 64-bit words.
//!
//! Control messages are job failure, farewells, and status requests.

use dflop_comm::{ActionName, Buffer, Cause, Dtype, Failure, PayloadShape, StepContext};
use std::fmt;
use std::time::Duration;

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

/// Maximum length of a failure text in a message, in bytes; longer texts are cut.
const TEXT_BYTES_MAX: usize = 2048;

/// Message on the control channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Control {
    /// The job has failed.
    Failed(Failure),
    /// The sender has left the job, after this many messages to the receiver.
    Left(u64),
    /// The sender asks for the activity of the receiver.
    Ask,
    Answer(Status),
}

/// Rank activity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Status {
    /// Rank that it waits for, and the wait time; `None` if it computes or takes part in a collective.
    pub(crate) wait: Option<(usize, Duration)>,
    /// Most recent action.
    pub(crate) last: Option<StepContext>,
}

impl Control {
    /// Maximum number of words in a message.
    pub(crate) const WORDS: usize = 6 + CONTEXT_WORDS + TEXT_BYTES_MAX / 8;

    pub(crate) fn to_words(&self) -> Buffer {
        let words = match self {
            Self::Failed(failure) => {
                let mut end = failure.message.len().min(TEXT_BYTES_MAX);
                while !failure.message.is_char_boundary(end) {
                    end -= 1;
                }
                let mut text = failure.message.as_bytes()[..end].to_vec();
                text.resize(end.next_multiple_of(8), 0);
                let culprit = failure.culprit.map_or(u64::MAX, |culprit| culprit as u64);
                let mut words = vec![0, cause_code(failure.cause), culprit, failure.by as u64, end as u64];
                words.extend(context_words(failure.at));
                words.extend(text.as_chunks().0.iter().map(|&bytes| u64::from_le_bytes(bytes)));
                words
            }
            Self::Left(messages) => vec![1, *messages],
            Self::Ask => vec![2],
            Self::Answer(status) => {
                let (peer, age) = status.wait.unwrap_or((usize::MAX, Duration::ZERO));
                let mut words =
                    vec![3, peer as u64, age.as_millis() as u64, u64::from(status.last.is_some())];
                words.extend(context_words(status.last.unwrap_or(StepContext::step(0, ""))));
                words
            }
        };
        Buffer::U64(words)
    }

    pub(crate) fn from_words(words: &[u64]) -> Self {
        match words[0] {
            0 => {
                let text: Vec<u8> =
                    words[5 + CONTEXT_WORDS..].iter().flat_map(|word| word.to_le_bytes()).collect();
                let end = (words[4] as usize).min(text.len());
                Self::Failed(Failure {
                    cause: cause_from_code(words[1]),
                    culprit: (words[2] != u64::MAX).then_some(words[2] as usize),
                    by: words[3] as usize,
                    at: context_from_words(&words[5..]),
                    message: String::from_utf8_lossy(&text[..end]).into_owned(),
                })
            }
            1 => Self::Left(words[1]),
            2 => Self::Ask,
            _ => {
                let wait =
                    (words[1] != u64::MAX).then(|| (words[1] as usize, Duration::from_millis(words[2])));
                Self::Answer(Status { wait, last: (words[3] == 1).then(|| context_from_words(&words[4..])) })
            }
        }
    }
}

fn cause_code(cause: Cause) -> u64 {
    match cause {
        Cause::Died => 0,
        Cause::Left => 1,
        Cause::TimedOut => 2,
        Cause::Mismatch => 3,
        Cause::Digest => 4,
        Cause::Caller => 5,
        _ => 6,
    }
}

fn cause_from_code(code: u64) -> Cause {
    let known = [Cause::Died, Cause::Left, Cause::TimedOut, Cause::Mismatch, Cause::Digest, Cause::Caller];
    known.get(code as usize).copied().unwrap_or(Cause::Protocol)
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

    #[test]
    fn every_message_is_read_back_from_a_long_buffer() {
        let at = StepContext::microbatch(7, 3, "recv, stage 3");
        let failure = |cause, message: &str| {
            Control::Failed(Failure { cause, culprit: Some(2), by: 1, at, message: message.to_owned() })
        };
        let all = [
            failure(Cause::Caller, "rank 2 ended the job: é"),
            failure(Cause::Digest, ""),
            failure(Cause::Protocol, "x"),
            Control::Left(9),
            Control::Ask,
            Control::Answer(Status { wait: Some((4, Duration::from_millis(70))), last: Some(at) }),
            Control::Answer(Status::default()),
        ];
        for message in all {
            let Buffer::U64(mut words) = message.to_words() else { panic!("words") };
            words.resize(Control::WORDS, u64::MAX);
            assert_eq!(Control::from_words(&words), message);
        }
    }

    #[test]
    fn a_long_text_is_cut_at_a_character() {
        let message = "é".repeat(TEXT_BYTES_MAX);
        let at = StepContext::step(0, "end");
        let failure = Failure { cause: Cause::Caller, culprit: None, by: 1, at, message };
        let Buffer::U64(words) = Control::Failed(failure).to_words() else { panic!("words") };
        assert!(words.len() <= Control::WORDS);
        let Control::Failed(found) = Control::from_words(&words) else { panic!("a failure") };
        assert_eq!(found.message, "é".repeat(TEXT_BYTES_MAX / 2));
    }
}
