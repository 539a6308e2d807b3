//! Where parameters get their values: checkpoints of Hugging Face, or a seed; and how they are written.
//!
//! Names and shapes are those of the files. Some families have been saved under several names in the course of time;
//! `ALIASES` says which prefixes mean the same, and files are written under the first.

mod checkpoint;
mod parameter_spec;
mod seed;
mod tensor_shard;
mod write;

pub use checkpoint::Checkpoint;
pub use parameter_spec::{Init, ParameterId, ParameterSpec};
pub use seed::Seed;
pub use tensor_shard::{AxisPartition, TensorShard, TpRank};
pub use write::{Tensor, write};

use crate::error::Result;

/// The file of a checkpoint in one piece.
pub const WEIGHTS_FILE: &str = "model.safetensors";
/// The file that says which tensor is in which piece.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Prefixes that mean the same: the one used here, and another that files have.
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

/// Gives parameters their first values.
pub trait WeightSource {
    /// Returns the values of what this rank holds of a parameter, row-major.
    ///
    /// # Errors
    /// [`crate::Error::MissingTensor`], [`crate::Error::TensorShape`], [`crate::Error::TensorType`] or
    /// [`crate::Error::File`].
    fn values(&self, spec: &ParameterSpec) -> Result<Vec<f32>>;
}
