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

/// Built-in families except language models without encoders, in preset order.
static BUILT_IN: [&dyn ModelFamily; 24] = [
    &llava_onevision::LlavaOneVision,
    &intern_vl::InternVl,
    &qwen_vl::Qwen2Vl,
    &qwen_vl::Qwen25Vl,
    &qwen3_vl::Qwen3Vl,
    &qwen3_vl::Qwen3VlMoe,
    &qwen2_audio::Qwen2Audio,
    &llava::Llava,
    &llava_next::LlavaNext,
    &pixtral::Pixtral,
    &pixtral::Mistral3,
    &idefics3::Idefics3::IDEFICS3,
    &idefics3::Idefics3::SMOLVLM,
    &glm4v::Glm4v::DENSE,
    &glm4v::Glm4v::EXPERTS,
    &llama4::Llama4,
    &llava_onevision_1_5::LlavaOneVision15,
    &qwen2_5_omni::Qwen25Omni,
    &qwen3_omni::Qwen3Omni,
    &gemma3::Gemma3,
    &composed::Composed,
    &clip_siglip::Clip,
    &clip_siglip::Siglip,
    &described::Described,
];
