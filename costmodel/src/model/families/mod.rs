//! Model families: each file reads one family's checkpoints and has the family's token rule, sizes and
//! presets.
//!
//! [`ModelFamilies`] finds a family by a checkpoint's `model_type` or by a preset name, among the built-in
//! families and your own.

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
mod llama4;
mod llava;
mod llava_next;
pub(crate) mod llava_onevision;
mod llava_onevision_1_5;
mod model_family;
mod pixtral;
mod qwen2_5_omni;
pub(crate) mod qwen2_audio;
mod qwen3_omni;
mod qwen3_vl;
mod qwen_vl;
mod registry;

pub use self::model_family::{ModelFamily, Preset};
pub use self::qwen3_vl::deepstack_layers;
pub use self::registry::ModelFamilies;

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
    llama4::FAMILIES,
    llava_onevision_1_5::FAMILIES,
    qwen2_5_omni::FAMILIES,
    qwen3_omni::FAMILIES,
    gemma3::FAMILIES,
    composed::FAMILIES,
    clip_siglip::FAMILIES,
    described::FAMILIES,
];
