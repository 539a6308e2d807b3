//! Learns from a run's measured times to correct profile predictions.
//!
//! Measured microbatch times go into a [`CorrectionTracker`]. At the end of every interval it decides whether
//! tracking pays ([`CorrectionOptions`] states the rule) and may return a [`CorrectionTable`]. The table is
//! learned on two levels: what is off as a whole, a floor, a constant and a scale for each module
//! (`microbatch_fit.rs`), and a factor per module and shape bin for the rest (`estimator.rs`). Ranks that are
//! slow whatever is in their microbatches are named, and do not affect sample factors. A table is in force
//! from an agreed step on, on all ranks ([`Corrections`]); [`crate::CostModel::correction`] applies it.
//!
//! No clocks and no randomness: the trainer measures, and sends tables to the ranks.

mod estimator;
mod learned;
mod microbatch_fit;
mod table;
mod tracker;

pub use microbatch_fit::SlowRank;
pub use table::{
    BINS, BINS_PER_OCTAVE, CorrectionTable, Corrections, FACTOR_MAX, FACTOR_ONE, MicrobatchConstants,
    ModelConstants, Observation, SampleTime, bin, bin_sizes,
};
pub use tracker::{CorrectionOptions, CorrectionTracker, IntervalReport, TrackingMode};

#[cfg(test)]
mod tests;
