//! Executor errors.

use std::error::Error as _;
use std::fmt;
use std::path::{Path, PathBuf};

use dflop_loader::store::redact;

/// Result with an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Failure to build or train a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// A model could not be built or run.
    #[error(transparent)]
    Model(dflop_models::Error),
    /// The cost model could not read the model dimensions.
    #[error(transparent)]
    CostModel(#[from] dflop_costmodel::Error),
    /// A weights file could not be read or written.
    #[error("could not {action} `{}`", path.display())]
    File { action: &'static str, path: PathBuf, source: std::io::Error },
    /// A step plan does not match the job, or rank inputs do not match the plan.
    #[error("plan of step {step}, microbatch {microbatch} of {module}: {problem}")]
    Plan { step: u64, module: &'static str, microbatch: usize, problem: String },
    /// A message or a remote rank failed.
    #[error(transparent)]
    Comm(#[from] dflop_comm::Error),
    /// Memory ran out, or the device cannot be used.
    #[error(transparent)]
    Device(dflop_device::Error),
    /// A schedule or a partition could not be computed.
    #[error(transparent)]
    Balancer(#[from] dflop_balancer::Error),
    /// Samples could not be read or prepared.
    #[error(transparent)]
    Loader(#[from] dflop_loader::Error),
    /// The runtime that reads samples could not be started.
    #[error("could not start the runtime that reads samples")]
    Runtime(#[source] std::io::Error),
    /// A parameter gradient is NaN or infinite.
    #[error("stage {stage}: the norm of the gradient of `{tensor}` is {norm}")]
    Gradient { stage: String, tensor: String, norm: f64 },
    /// Ranks were started with different settings.
    #[error("ranks disagree on `{setting}`: {reason}")]
    Disagreement { setting: String, reason: String },
    /// A setting is invalid.
    #[error("invalid `{setting}`: {reason}")]
    InvalidSetting { setting: &'static str, reason: String },
    /// The run configuration is invalid.
    #[error("{0}")]
    Config(String),
    /// A run could not start.
    #[error("{0}")]
    Start(String),
    /// A file could not be read or written.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// An error in a file or a step, which it names.
    #[error(transparent)]
    Named(Named),
    /// The system has too few threads.
    #[error("the system has no thread for each of the ranks: {0}")]
    Threads(std::io::Error),
    /// A rank thread panicked.
    #[error("a rank panicked")]
    RankPanicked,
    /// A rank process failed.
    ///
    /// - `code`: exit status; `None` if a signal ended the process
    #[error("rank {rank} ended the run: {status}")]
    RankEnded { rank: usize, status: String, code: Option<i32> },
    /// A signal ended rank processes before an orderly stop.
    #[error("interrupted by signal {signal}, before the ranks had stopped")]
    Interrupted { signal: i32 },
    /// A saved state cannot be used.
    #[error("checkpoint `{}` cannot be used: {problem}", path.display())]
    Saved { path: PathBuf, problem: String },
    /// A correction table record is malformed, or does not belong to this run.
    #[error("record of corrections `{}`: {problem}", path.display())]
    CorrectionRecord { path: PathBuf, problem: String },
    /// A running job has claimed the checkpoint directory.
    #[error(
        "checkpoint directory `{}` is in use by {owner}; choose another directory, or end that job", path.display()
    )]
    Occupied { path: PathBuf, owner: String },
    /// A rank could not write part of the saved state.
    #[error("checkpoint of step {step}: rank {rank} could not write its part")]
    NotSaved { step: u64, rank: usize },
    /// A trace could not be written.
    #[error("could not write the trace")]
    Trace(#[source] std::io::Error),
    /// A model, or the requested microbatches, would not fit into memory.
    #[error(
        "measuring {layers} layers of {module} takes about {needed_bytes} bytes of memory, {free_bytes} are free; measure \
         fewer layers or shorter sequences"
    )]
    InsufficientMemory { module: dflop_costmodel::Module, layers: usize, needed_bytes: u64, free_bytes: u64 },
}

/// Error with the name of the file or the step in which it occurred.
#[derive(Debug)]
pub struct Named {
    /// File in backquotes, or step.
    pub place: String,
    /// Error.
    pub error: Box<Error>,
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.error)
    }
}

impl std::error::Error for Named {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl Error {
    /// Returns whether this rank ended only because a remote rank failed, which reports the cause itself.
    #[must_use]
    pub fn is_secondary(&self) -> bool {
        match self {
            Self::Comm(error) => error.exit_status() != 1,
            Self::NotSaved { .. } => true,
            Self::Named(named) => named.error.is_secondary(),
            _ => false,
        }
    }

    /// Returns the message and all causes, each on a separate line, without credentials.
    #[must_use]
    pub fn message(&self) -> String {
        let (mut text, mut cause) = (self.to_string(), self.source());
        while let Some(error) = cause {
            text = format!("{text}\n  because: {error}");
            cause = error.source();
        }
        redact(&text).into_owned()
    }

    /// Returns the message and all causes in a single line.
    pub(crate) fn in_one_line(&self) -> String {
        self.message().replace("\n  because: ", ": ")
    }

    /// Names the file that the error is about.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        self.named(format!("`{}`", path.display()))
    }

    /// Names the training step that failed.
    pub(crate) fn in_step(self, step: u64) -> Self {
        self.named(format!("step {step}"))
    }

    fn named(self, place: String) -> Self {
        Self::Named(Named { place, error: Box::new(self) })
    }
}

impl From<dflop_loader::error::ProcessorError> for Error {
    fn from(error: dflop_loader::error::ProcessorError) -> Self {
        Self::Loader(error.into())
    }
}

impl From<dflop_device::Error> for Error {
    fn from(error: dflop_device::Error) -> Self {
        match error {
            dflop_device::Error::Comm(error) => Self::Comm(error),
            error => Self::Device(error),
        }
    }
}

impl From<dflop_models::Error> for Error {
    /// Keeps job and device failures as such, wherever they occurred.
    fn from(error: dflop_models::Error) -> Self {
        match error {
            dflop_models::Error::Comm(error) => Self::Comm(error),
            dflop_models::Error::Device(error) => Self::Device(error),
            dflop_models::Error::CostModel(error) => Self::CostModel(error),
            error => Self::Model(error),
        }
    }
}
