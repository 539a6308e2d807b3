//! Finds ranks that are slower than the others, regardless of microbatch content.

use std::collections::BTreeMap;

use serde::Serialize;

use super::microbatch_fit::{MicrobatchFit, Timed};
use crate::quantiles::median_of_sorted;

/// Minimum factor that makes a rank slow.
const SLOW_MIN: f64 = 1.1;
/// Number of standard errors by which a slow rank has to differ from the median rank.
const SIGNIFICANT_ERRORS: f64 = 4.0;
/// Minimum number of microbatches on a rank.
const MICROBATCHES_MIN: usize = 3;
/// Standard error of a median divided by the standard error of a mean.
const MEDIAN_ERROR: f64 = 1.2533;
const MAD_TO_DEVIATION: f64 = 1.4826;

/// Rank that takes longer for the same work.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SlowRank {
    /// Data-parallel rank.
    pub rank: u32,
    /// Rank time divided by the other ranks' time for the same work.
    pub factor: f64,
}

/// Returns the slow ranks, ascending.
///
/// A rank is compared with the lower median over all ranks, so that among two ranks the faster counts as
/// right.
pub(super) fn slow_ranks(timed: &[Timed], fit: &MicrobatchFit) -> Vec<SlowRank> {
    let mut ratios: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for one in timed {
        ratios.entry(one.rank).or_default().push(one.measured_ns / fit.ns(&one.added_ns));
    }
    ratios.retain(|_, ratios| ratios.len() >= MICROBATCHES_MIN);
    let mut distances = Vec::new();
    let middles: Vec<(u32, f64, usize)> = ratios
        .into_iter()
        .map(|(rank, mut ratios)| {
            ratios.sort_by(f64::total_cmp);
            let middle = median_of_sorted(&ratios);
            distances.extend(ratios.iter().map(|ratio| (ratio / middle - 1.0).abs()));
            (rank, middle, ratios.len())
        })
        .collect();
    distances.sort_by(f64::total_cmp);
    let mut sorted: Vec<f64> = middles.iter().map(|(_, middle, _)| *middle).collect();
    sorted.sort_by(f64::total_cmp);
    let Some(&usual) = sorted.get(sorted.len().saturating_sub(1) / 2).filter(|_| sorted.len() > 1) else {
        return Vec::new();
    };
    // All ranks have the same noise, which a single rank hardly shows.
    let deviation = MAD_TO_DEVIATION * median_of_sorted(&distances);
    let is_slow = |(_, middle, count): &(u32, f64, usize)| {
        let error = deviation * MEDIAN_ERROR / (*count as f64).sqrt();
        middle / usual > SLOW_MIN.max(1.0 + SIGNIFICANT_ERRORS * error)
    };
    let slow = middles.into_iter().filter(is_slow);
    slow.map(|(rank, middle, _)| SlowRank { rank, factor: middle / usual }).collect()
}
