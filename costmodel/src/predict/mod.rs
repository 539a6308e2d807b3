//! Predicts tokens and nanoseconds per module for samples and microbatches.
//!
//! [`CostModel`] joins a model's token rules with times. Times come from either of two sources: exact FLOPs
//! over a stated [`DeviceRate`], a first guess that needs no measurement and ranks samples rather than timing
//! them; or the curves and surfaces through a measured [`Profile`](crate::Profile)'s points. A correction
//! table may scale either. [`LayerTimes`] cuts the same times by layer for a parallelism planner, and
//! [`AccuracyReport`] compares predictions with held-out measurements.
//!
//! A stated rate needs integer arithmetic only; a profile needs `+ - * /` on `f64` in a fixed order, rounded
//! to whole nanoseconds at the end. Both give the same bits on every rank.
//!
//! A sample is reduced to the work in each module, as far as the module's time depends on it: tokens, and
//! sequences with their lengths.

mod accuracy;
mod calibration;
mod context;
mod cost_model;
mod curve_query;
mod device;
mod layer_matrices;
mod layer_times;
mod measured_points;
mod microbatch_curve;
mod module_timing;
mod predicted_time;
mod profile_timing;
mod shard_traffic;

use crate::tokens::EncoderWork;
use crate::{MODULES_MAX, Module};

pub use accuracy::{AccuracyReport, BinAccuracy, ModuleAccuracy, PartAccuracy, PointAccuracy, Unpredicted};
pub use calibration::ProfileCheck;
pub use context::{KeyExchange, KeyExchangeKind, MessageLatency, SliceCost, SliceShare};
pub use cost_model::{CostModel, Prediction, SampleCost};
pub use device::{DeviceLink, DeviceLinks, DevicePreset, DeviceRate};
pub use layer_times::LayerTimes;
pub use microbatch_curve::{LaunchLimit, MicrobatchCurve};
pub use predicted_time::{ExpertImbalance, PredictedTime, ProfileWarning};
pub use profile_timing::ProfileOptions;
pub use shard_traffic::ModuleTraffic;

/// Module work, in the quantities for time lookup.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ModuleWorkload {
    /// All tokens: linear work.
    tokens: f64,
    /// Target tokens: LM head work, if it runs only for them.
    targets: f64,
    /// Number of sequences and tokens per sequence, in layers with full attention.
    attention: [f64; 2],
    /// Number of sequences and tokens per sequence, in layers with windowed attention.
    windows: [f64; 2],
}

impl ModuleWorkload {
    /// Reduces media to equal sequences with the same tokens and query-key pairs.
    ///
    /// Exact for tiles, and for sequences with different lengths if attention takes `a tokens + b pairs`.
    fn from_encoder(work: &EncoderWork) -> Self {
        let tokens = work.encoder_tokens as f64;
        let sequences = |pairs: u64| match pairs {
            0 => [0.0, 0.0],
            // n sequences of length s have n s tokens and n s² pairs, so s is the ratio of the two.
            pairs => {
                let length = pairs as f64 / tokens;
                [tokens / length, length]
            }
        };
        Self {
            tokens,
            targets: 0.0,
            attention: sequences(work.attention_pairs),
            windows: sequences(work.window_pairs),
        }
    }

    /// Creates the workload for an LLM sample: all tokens, and the number of target tokens among them.
    const fn from_llm(tokens: u64, targets: u64) -> Self {
        let tokens = tokens as f64;
        Self { tokens, targets: targets as f64, attention: [1.0, tokens], windows: [0.0, 0.0] }
    }
}

/// Work for all modules in a sample.
struct SampleWork {
    encoders: [Option<(Module, EncoderWork)>; MODULES_MAX],
    tokens: u64,
    /// Target tokens.
    targets: u64,
}

impl SampleWork {
    fn encoder(&self, module: Module) -> Option<&EncoderWork> {
        self.encoders.iter().flatten().find(|(of, _)| *of == module).map(|(_, work)| work)
    }

    fn workload(&self, module: Module) -> ModuleWorkload {
        self.encoder(module)
            .map_or_else(|| ModuleWorkload::from_llm(self.tokens, self.targets), ModuleWorkload::from_encoder)
    }

    /// Returns the tokens inside a module, used to look up the correction.
    fn size(&self, module: Module) -> u64 {
        self.encoder(module).map_or(self.tokens, |work| work.encoder_tokens)
    }
}

#[cfg(test)]
mod tests;
