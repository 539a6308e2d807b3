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

mod accuracy;
mod calibration;
mod cost_model;
mod curve_query;
mod device_preset;
mod device_rate;
mod layer_matrices;
mod layer_times;
mod measured_points;
mod microbatch_curve;
mod module_timing;
mod predicted_time;
mod profile_timing;
mod shard_traffic;
mod workload;

pub use accuracy::{AccuracyReport, BinAccuracy, ModuleAccuracy, PartAccuracy, PointAccuracy, Unpredicted};
pub use calibration::ProfileCheck;
pub use cost_model::{CostModel, Prediction, SampleCost};
pub use device_preset::{DeviceLink, DeviceLinks, DevicePreset};
pub use device_rate::DeviceRate;
pub use layer_times::LayerTimes;
pub use microbatch_curve::{LaunchLimit, MicrobatchCurve};
pub use predicted_time::{ExpertImbalance, PredictedTime, ProfileWarning};
pub use profile_timing::ProfileOptions;
pub use shard_traffic::ModuleTraffic;

#[cfg(test)]
mod tests;
