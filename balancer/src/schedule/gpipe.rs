//! `GPipe`: all forward passes, then all backward passes.

use super::action::PassKind::{Backward, Forward};
use super::lagged::{Lags, StagePlace};

/// Returns the lags for a stage's passes: backward passes follow when all forward passes are done.
///
/// # Source
/// Huang et al., "`GPipe`: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019,
/// arXiv:1811.06965, section 2.2. Backward passes run in the order of the forward passes, because a stage
/// frees the same memory either way and the first gradients arrive earlier at the first stage.
pub(super) fn lags(place: &StagePlace) -> Lags {
    Lags::new(&[(Forward, 0), (Backward, place.rounds + place.stages_after)])
}
