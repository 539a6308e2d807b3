//! Adaptive correction: what a run measures corrects what the profile predicts.
//!
//! Measured times of microbatches go into a [`CorrectionTracker`]; at the end of every interval it says whether tracking pays
//! ([`CorrectionOptions`] states the rule) and may hand out a [`CorrectionTable`], a factor per module and shape bin,
//! learned by the estimator that `estimator.rs` states. A table is in force from an agreed step on, on all ranks
//! ([`Corrections`]); [`crate::CostModel::correction`] applies it.
//!
//! No clocks and no randomness: who measures and who sends is up to the trainer.

mod bins;
mod cholesky;
mod estimator;
mod table;
mod tracker;
mod tracking_rule;

pub use bins::{BINS, BINS_PER_OCTAVE, bin, bin_sizes};
pub use table::{CorrectionTable, Corrections, FACTOR_MAX, FACTOR_ONE};
pub use tracker::{CorrectionTracker, IntervalReport, Observation};
pub use tracking_rule::{CorrectionOptions, TrackingMode};

#[cfg(test)]
mod tests;
