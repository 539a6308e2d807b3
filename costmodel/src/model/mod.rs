//! Describes models: their sizes, and where the sizes come from.
//!
//! A [`ModelSpec`] is plain data: a preset ([`ModelSpec::preset`]), read from the `config.json` of a
//! checkpoint ([`config`]), or deserialized. FLOPs, parameters, memory and tokens follow from it.

pub mod config;
mod parameters;
mod presets;
mod sample_units;
mod spec;
pub(crate) mod towers;

pub use parameters::{EncoderParameters, LlmParameters};
pub use sample_units::{MediaUnits, SampleUnits};
pub use spec::{
    AttentionBias, AudioSpec, EncoderDetails, EncoderSpec, LlmDetails, LlmSpec, Mlp, ModelSpec, Projector,
    VisionSpec,
};
