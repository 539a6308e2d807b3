//! ZB-H1: 1F1B with the weights' gradients put off to where a stage would wait.

use super::action::Pass;
use super::action::PassKind::{BackwardInput, BackwardWeight, Forward};
use super::window::{Share, windowed};

/// Lists one rank's passes.
///
/// Only the gradient of the input is on the way of other stages. It runs where 1F1B has its backward pass;
/// the weights' gradient follows on every rank `p - 1` rounds behind the forward pass, `p` stages in all.
/// So every rank keeps at most `p` microbatches, as the first one does under 1F1B. With forward, input and
/// weight parts of `f`, `b` and `w`, `w` not above either, and `p` microbatches or more, the bubble is
/// `(p - 1)(f + b - w)` where 1F1B has `(p - 1)(f + b + w)`.
///
/// # Source
/// Qi et al., "Zero Bubble Pipeline Parallelism", 2024, arXiv:2401.10241, section 2.1 and table 2.
pub(super) fn passes(share: &Share<'_>) -> Vec<Pass> {
    windowed(
        share,
        &[(Forward, 0), (BackwardInput, share.stages_after), (BackwardWeight, share.stages_in_all - 1)],
    )
}
