//! Predicts what a multimodal training sample costs, from its shape alone.
//!
//! A [`SampleShape`] (text tokens, pixels, frames, sample rates) goes through the *token rule* of a model
//! family ([`tokens`]) to encoder items, encoder tokens and LLM tokens; from these follow the exact [`flops`]
//! of each module of a [`ModelSpec`], which is a preset or read from a `config.json` ([`config`]); and from
//! FLOPs and a [`DeviceRate`] its nanoseconds. [`CostModel`] joins the steps. A measured [`Profile`] takes the place of
//! FLOPs and rate where there is one, and [`correction`] learns from a run where it is wrong.
//!
//! **Units.** Times are whole nanoseconds of forward and backward together, for a whole module on one device;
//! lengths are tokens, that is positions in the LLM; sizes are pixels.
//!
//! **Guarantees.** No I/O, no clocks, no threads, and no allocation per sample. The same sample costs the same
//! bits on every machine, so that ranks can plan alike without talking. No shape panics or hangs; what a
//! model refuses is an [`Error`].
//!
//! ```
//! use dflop_costmodel::{AudioLength, CostModel, DeviceRate, ModelSpec, Module, SampleShape};
//!
//! # fn main() -> dflop_costmodel::Result<()> {
//! let model = CostModel::new(ModelSpec::preset("qwen2-audio-7b")?, DeviceRate::preset("a100")?);
//! assert_eq!(model.modules(), [Module::Audio, Module::Llm]);
//!
//! let clip = AudioLength { frames: 35 * 44_100, sample_rate_hz: 44_100 };
//! let shape = SampleShape { text_tokens: 60, audio: vec![clip], ..SampleShape::default() };
//! let cost = model.annotate(&shape)?;
//! assert_eq!(cost.encoder_items, 2); // started windows of 30 seconds
//! assert_eq!(cost.tokens, 60 + 875 + 2); // 25 a second, and two markers
//! let [audio_ns, llm_ns] = cost.module_ns.as_slice() else { unreachable!() };
//! assert!(audio_ns < llm_ns);
//! # Ok(())
//! # }
//! ```

mod accuracy;
pub mod config;
pub mod correction;
mod data_profile;
mod error;
pub mod flops;
mod frozen;
mod measured;
pub mod memory;
pub mod model;
mod module;
mod parameters;
mod predict;
mod presets;
pub mod profile;
mod shape;
mod sketch;
pub mod tokens;
mod towers;

pub use accuracy::{
    AccuracyReport, BinAccuracy, Comparison, ErrorSummary, ModuleAccuracy, PartAccuracy, Unpredicted,
};
pub use correction::{CorrectionTable, FACTOR_ONE};
pub use data_profile::{DataProfile, Outlier};
pub use error::{Error, Result};
pub use frozen::Frozen;
pub use measured::Prediction;
pub use model::ModelSpec;
pub use module::{Module, ModuleTimes};
pub use parameters::{EncoderParameters, LlmParameters};
pub use predict::{CostModel, DeviceRate, SampleCost};
pub use profile::{Profile, ProfileOptions, ProfileWarning};
pub use shape::{AudioLength, ImageSize, SampleShape, VideoShape};
pub use sketch::{Histogram, Quantiles, SKETCH_ERROR, Sketch};
