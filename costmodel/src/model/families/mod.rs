//! Model families: each file reads one family's checkpoints and has the family's token rule, sizes and
//! presets.
//!
//! [`ModelFamilies`] finds a family by a checkpoint's `model_type` or by a preset name, among the built-in
//! families and your own.
//!
//! Every family implements [`ModelFamily`], and names its published models as [`Preset`]s.

pub(crate) mod clip_siglip;
mod composed;
pub(crate) mod described;
pub(crate) mod fixed_resolution;
mod gemma3;
mod glm4v;
mod idefics3;
pub(crate) mod intern_vit;
mod intern_vl;
mod intern_vl_chat;
mod language_models;
mod llava;
mod llava_next;
pub(crate) mod llava_onevision;
mod llava_onevision_1_5;
mod pixtral;
mod qwen2_5_omni;
pub(crate) mod qwen2_audio;
mod qwen3_omni;
mod qwen3_vl;
mod qwen_vl;
mod registry;

use std::fmt::Debug;

use super::config::{CheckpointFields, PartialModelSpec};
use super::{AudioSpec, FamilyId, LlmSpec, VisionSpec};
use crate::error::Result;

pub use qwen3_vl::deepstack_layers;
pub use registry::ModelFamilies;

/// What helps with a type that no family reads, for messages.
const DESCRIBE: &str = "`dflop describe DIRECTORY -o model.json` describes the checkpoint with transformers";

/// Built-in families by file, in preset order; language models without encoders are in [`language_models`].
static BUILT_IN: &[&[&dyn ModelFamily]] = &[
    llava_onevision::FAMILIES,
    intern_vl::FAMILIES,
    qwen_vl::FAMILIES,
    qwen3_vl::FAMILIES,
    qwen2_audio::FAMILIES,
    llava::FAMILIES,
    llava_next::FAMILIES,
    pixtral::FAMILIES,
    idefics3::FAMILIES,
    glm4v::FAMILIES,
    llava_onevision_1_5::FAMILIES,
    qwen2_5_omni::FAMILIES,
    qwen3_omni::FAMILIES,
    gemma3::FAMILIES,
    composed::FAMILIES,
    clip_siglip::FAMILIES,
    described::FAMILIES,
];

/// Model family: reads the sizes and the token rules of its checkpoints.
///
/// A family outside this crate implements this trait and goes into
/// [`ModelFamilies::with`]. Its token rule is one of
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
