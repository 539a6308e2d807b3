//! Errors from models, weights and stages.

use std::path::PathBuf;

/// Result with an [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Failure to build or run a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message names its fields")]
pub enum Error {
    /// A model configuration is invalid or not supported.
    #[error("`config.json`: `{field}` {problem}")]
    ModelConfig { field: String, problem: String },
    /// The cost model could not read the model dimensions.
    #[error(transparent)]
    CostModel(#[from] dflop_costmodel::Error),
    /// A weights file could not be read or written.
    #[error("could not {action} `{}`", path.display())]
    File { action: &'static str, path: PathBuf, source: std::io::Error },
    /// A weights file is invalid.
    #[error("`{}` is not a valid weights file: {problem}", path.display())]
    Format { path: PathBuf, problem: String },
    /// The model has a tensor that the checkpoint lacks.
    #[error("tensor `{tensor}` is missing in the checkpoint")]
    MissingTensor { tensor: String },
    /// The checkpoint has a tensor that the model lacks.
    #[error("checkpoint has unexpected tensor `{tensor}`")]
    SurplusTensor { tensor: String },
    /// A checkpoint tensor and the model tensor have different shapes.
    #[error("expected tensor `{tensor}` to have shape {expected:?}, found {found:?}")]
    TensorShape { tensor: String, expected: Vec<usize>, found: Vec<usize> },
    /// A tensor type cannot be read as weights.
    #[error("expected tensor `{tensor}` to be f32, f16 or bf16, found {found}")]
    TensorType { tensor: String, found: String },
    /// A microbatch input does not match the model or the remaining inputs.
    #[error("input `{input}`: {problem}")]
    Input { input: &'static str, problem: String },
    /// A stage was called out of order.
    #[error("stage {stage}, microbatch {microbatch}: {problem}")]
    Order { stage: String, microbatch: usize, problem: &'static str },
    /// A stage returned something other than the next stage requires.
    #[error("stage {stage}, microbatch {microbatch}: {problem}")]
    Output { stage: String, microbatch: usize, problem: String },
    /// The loss is NaN or infinite.
    #[error("stage {stage}, microbatch {microbatch}: the loss is {loss}")]
    Loss { stage: String, microbatch: usize, loss: f64 },
    /// Two ranks hold different values for the same tensor.
    #[error("tensor `{tensor}` differs between rank {} and rank {}", ranks[0], ranks[1])]
    Replicas { tensor: String, ranks: [usize; 2] },
    /// A message or another rank failed.
    #[error(transparent)]
    Comm(#[from] dflop_comm::Error),
    /// Memory ran out, or the device cannot be used.
    #[error(transparent)]
    Device(dflop_device::Error),
}

impl From<dflop_device::Error> for Error {
    fn from(error: dflop_device::Error) -> Self {
        match error {
            dflop_device::Error::Comm(error) => Self::Comm(error),
            error => Self::Device(error),
        }
    }
}

impl Error {
    /// Adds the purpose of the memory to an allocation failure that does not have a purpose yet.
    pub(crate) fn while_allocating(self, what: impl FnOnce() -> String) -> Self {
        match self {
            Self::Device(error) => Self::Device(error.while_allocating(what)),
            error => error,
        }
    }
}
