//! Trait that every model family implements, and the models that it names.

use std::fmt::Debug;

use crate::error::Result;
use crate::model::config::{CheckpointFields, PartialModelSpec};
use crate::model::{AudioSpec, FamilyId, LlmSpec, VisionSpec};

/// Model family: reads the sizes and the token rules of its checkpoints.
///
/// A family outside this crate implements this trait and goes into
/// [`ModelFamilies::with`](crate::ModelFamilies::with). Its token rule is one of
/// [`VisionRule`](crate::tokens::VisionRule) and [`AudioRule`](crate::tokens::audio::AudioRule), with sizes
/// of its own.
pub trait ModelFamily: Debug + Send + Sync {
    /// Returns the id that its models carry.
    fn id(&self) -> FamilyId;

    /// Returns the values of `model_type` of its checkpoints.
    fn model_types(&self) -> &[&str];

    /// Reads the modules of a checkpoint, with the family in each of them.
    ///
    /// # Errors
    /// [`Error::Configuration`](crate::Error::Configuration) if a field is invalid or not supported.
    fn read(&self, files: &CheckpointFields<'_>) -> Result<PartialModelSpec>;

    /// Returns the published models that can be had by name. Default: none.
    fn presets(&self) -> &[Preset] {
        &[]
    }
}

/// Model that can be had by name.
#[derive(Debug, Clone, Copy)]
pub struct Preset {
    /// Name for [`ModelSpec::preset`](crate::ModelSpec::preset).
    pub name: &'static str,
    /// Encoder of images and videos.
    pub vision: Option<VisionSpec>,
    /// Encoder of audio.
    pub audio: Option<AudioSpec>,
    /// Language model.
    pub llm: LlmSpec,
}
