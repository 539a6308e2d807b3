//! Message and launch errors, the failure that ends a job, and the rank activity that both name.

mod step_context;

pub use step_context::{ActionName, StepContext};

use crate::dtype::Dtype;
use std::fmt;
use std::io;
use std::time::Duration;

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
