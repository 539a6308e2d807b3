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
pub mod interned;
pub mod measure;
pub mod memory;
pub mod model;
mod predict;
pub mod profile;
mod quantiles;
pub mod random;
pub mod tokens;

use std::fmt;

use serde::{Deserialize, Serialize};

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
pub use predict::{
    AccuracyReport, BinAccuracy, CostModel, DeviceLink, DeviceLinks, DevicePreset, DeviceRate,
    ExpertImbalance, KeyExchange, KeyExchangeKind, LaunchLimit, LayerTimes, MessageLatency, MicrobatchCurve,
    ModuleAccuracy, ModuleTraffic, PartAccuracy, PointAccuracy, PredictedTime, Prediction, ProfileCheck,
    ProfileOptions, ProfileWarning, SampleCost, SliceCost, SliceShare, Unpredicted,
};
pub use profile::Profile;
pub use quantiles::{Histogram, QuantileSketch, Quantiles, SKETCH_ERROR, median, nearest_rank, percentile};

/// Image size in pixels, after the rotation from the EXIF orientation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[expect(missing_docs, reason = "width and height need no words")]
pub struct ImageSize {
    pub width: u32,
    pub height: u32,
}

/// Audio clip length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AudioLength {
    /// Sample frames: samples per channel.
    pub frames: u64,
    /// Sample frames per second, before any resampling.
    pub sample_rate_hz: u32,
}

/// Video frames given to the model, after frame sampling.
///
/// A token rule with a smaller maximum samples further, down to that maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct VideoShape {
    /// Number of images.
    pub frames: u32,
    /// Width of every frame in pixels.
    pub width: u32,
    /// Height of every frame in pixels.
    pub height: u32,
}

/// Text and media sizes in a sample: everything that the cost depends on, without decoding.
///
/// Sizes are read from headers (pixels, frames, sample rates) and from token counts, so a whole global batch
/// can be planned from a few kilobytes. Token rules ([`tokens`]) turn shapes into work.
///
/// # Examples
/// ```
/// use dflop_costmodel::{ImageSize, SampleShape};
///
/// let mut shape = SampleShape { text_tokens: 120, target_tokens: 40, ..SampleShape::default() };
/// shape.images.push(ImageSize { width: 640, height: 480 });
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct SampleShape {
    /// Text tokens, without media placeholders.
    pub text_tokens: u32,
    /// Text tokens in the loss.
    pub target_tokens: u32,
    /// Images, in order of occurrence.
    pub images: Vec<ImageSize>,
    /// Audio clips, in order of occurrence.
    pub audio: Vec<AudioLength>,
    /// Videos, in order of occurrence.
    pub videos: Vec<VideoShape>,
}

impl SampleShape {
    /// Empties the shape without freeing memory, so that a shape can be reused for each sample.
    pub fn clear(&mut self) {
        self.text_tokens = 0;
        self.target_tokens = 0;
        self.images.clear();
        self.audio.clear();
        self.videos.clear();
    }
}

/// Maximum number of modules in a model.
pub(crate) const MODULES_MAX: usize = 3;

/// Model component that has a separate time and separate pipeline stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Module {
    /// Image and video encoder with projector.
    Vision,
    /// Audio encoder with projector.
    Audio,
    /// Language model with LM head.
    Llm,
}

impl Module {
    /// All modules, in model order.
    pub const ALL: [Self; MODULES_MAX] = [Self::Vision, Self::Audio, Self::Llm];

    /// Returns the module's name: `vision`, `audio` or `llm`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vision => "vision",
            Self::Audio => "audio",
            Self::Llm => "llm",
        }
    }
}

impl fmt::Display for Module {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// Nanoseconds per module in a model, in [`CostModel::modules`] order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ModuleTimes {
    nanoseconds: [u64; MODULES_MAX],
    modules: u8,
}

impl ModuleTimes {
    pub(crate) const EMPTY: Self = Self { nanoseconds: [0; MODULES_MAX], modules: 0 };

    /// Creates the times from one value per module, LLM last; `None` for more modules than a model can have.
    #[must_use]
    pub fn new(nanoseconds: &[u64]) -> Option<Self> {
        let mut times = Self::EMPTY;
        times.nanoseconds.get_mut(..nanoseconds.len())?.copy_from_slice(nanoseconds);
        // `get_mut` has checked that there are at most `MODULES_MAX`.
        times.modules = nanoseconds.len() as u8;
        Some(times)
    }

    /// Returns one time per module, LLM last.
    #[must_use]
    pub fn as_slice(&self) -> &[u64] {
        &self.nanoseconds[..usize::from(self.modules)]
    }

    /// Adds to the LLM time, which is the last module's; saturates.
    pub fn add_llm(&mut self, nanoseconds: u64) {
        if let Some(llm) = self.nanoseconds[..usize::from(self.modules)].last_mut() {
            *llm = llm.saturating_add(nanoseconds);
        }
    }

    pub(crate) fn push(&mut self, nanoseconds: u64) {
        self.nanoseconds[usize::from(self.modules)] = nanoseconds;
        self.modules += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cleared_shape_is_the_default() {
        let mut shape = SampleShape {
            text_tokens: 3,
            target_tokens: 2,
            images: vec![ImageSize { width: 1, height: 1 }],
            audio: vec![AudioLength { frames: 1, sample_rate_hz: 16_000 }],
            videos: vec![VideoShape { frames: 1, width: 1, height: 1 }],
        };
        shape.clear();
        assert_eq!(shape, SampleShape::default());
        assert!(shape.images.capacity() > 0);
    }
}
