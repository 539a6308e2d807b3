//! Errors of the executor.

use std::path::PathBuf;

/// Result with an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a stage could not be built or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// A configuration that makes no sense, or that no model here answers to.
    #[error("`config.json`: `{field}` {problem}")]
    ModelConfig { field: String, problem: String },
    /// The dimensions of a model, as the cost model reads them.
    #[error(transparent)]
    Model(#[from] dflop_costmodel::Error),
    /// A file of weights could not be read or written.
    #[error("could not {action} `{}`", path.display())]
    File { action: &'static str, path: PathBuf, source: std::io::Error },
    /// A file of weights is not what it says.
    #[error("`{}` is no file of weights: {problem}", path.display())]
    Format { path: PathBuf, problem: String },
    /// The model has a tensor that the checkpoint lacks.
    #[error("tensor `{tensor}` is missing in the checkpoint")]
    MissingTensor { tensor: String },
    /// The checkpoint has a tensor that the model lacks.
    #[error("tensor `{tensor}` of the checkpoint is none of the model's")]
    SurplusTensor { tensor: String },
    /// A tensor has another shape than the model's.
    #[error("tensor `{tensor}` has shape {found:?}, the model's has {expected:?}")]
    TensorShape { tensor: String, expected: Vec<usize>, found: Vec<usize> },
    /// A tensor holds numbers of a type that weights are not read from.
    #[error("tensor `{tensor}` holds {found}, weights are f32, f16 or bf16")]
    TensorType { tensor: String, found: String },
    /// An input of a microbatch does not fit the model or its other inputs.
    #[error("input `{input}`: {problem}")]
    Input { input: &'static str, problem: String },
    /// A stage was asked for something out of turn.
    #[error("stage {stage}, microbatch {microbatch}: {problem}")]
    Order { stage: String, microbatch: usize, problem: &'static str },
    /// The loss is NaN or infinite.
    #[error("stage {stage}, microbatch {microbatch}: the loss is {loss}")]
    Loss { stage: String, microbatch: usize, loss: f64 },
    /// The plan of a step does not fit the job, or what a rank was given does not fit the plan.
    #[error("plan of step {step}, microbatch {microbatch} of {module}: {problem}")]
    Plan { step: u64, module: &'static str, microbatch: usize, problem: String },
    /// Messages between ranks, or the failure of another rank.
    #[error(transparent)]
    Comm(#[from] crate::comm::Error),
    /// A schedule or a partition that cannot be made.
    #[error(transparent)]
    Balancer(#[from] dflop_balancer::Error),
    /// Samples could not be read or prepared.
    #[error(transparent)]
    Loader(#[from] dflop_loader::Error),
    /// The runtime that reads samples could not be started.
    #[error("the runtime that reads samples could not be started")]
    Runtime(#[source] std::io::Error),
    /// The gradient of a parameter is NaN or infinite.
    #[error("stage {stage}: the norm of the gradient of `{tensor}` is {norm}")]
    Gradient { stage: String, tensor: String, norm: f64 },
    /// The loss of a step is NaN or infinite on one rank.
    #[error("step {step}: the loss of {target_tokens} target tokens is {sum} in sum")]
    StepLoss { step: u64, target_tokens: u64, sum: f64 },
    /// A setting makes no sense.
    #[error("invalid `{setting}`: {reason}")]
    InvalidSetting { setting: &'static str, reason: String },
    /// A saved state cannot be used.
    #[error("checkpoint `{}` cannot be used: {problem}", path.display())]
    Saved { path: PathBuf, problem: String },
    /// A rank could not write its part of a saved state.
    #[error("checkpoint of step {step}: rank {rank} could not write its part")]
    NotSaved { step: u64, rank: usize },
    /// A trace could not be written.
    #[error("could not write the trace")]
    Trace(#[source] std::io::Error),
    /// Memory could not be allocated, or not within the limit that was set.
    #[error("out of memory: could not allocate {bytes} bytes for {what} ({used} bytes in use)")]
    OutOfMemory { what: String, bytes: usize, used: u64 },
    /// Two ranks should hold the same values, and do not.
    #[error("tensor `{tensor}` has other bits on rank {} than on rank {}", ranks[1], ranks[0])]
    Replicas { tensor: String, ranks: [usize; 2] },
    /// A model, or the microbatches asked for, would not fit into memory.
    #[error(
        "measuring {layers} layers of {module} takes about {needed_bytes} bytes of memory, {free_bytes} are free; measure \
         fewer layers or shorter sequences"
    )]
    InsufficientMemory { module: dflop_costmodel::Module, layers: usize, needed_bytes: u64, free_bytes: u64 },
    /// Threads could not be started.
    #[error("threads could not be started")]
    Threads(#[from] rayon::ThreadPoolBuildError),
}

impl Error {
    /// Name of an allocation whose purpose the device does not know.
    const UNNAMED: &str = "a buffer";

    /// Allocation failure of a device, which does not know what the memory is for.
    pub(crate) fn out_of_memory(bytes: usize, used: u64) -> Self {
        Self::OutOfMemory { what: Self::UNNAMED.to_owned(), bytes, used }
    }

    /// Names what memory was for, if the error is an allocation failure that nobody has named yet.
    pub(crate) fn while_allocating(self, what: impl FnOnce() -> String) -> Self {
        match self {
            Self::OutOfMemory { what: unnamed, bytes, used } if unnamed == Self::UNNAMED => {
                Self::OutOfMemory { what: what(), bytes, used }
            }
            error => error,
        }
    }
}
