//! Errors of the executor.

use std::path::PathBuf;

/// Result with an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model could not be built or trained.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// A model configuration is invalid or not supported.
    #[error("`config.json`: `{field}` {problem}")]
    ModelConfig { field: String, problem: String },
    /// The cost model could not read the dimensions of a model.
    #[error(transparent)]
    Model(#[from] dflop_costmodel::Error),
    /// A file of weights could not be read or written.
    #[error("could not {action} `{}`", path.display())]
    File { action: &'static str, path: PathBuf, source: std::io::Error },
    /// A file is not a valid weights file.
    #[error("`{}` is not a valid weights file: {problem}", path.display())]
    Format { path: PathBuf, problem: String },
    /// The model has a tensor that the checkpoint lacks.
    #[error("tensor `{tensor}` is missing in the checkpoint")]
    MissingTensor { tensor: String },
    /// The checkpoint has a tensor that the model lacks.
    #[error("checkpoint has unexpected tensor `{tensor}`")]
    SurplusTensor { tensor: String },
    /// A tensor has another shape than the model's.
    #[error("expected tensor `{tensor}` to have shape {expected:?}, found {found:?}")]
    TensorShape { tensor: String, expected: Vec<usize>, found: Vec<usize> },
    /// The type of a tensor cannot be read as weights.
    #[error("expected tensor `{tensor}` to be f32, f16 or bf16, found {found}")]
    TensorType { tensor: String, found: String },
    /// An input of a microbatch does not fit the model or its other inputs.
    #[error("input `{input}`: {problem}")]
    Input { input: &'static str, problem: String },
    /// A stage was called out of order.
    #[error("stage {stage}, microbatch {microbatch}: {problem}")]
    Order { stage: String, microbatch: usize, problem: &'static str },
    /// The loss is NaN or infinite.
    #[error("stage {stage}, microbatch {microbatch}: the loss is {loss}")]
    Loss { stage: String, microbatch: usize, loss: f64 },
    /// The plan of a step does not fit the job, or the inputs of a rank do not fit the plan.
    #[error("plan of step {step}, microbatch {microbatch} of {module}: {problem}")]
    Plan { step: u64, module: &'static str, microbatch: usize, problem: String },
    /// A message failed, or another rank did.
    #[error(transparent)]
    Comm(#[from] crate::comm::Error),
    /// A schedule or a partition could not be made.
    #[error(transparent)]
    Balancer(#[from] dflop_balancer::Error),
    /// Samples could not be read or prepared.
    #[error(transparent)]
    Loader(#[from] dflop_loader::Error),
    /// The runtime that reads samples could not be started.
    #[error("could not start the runtime that reads samples")]
    Runtime(#[source] std::io::Error),
    /// The gradient of a parameter is NaN or infinite.
    #[error("stage {stage}: the norm of the gradient of `{tensor}` is {norm}")]
    Gradient { stage: String, tensor: String, norm: f64 },
    /// A setting is invalid.
    #[error("invalid `{setting}`: {reason}")]
    InvalidSetting { setting: &'static str, reason: String },
    /// A saved state cannot be used.
    #[error("checkpoint `{}` cannot be used: {problem}", path.display())]
    Saved { path: PathBuf, problem: String },
    /// A running job has claimed the directory of checkpoints.
    #[error(
        "checkpoint directory `{}` is in use by {owner}; choose another directory, or end that job", path.display()
    )]
    Occupied { path: PathBuf, owner: String },
    /// A rank could not write its part of a saved state.
    #[error("checkpoint of step {step}: rank {rank} could not write its part")]
    NotSaved { step: u64, rank: usize },
    /// A trace could not be written.
    #[error("could not write the trace")]
    Trace(#[source] std::io::Error),
    /// Memory could not be allocated, or not within the limit that was set.
    #[error("out of memory: could not allocate {bytes} bytes for {what} ({used} bytes in use)")]
    OutOfMemory { what: String, bytes: usize, used: u64 },
    /// Two ranks hold different values of the same tensor.
    #[error("tensor `{tensor}` differs between rank {} and rank {}", ranks[0], ranks[1])]
    Replicas { tensor: String, ranks: [usize; 2] },
    /// A model, or the requested microbatches, would not fit into memory.
    #[error(
        "measuring {layers} layers of {module} takes about {needed_bytes} bytes of memory, {free_bytes} are free; measure \
         fewer layers or shorter sequences"
    )]
    InsufficientMemory { module: dflop_costmodel::Module, layers: usize, needed_bytes: u64, free_bytes: u64 },
    /// Threads could not be started.
    #[error("could not start threads")]
    Threads(#[from] rayon::ThreadPoolBuildError),
}

impl Error {
    /// Placeholder for an allocation whose purpose the device does not know.
    const UNNAMED: &str = "a buffer";

    /// Makes the error of a failed allocation, whose purpose is added by
    /// [`while_allocating`](Self::while_allocating).
    pub(crate) fn out_of_memory(bytes: usize, used: u64) -> Self {
        Self::OutOfMemory { what: Self::UNNAMED.to_owned(), bytes, used }
    }

    /// Adds the purpose of the memory to an allocation failure that does not have one yet.
    pub(crate) fn while_allocating(self, what: impl FnOnce() -> String) -> Self {
        match self {
            Self::OutOfMemory { what: unnamed, bytes, used } if unnamed == Self::UNNAMED => {
                Self::OutOfMemory { what: what(), bytes, used }
            }
            error => error,
        }
    }
}
