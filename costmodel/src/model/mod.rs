//! Describes models: sizes, and where the sizes come from.
//!
//! A [`ModelSpec`] is plain data: a preset ([`ModelSpec::preset`]), read from a checkpoint's `config.json`
//! ([`config`]), or deserialized. [`ModelFamilies`] has the model families, one per file. FLOPs, parameters,
//! memory and tokens follow from it.

pub mod config;
pub mod counts;
pub mod description;
pub(crate) mod families;
mod llm_spec;
mod llm_weights;
mod parameters;
mod sample_units;
mod spec;

pub use families::{ModelFamilies, ModelFamily, Preset, deepstack_layers};
pub use llm_spec::{
    AttentionBias, ExpertsDetails, ExpertsSpec, LatentAttention, LayerSet, LlmDetails, LlmSpec, Window,
    WindowedAttention,
};
pub use parameters::{EncoderParameters, LlmParameters};
pub use sample_units::{MediaUnits, SampleUnits};
pub use spec::{AudioSpec, EncoderDetails, EncoderSpec, FamilyId, Mlp, ModelSpec, Projector, VisionSpec};
