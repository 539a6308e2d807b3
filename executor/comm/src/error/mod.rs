//! Message and launch errors, the failure that ends a job, and the rank activity that both name.
//!
//! Rank activity within a step, which errors name and receivers check.

use super::dtype::Dtype;
use std::time::Duration;
use std::{fmt, io};

/// Exit status for a rank that ended because another rank failed; the launcher looks for that rank.
pub const EXIT_SECONDARY: u8 = 75;

/// Result with an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Failure to send or receive a message, or to find the other ranks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// The job has ended on every rank, for the reason in the failure.
    #[error("{failure} (rank {rank} was at {at})")]
    Failed { failure: Box<Failure>, rank: usize, at: Box<StepContext> },
    /// The communicator has no such rank.
    #[error("rank {rank} does not exist in a communicator of {size} ranks")]
    Rank { rank: usize, size: usize },
    /// Rows and columns do not match the number of elements.
    #[error("expected {expected}, found {found} elements")]
    Length { found: usize, expected: String },
    /// The parts in a collective do not match the ranks or the elements.
    #[error("expected {size} parts of {elements} elements in total, found {parts} parts of {sum} elements")]
    Parts { parts: usize, sum: usize, size: usize, elements: usize },
    /// Elements with this type cannot be summed: bytes have no sum, and bf16 sums would round after every
    /// term.
    #[error("a collective cannot sum elements of type {dtype:?}")]
    NotSummable { dtype: Dtype },
    /// The job has too many ranks for a connection between every two.
    #[error(
        "the TCP transport serves at most {max} ranks, found {size}; larger jobs need a transport over NCCL or MPI"
    )]
    TooManyRanks { size: usize, max: usize },
    /// A setting is invalid.
    #[error("invalid `{setting}`: {reason}")]
    InvalidSetting { setting: &'static str, reason: String },
    /// A launcher environment variable is missing or invalid.
    #[error("environment variable `{variable}` of {launcher}: {reason}")]
    Environment { variable: &'static str, launcher: &'static str, reason: String },
    /// A job with several ranks has no shared secret.
    #[error("no job token: set `DFLOP_JOB_TOKEN` to the same secret on all {size} ranks")]
    TokenMissing { size: usize },
    /// The peer has a different token.
    #[error(
        "the job tokens of rank {rank} and {address} differ; set `DFLOP_JOB_TOKEN` to the same secret on all ranks"
    )]
    TokenRefused { rank: usize, address: String },
    /// A host name has no address.
    #[error("could not resolve host `{host}` within {waited_seconds:.1} s")]
    Resolve { host: String, waited_seconds: f64, source: io::Error },
    /// The rendezvous, or this rank, cannot listen on the address.
    #[error("rank {rank} could not listen on {address}; choose another port with `DFLOP_PORT`")]
    Listen { rank: usize, address: String, source: io::Error },
    /// A connection was not established in time.
    #[error("rank {rank} could not reach {peer} at {address} within {waited_seconds:.1} s: {reason}")]
    Connect { rank: usize, peer: String, address: String, waited_seconds: f64, reason: String },
    /// Some ranks did not join in time; `refused` counts foreign connections, if any.
    #[error(
        "rank {rank} waited {waited_seconds:.1} s, but ranks {missing:?} of {size} did not join{refused}"
    )]
    Missing { rank: usize, size: usize, missing: Vec<usize>, waited_seconds: f64, refused: String },
    /// The rendezvous rejected this rank, for example because a second process has the same rank.
    #[error("the rendezvous refused rank {rank}: {reason}")]
    Refused { rank: usize, reason: String },
    /// A read or write failed outside a running job.
    #[error("could not {action}")]
    Io { action: String, source: io::Error },
}

impl Error {
    /// Returns the failure that ended the job, unless the error is a caller mistake.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Failed { failure, .. } => Some(failure),
            _ => None,
        }
    }

    /// Returns whether another rank caused the failure; a launcher looks for that rank.
    #[must_use]
    pub fn is_secondary(&self) -> bool {
        matches!(self, Self::Failed { failure, rank, .. } if failure.culprit.unwrap_or(failure.by) != *rank)
    }

    /// Returns the exit status for a rank that ends with this error: [`EXIT_SECONDARY`] or 1.
    #[must_use]
    pub fn exit_status(&self) -> u8 {
        if self.is_secondary() { EXIT_SECONDARY } else { 1 }
    }
}

