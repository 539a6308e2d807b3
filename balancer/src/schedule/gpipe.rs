//! `GPipe`: all forward passes, then all backward passes.

use super::action::Pass;
use super::action::PassKind::{Backward, Forward};
use super::lagged::RankWork;

/// Lists one rank's passes.
///
/// # Source
/// Huang et al., "`GPipe`: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019,
/// arXiv:1811.06965, section 2.2. Backward passes run in the order of the forward passes, because a stage
/// frees the same memory either way and the first gradients arrive earlier at the first stage.
pub(super) fn passes(work: &RankWork<'_>) -> Vec<Pass> {
    let of = |kind| work.microbatches.iter().map(move |&microbatch| work.pass(kind, microbatch));
    of(Forward).chain(of(Backward)).collect()
}
