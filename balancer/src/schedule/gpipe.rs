//! `GPipe`: all forward passes, then all backward passes.

use super::{Action, Actions};

/// Lists one stage's actions.
///
/// # Source
/// Huang et al., "`GPipe`: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019,
/// arXiv:1811.06965, section 2.2. Backward passes run in the order of the forward passes, as a stage frees
/// the same memory either way and the first gradients arrive earlier at the first stage.
pub(super) fn actions(stage: usize, stages: usize, microbatches: u32) -> Vec<Action> {
    let mut actions = Actions::new(stage, stages);
    for microbatch in 0..microbatches {
        actions.forward(microbatch);
        actions.send(microbatch);
    }
    for microbatch in 0..microbatches {
        actions.recv_grad(microbatch);
        actions.backward(microbatch);
    }
    actions.list
}
