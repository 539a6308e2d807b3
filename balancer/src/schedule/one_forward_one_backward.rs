//! 1F1B: forward passes to fill the pipeline, then one forward and one backward in turn.

use super::{Action, Actions};

/// Lists one stage's actions.
///
/// A stage runs `min(microbatches, stages - stage - 1)` forward passes to warm up, then alternates, then
/// drains. While alternating it takes the gradient before it sends the activation, as the stage after
/// gives and takes in that order; it costs nothing, for that stage is not ready for the activation yet.
///
/// # Source
/// Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
/// 2021, arXiv:2104.04473, section 2.2.1 (PipeDream-Flush).
pub(super) fn actions(stage: usize, stages: usize, microbatches: u32) -> Vec<Action> {
    let mut actions = Actions::new(stage, stages);
    let warm_up = microbatches.min((stages - stage - 1) as u32);
    for microbatch in 0..warm_up {
        actions.forward(microbatch);
        actions.send(microbatch);
    }
    for microbatch in warm_up..microbatches {
        actions.forward(microbatch);
        actions.recv_grad(microbatch - warm_up);
        actions.send(microbatch);
        actions.backward(microbatch - warm_up);
    }
    for microbatch in microbatches - warm_up..microbatches {
        actions.recv_grad(microbatch);
        actions.backward(microbatch);
    }
    actions.list
}
