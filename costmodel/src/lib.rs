//! Predicts the cost of a multimodal training sample, only from its shape.
//!
//! A [`SampleShape`] (text tokens, pixels, frames, sample rates) goes through a model family's *token rule*
//! ([`tokens`]) to encoder items, encoder tokens and LLM tokens; these give the exact [`flops`] for each
//! module in a [`ModelSpec`], which is a preset or read from a `config.json` ([`config`]); and FLOPs and a
//! [`DeviceRate`] give nanoseconds. [`CostModel`] joins the steps. A measured [`Profile`] replaces FLOPs and
//! rate if there is one, and [`correction`] learns from a run where predictions are wrong.
//!
//! **Units.** Times are whole nanoseconds for forward and backward together, for a whole module on one
//! device; lengths are tokens, that is LLM positions; sizes are pixels.
//!
//! **Guarantees.** No I/O, no clocks, no threads, and no allocation per sample. The same sample costs the
//! same bits on every machine, so that ranks plan alike without communication. No shape panics or hangs; a
//! sample or model that cannot be costed is an [`Error`].
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
//! let cost = model.predict(&shape)?;
//! assert_eq!(cost.encoder_items, 2); // started windows of 30 seconds
//! assert_eq!(cost.tokens, 60 + 875 + 2); // 25 a second, and two markers
//! let [audio_ns, llm_ns] = cost.module_ns.as_slice() else { unreachable!() };
//! assert!(audio_ns < llm_ns);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod correction;
mod curve;
mod dataset_statistics;
mod error;
pub mod flops;
mod frozen;
pub mod measure;
pub mod memory;
pub mod model;
mod module;
mod predict;
pub mod profile;
mod quantiles;
pub mod random;
mod shape;
pub mod tokens;

pub use correction::{CorrectionTable, FACTOR_ONE, MicrobatchConstants, ModelConstants};
pub use dataset_statistics::{DatasetStatistics, Outlier};
pub use error::{Error, Result};
pub use frozen::FrozenParts;
pub use measure::{ErrorSummary, TimeCurve};
pub use memory::{RankLayout, Sharding};
pub use model::{
    EncoderParameters, FamilyId, LlmParameters, MediaUnits, ModelFamilies, ModelFamily, ModelSpec,
    SampleUnits, config,
};
pub use module::{Module, ModuleTimes};
pub use predict::{
    AccuracyReport, BinAccuracy, CostModel, DeviceLink, DeviceLinks, DevicePreset, DeviceRate,
    ExpertImbalance, LaunchLimit, LayerTimes, MicrobatchCurve, ModuleAccuracy, ModuleTraffic, PartAccuracy,
    PointAccuracy, PredictedTime, Prediction, ProfileCheck, ProfileOptions, ProfileWarning, SampleCost,
    Unpredicted,
};
pub use profile::Profile;
pub use quantiles::{Histogram, QuantileSketch, Quantiles, SKETCH_ERROR, median, nearest_rank, percentile};
pub use shape::{AudioLength, ImageSize, SampleShape, VideoShape};
