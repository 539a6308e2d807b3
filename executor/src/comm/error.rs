//! The one error type of messages and launching, and what a job failed of.

use super::dtype::Dtype;
use super::step_context::StepContext;
use std::fmt;
use std::io;
use std::time::Duration;

/// Exit status of a rank that ended because another one failed: the launcher looks for the other one.
pub const EXIT_SECONDARY: u8 = 75;

/// Result of this module's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a message could not be sent or received, or ranks could not find one another.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// The job is over, on every rank, for a reason that the failure names.
    #[error("{failure} (rank {rank} was at {at})")]
    Failed { failure: Box<Failure>, rank: usize, at: Box<StepContext> },
    /// There is no such rank.
    #[error("there is no rank {rank} in a communicator of {size}")]
    Rank { rank: usize, size: usize },
    /// Rows and columns do not fit the elements.
    #[error("{found} elements do not make {expected}")]
    Length { found: usize, expected: String },
    /// The parts of a collective do not fit the ranks or the elements.
    #[error("{parts} parts of {sum} elements in sum, for {size} ranks and {elements} elements")]
    Parts { parts: usize, sum: usize, size: usize, elements: usize },
    /// Elements of this type cannot be added up.
    #[error("a collective cannot add up elements of {dtype:?}")]
    NotSummable { dtype: Dtype },
    /// A setting makes no sense.
    #[error("invalid `{setting}`: {reason}")]
    InvalidSetting { setting: &'static str, reason: String },
    /// An environment variable of the launcher is missing or makes no sense.
    #[error("environment variable `{variable}` of {launcher}: {reason}")]
    Environment { variable: &'static str, launcher: &'static str, reason: String },
    /// More than one rank, and no shared secret.
    #[error("no job token: set `DFLOP_JOB_TOKEN` to the same secret on all {size} ranks")]
    TokenMissing { size: usize },
    /// The other side has another token.
    #[error("the job token of rank {rank} is not that of {address}: `DFLOP_JOB_TOKEN` differs")]
    TokenRefused { rank: usize, address: String },
    /// The name of a host has no address.
    #[error("could not resolve host `{host}` within {waited_seconds:.1} s")]
    Resolve { host: String, waited_seconds: f64, source: io::Error },
    /// The address of the rendezvous, or of this rank, cannot be listened on.
    #[error("rank {rank} could not listen on {address}; choose another port with `DFLOP_PORT`")]
    Listen { rank: usize, address: String, source: io::Error },
    /// No connection in time.
    #[error("rank {rank} could not reach {peer} at {address} within {waited_seconds:.1} s: {reason}")]
    Connect { rank: usize, peer: String, address: String, waited_seconds: f64, reason: String },
    /// Some ranks never came.
    #[error("rank {rank} waited {waited_seconds:.1} s, but ranks {missing:?} of {size} did not come")]
    Missing { rank: usize, size: usize, missing: Vec<usize>, waited_seconds: f64 },
    /// The rendezvous refused this rank, as where two processes have the same rank.
    #[error("the rendezvous refused rank {rank}: {reason}")]
    Refused { rank: usize, reason: String },
    /// Reading or writing failed outside a running job.
    #[error("could not {action}")]
    Io { action: String, source: io::Error },
}

impl Error {
    /// What the whole job failed of, if this is more than a mistake of the caller.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Failed { failure, .. } => Some(failure),
            _ => None,
        }
    }

    /// Whether this rank only learned that another one failed; a launcher looks for those that did.
    #[must_use]
    pub fn is_secondary(&self) -> bool {
        matches!(self, Self::Failed { failure, rank, .. } if failure.culprit.unwrap_or(failure.by) != *rank)
    }

    /// Exit status that a rank with this error should have: [`EXIT_SECONDARY`] or 1.
    #[must_use]
    pub fn exit_status(&self) -> u8 {
        if self.is_secondary() { EXIT_SECONDARY } else { 1 }
    }
}

/// What ended a job. Every rank keeps the first that it learns of, and passes it on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Kind of failure.
    pub cause: Cause,
    /// Rank that is to blame, as far as can be told.
    pub culprit: Option<usize>,
    /// Rank that noticed.
    pub by: usize,
    /// Where the rank was that noticed.
    pub at: StepContext,
    /// What happened, in words.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (rank {} noticed at {})", self.message, self.by, self.at)
    }
}

/// Kind of a [`Failure`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// A rank's connection ended without a farewell: the process died.
    Died,
    /// A rank finished while another one waited for it.
    Left,
    /// A rank did not do its part in time.
    TimedOut,
    /// A message is not the one that the receiver's plan says.
    Mismatch,
    /// Ranks made different plans.
    Digest,
    /// Bytes that no rank of this version sends.
    Protocol,
    /// The caller of a rank ended the job, for a reason of its own.
    Caller,
}

impl Cause {
    const ALL: [Self; 7] =
        [Self::Died, Self::Left, Self::TimedOut, Self::Mismatch, Self::Digest, Self::Protocol, Self::Caller];

    /// Number in a control message.
    pub(super) fn code(self) -> u8 {
        self as u8
    }

    /// Inverse of [`code`](Self::code).
    pub(super) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

/// Whole and tenths of seconds, for messages.
pub(super) fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}
