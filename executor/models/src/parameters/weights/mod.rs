//! Loads initial parameter values from a Hugging Face checkpoint or a seed, and writes checkpoints.
//!
//! Names and shapes are the same as in the files. Some families have been saved under several names over
//! time; `ALIASES` lists equivalent prefixes, and files are written with the first prefix.

mod checkpoint;
mod parameter_spec;
mod seed;
mod tensor_shard;
mod write;

pub use checkpoint::Checkpoint;
pub use parameter_spec::{Init, ParameterId, ParameterSpec};
pub use seed::Seed;
pub(crate) use seed::sinusoids;
pub use tensor_shard::{AxisPartition, TensorShard, TpRank};
pub use write::{Tensor, write};

use crate::error::Result;

/// File name for an unsharded checkpoint.
pub const WEIGHTS_FILE: &str = "model.safetensors";
/// File name for the index that assigns tensors to files.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Equivalent prefixes: the prefix used here, and a second prefix found in files.
pub(crate) const ALIASES: [(&str, &str); 12] = [
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "vision_tower.vision_model."),
    ("vision_tower.", "model.vision_tower."),
    ("audio_tower.", "model.audio_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("image_newline", "model.image_newline"),
    ("visual.", "model.visual."),
    ("model.", "model.language_model."),
    ("embeddings.", "vision_model.embeddings."),
    ("encoder.", "vision_model.encoder."),
    ("pre_layrnorm.", "vision_model.pre_layrnorm."),
];

/// Source of initial parameter values.
pub trait WeightSource {
    /// Returns the values in the part of a parameter on this rank, row-major.
    ///
    /// # Errors
    /// [`crate::Error::MissingTensor`], [`crate::Error::TensorShape`], [`crate::Error::TensorType`] or
    /// [`crate::Error::File`].
    fn values(&self, spec: &ParameterSpec) -> Result<Vec<f32>>;
}
