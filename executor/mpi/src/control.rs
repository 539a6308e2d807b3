//! Control messages: job failure, farewells, and status requests.

use std::time::Duration;

use dflop_comm::{Buffer, Cause, Failure, StepContext};

use crate::header::{CONTEXT_WORDS, context_from_words, context_words};

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
