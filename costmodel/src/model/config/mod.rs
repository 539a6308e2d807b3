//! Reads a [`ModelSpec`] from a checkpoint's `config.json` and processor files.
//!
//! [`Documents`] are the parsed files in a directory as downloaded from Hugging Face; the caller reads them
//! from disk. A [`ModelFamily`](crate::model::ModelFamily) reads them, in both old forms, with the LLM fields
//! at the top, and new forms, with `text_config` and `vision_config`, as well as in the original
//! repositories' `internvl_chat` form. A missing field has the default in transformers 4.57.1; if the
//! processor files are missing altogether, token rules are the family's published rules. Nothing is guessed:
//! an invalid or unsupported field is an [`Error::Configuration`](crate::Error::Configuration) that names
//! file, field and value.
//!
//! CLIP, SigLIP and Whisper checkpoints are encoders only. [`ModelSpec::compose`] joins them with a language
//! model.
//!
//! # Examples
//! ```
//! use dflop_costmodel::ModelSpec;
//! use dflop_costmodel::config::Documents;
//!
//! # fn main() -> dflop_costmodel::Result<()> {
//! let config = serde_json::json!({
//!     "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
//!     "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": true,
//! });
//! let model = ModelSpec::from_hugging_face("my-qwen3", &Documents { config, ..Documents::default() })?;
//! assert_eq!(model.parameters(), 596_049_920);
//! # Ok(())
//! # }
//! ```

mod checkpoint_fields;
mod compose;
mod config_fields;
mod crops;
mod json_text;

use serde_json::Value;

pub use self::checkpoint_fields::CheckpointFields;
pub use self::config_fields::ConfigFields;
pub(crate) use self::config_fields::excerpt;
pub use self::crops::pan_and_scan;
pub use self::json_text::parse_json;
use crate::model::{AudioSpec, FamilyId, LlmSpec, ModelSpec, VisionSpec};

/// `model_type` of a description, and the family of its model.
pub const DESCRIBED: &str = "described";
/// Name of the file that describes a model.
pub const CONFIG_FILE: &str = "config.json";
/// File name of the image processor or feature extractor.
pub const PREPROCESSOR_FILE: &str = "preprocessor_config.json";
/// File name of the video processor.
pub const VIDEO_PREPROCESSOR_FILE: &str = "video_preprocessor_config.json";
/// File name of the processor that joins them.
pub const PROCESSOR_FILE: &str = "processor_config.json";

/// Parsed files in a checkpoint directory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Documents {
    /// `config.json`.
    pub config: Value,
    /// `preprocessor_config.json`.
    pub preprocessor: Option<Value>,
    /// `video_preprocessor_config.json`.
    pub video_preprocessor: Option<Value>,
    /// `processor_config.json`; its `image_processor` and `video_processor` replace missing files.
    pub processor: Option<Value>,
}

/// Modules in a checkpoint: a whole model, a language model, or an encoder.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PartialModelSpec {
    /// Checkpoint family.
    pub family: FamilyId,
    /// Image and video encoder.
    pub vision: Option<VisionSpec>,
    /// Audio encoder.
    pub audio: Option<AudioSpec>,
    /// Language model. Without it, projectors are added by [`ModelSpec::compose`].
    pub llm: Option<LlmSpec>,
}

impl From<ModelSpec> for PartialModelSpec {
    fn from(spec: ModelSpec) -> Self {
        Self { family: spec.family, vision: spec.vision, audio: spec.audio, llm: Some(spec.llm) }
    }
}

#[cfg(test)]
mod tests;
