//! Model families: one file reads the checkpoints of one family and has its token rule, sizes and presets.
//!
//! [`ModelFamilies`] finds a family by the `model_type` of a checkpoint or by the name of a preset, among the
//! built-in ones and your own.

mod clip;
mod composed;
mod gemma3;
pub(crate) mod intern_vl;
mod intern_vl_chat;
mod language_models;
pub(crate) mod llava_onevision;
pub(crate) mod qwen2_audio;
mod qwen_vl;
mod registry;
pub(crate) mod siglip;
mod squares;
pub(crate) mod tower;

pub use self::registry::{ModelFamilies, ModelFamily, Preset};

/// Built-in families but language models without encoders, in the order of their presets.
static BUILT_IN: [&dyn ModelFamily; 9] = [
    &llava_onevision::LlavaOneVision,
    &intern_vl::InternVl,
    &qwen_vl::Qwen2Vl,
    &qwen_vl::Qwen25Vl,
    &qwen2_audio::Qwen2Audio,
    &gemma3::Gemma3,
    &composed::Composed,
    &clip::Clip,
    &siglip::Siglip,
];
