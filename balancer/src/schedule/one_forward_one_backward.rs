//! 1F1B: forward passes fill the pipeline, then one forward and one backward pass alternate.

use super::action::PassKind::{Backward, Forward};
use super::lagged::{Lags, StagePlace};

/// Returns the lags for a stage's passes: a backward pass runs as many rounds after its forward pass as there
/// are stages after this stage.
///
/// # Source
/// Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
/// 2021, arXiv:2104.04473, section 2.2.1 (PipeDream-Flush).
pub(super) fn lags(place: &StagePlace) -> Lags {
    Lags::new(&[(Forward, 0), (Backward, place.stages_after)])
}
