//! ZB-H1: 1F1B with weight gradients delayed to where a stage would wait.

use super::action::PassKind::{BackwardInput, BackwardWeight, Forward};
use super::lagged::{Lags, StagePlace};

/// Returns the lags for a stage's passes.
///
/// Other stages depend only on the input gradient. It runs where 1F1B has its backward pass; the weight
/// gradient follows on every rank `p - 1` rounds after the forward pass, with `p` stages in total. So every
/// rank keeps at most `p` microbatches, like the first rank under 1F1B. With forward, input and weight parts
/// of `f`, `b` and `w`, where `w` is at most `f` and `b`, and `p` microbatches or more, the bubble is
/// `(p - 1)(f + b - w)` where 1F1B has `(p - 1)(f + b + w)`.
///
/// # Source
/// Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241, section 2.1 and table 2.
pub(super) fn lags(place: &StagePlace) -> Lags {
    Lags::new(&[(Forward, 0), (BackwardInput, place.stages_after), (BackwardWeight, place.stages_in_all - 1)])
}
