//! Chooses what to measure, and compares predictions with measurements.
//!
//! [`choose_points`] decides which sizes a measuring program runs, level by level, and stops when predictions
//! between them are within an error bound. The program itself is a [`TimeSource`]: the executor, or PyTorch.
//! [`TimeCurve`] is the interpolation used for predictions; [`RepeatedRuns`], [`ErrorSummary`] and
//! [`PredictionCheck`] compare predictions with repeated runs.

mod adaptive_grid;
mod check;

pub use adaptive_grid::{ChosenPoints, Grid, TimeCurve, TimeSource, choose_points};
pub use check::{ErrorSummary, MEDIAN_BOUND, P95_BOUND, PredictionCheck, RepeatedRuns};
