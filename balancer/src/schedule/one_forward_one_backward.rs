//! 1F1B: forward passes to fill the pipeline, then one forward and one backward in turn.

use super::action::Pass;
use super::action::PassKind::{Backward, Forward};
use super::window::{Share, windowed};

/// Lists one rank's passes: a backward pass runs as many rounds behind its forward pass as there are stages
/// after this one.
///
/// # Source
/// Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
/// 2021, arXiv:2104.04473, section 2.2.1 (PipeDream-Flush).
pub(super) fn passes(share: &Share<'_>) -> Vec<Pass> {
    windowed(share, &[(Forward, 0), (Backward, share.stages_after)])
}
