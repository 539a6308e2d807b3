//! 1F1B whose encoders run some rounds ahead, so that LLM ranks wait less for each other.
//!
//! Under 1F1B an encoder that serves all LLM ranks computes the next round when every rank has returned its
//! gradient, so all ranks run in lockstep. With rounds in reserve, a rank that is late in a round makes up
//! for it in the next. The encoder holds that many microbatches more.

use super::action::PassKind::{Backward, Forward};
use super::lagged::{Lags, StagePlace};

/// Returns the lags for a stage's passes: the 1F1B lags, plus `ahead` rounds in an encoder stage.
pub(super) fn lags(place: &StagePlace, ahead: usize) -> Lags {
    let ahead = if place.is_encoder { ahead } else { 0 };
    Lags::new(&[(Forward, 0), (Backward, place.stages_after + ahead)])
}
