//! Rounds times from a profile to whole nanoseconds, with uncertainty.

use serde::Serialize;

use crate::curve::Estimate;

/// Time predicted from a profile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PredictedTime {
    /// Time in whole nanoseconds.
    pub ns: u64,
    /// Half width of the 90 % interval around `ns`, in nanoseconds: 9 of 10 measurements at a shape that was
    /// not measured are at most this far off.
    ///
    /// Covers the spread between repeats, the interpolation error and the difference between measurement
    /// sessions; never below the measured spread. Errors in a module's parts add up in full.
    pub uncertainty_ns: u64,
    /// Whether the shape is outside the measured points.
    #[serde(rename = "is_beyond")]
    pub is_extrapolated: bool,
}

impl From<Estimate> for PredictedTime {
    fn from(estimate: Estimate) -> Self {
        let Estimate { ns, uncertainty_ns, is_extrapolated } = estimate;
        Self { ns: whole_ns(ns), uncertainty_ns: whole_ns(uncertainty_ns), is_extrapolated }
    }
}

/// Rounds to whole nanoseconds, half up, saturating.
pub(super) fn whole_ns(ns: f64) -> u64 {
    // A cast from f64 saturates, and truncates, which makes `+ 0.5` round half up.
    (ns + 0.5) as u64
}