/// Failure that ended a job. Every rank keeps the first failure that it learns about and passes it on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Failure kind.
    pub cause: Cause,
    /// Rank that caused the failure, if known.
    pub culprit: Option<usize>,
    /// Rank that noticed the failure.
    pub by: usize,
    /// Activity on that rank when it noticed.
    pub at: StepContext,
    /// Description for the user.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (rank {} noticed at {})", self.message, self.by, self.at)
    }
}

/// [`Failure`] kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// A rank connection ended without a farewell: the process died.
    Died,
    /// A rank finished while another rank waited for it.
    Left,
    /// A rank did not respond in time.
    TimedOut,
    /// A message differs from the message that the receiver's plan expects.
    Mismatch,
    /// Ranks computed different plans.
    Digest,
    /// Bytes that no rank with this version sends.
    Protocol,
    /// The caller ended the job.
    Caller,
    /// Communication outside this crate, such as NCCL, failed.
    Transport,
}

impl Cause {
    const ALL: [Self; 8] = [
        Self::Died,
        Self::Left,
        Self::TimedOut,
        Self::Mismatch,
        Self::Digest,
        Self::Protocol,
        Self::Caller,
        Self::Transport,
    ];

    /// Returns the number in a control message.
    pub(super) fn code(self) -> u8 {
        self as u8
    }

    /// Inverse of [`code`](Self::code).
    pub(super) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

/// Formats a duration in seconds with one decimal, for messages.
pub(super) fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

/// Action name, at most 24 bytes so that it fits into every header.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ActionName {
    bytes: [u8; Self::BYTES_MAX],
    length: u8,
}

impl ActionName {
    /// Maximum name length in bytes; longer names are cut at a character boundary.
    pub const BYTES_MAX: usize = 24;

    /// Returns the name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.length)]).unwrap_or("?")
    }

    /// Name padded with zeros.
    pub(crate) fn padded(&self) -> &[u8; Self::BYTES_MAX] {
        &self.bytes
    }

    /// Inverse of [`padded`](Self::padded).
    pub(crate) fn from_padded(bytes: [u8; Self::BYTES_MAX]) -> Self {
        let length = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        Self { bytes, length: length as u8 }
    }
}

impl From<&str> for ActionName {
    fn from(name: &str) -> Self {
        let mut length = name.len().min(Self::BYTES_MAX);
        // the name must stay valid UTF-8 when it is cut
        while !name.is_char_boundary(length) {
            length -= 1;
        }
        let mut bytes = [0; Self::BYTES_MAX];
        bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
        Self { bytes, length: length as u8 }
    }
}

impl fmt::Debug for ActionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

/// Current rank activity: a step, optionally a microbatch, and an action such as `recv`.
///
/// Sent with every message. Sender and receiver must have the same step and microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StepContext {
    /// Step in the run, from 0.
    pub step: u64,
    /// Microbatch in the step, if the action belongs to a microbatch.
    pub microbatch: Option<u32>,
    /// Action, as errors print it.
    pub action: ActionName,
}

impl StepContext {
    /// Returns the context for an action on a complete step.
    #[must_use]
    pub fn step(step: u64, action: &str) -> Self {
        Self { step, microbatch: None, action: action.into() }
    }

    /// Returns the context for an action on a microbatch, which must be below `u32::MAX`.
    #[must_use]
    pub fn microbatch(step: u64, microbatch: u32, action: &str) -> Self {
        Self { step, microbatch: Some(microbatch), action: action.into() }
    }

    /// Replaces the action.
    #[must_use]
    pub fn action(self, action: &str) -> Self {
        Self { action: action.into(), ..self }
    }

    /// Microbatch as sent; `u32::MAX` for none.
    pub(crate) fn wire_microbatch(self) -> u32 {
        self.microbatch.unwrap_or(u32::MAX)
    }

    /// Inverse of [`wire_microbatch`](Self::wire_microbatch).
    pub(crate) fn from_wire(step: u64, microbatch: u32, action: ActionName) -> Self {
        Self { step, microbatch: (microbatch != u32::MAX).then_some(microbatch), action }
    }
}

impl fmt::Display for StepContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}, ", self.step)?;
        if let Some(microbatch) = self.microbatch {
            write!(f, "microbatch {microbatch}, ")?;
        }
        write!(f, "`{}`", self.action.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_cut_at_a_character() {
        let name = ActionName::from("twenty-three bytes long\u{e9}t\u{e9}");
        assert_eq!(name.as_str(), "twenty-three bytes long");
        assert_eq!(ActionName::from_padded(*name.padded()), name);
        assert_eq!(StepContext::microbatch(3, 2, "recv").to_string(), "step 3, microbatch 2, `recv`");
    }
}
