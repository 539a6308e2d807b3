//! Predicts a pipeline stage's peak device memory in bytes.
//!
//! A stage holds *state* (parameters, gradients, optimizer), *activations* for every microbatch in flight,
//! the *working set* for the layer being computed, and buffers. [`StateBytes`] and [`ActivationBytes`] follow
//! from a model's sizes, for any TP degree; [`Peak`] adds them up. [`MeasuredMemory`] fits the same
//! quantities to measured points, which replace the formulas if there are any. [`PipelineMemory`] covers all
//! stages in a pipeline.
//!
//! [`ModuleMemory`] computes stage memory as a function of tokens, for a planner.
//!
//! Bytes are whole and saturate; a stage counts with its fullest rank. Formulas are for 16-bit or 32-bit
//! activations ([`Precision`]) and fused attention and count what PyTorch saves for the backward pass;
//! allocator overhead is a buffer.

mod activation;
mod fit;
mod pipeline;
mod profile_points;
mod stage;
mod state;

pub use activation::{ActivationBytes, Execution, Kernels, Precision, SavedActivations};
pub use fit::{FitError, MeasuredMemory, MemoryPoint};
pub use pipeline::{ModuleStages, PipelineMemory, StageMemory};
pub use stage::{ModuleMemory, StageByTokens};
pub use state::{StageLayers, StateBytes, encoder_parameters};

/// Formats a number of bytes with a decimal unit, such as `1.5 kB`.
#[must_use]
pub fn format_bytes(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, "B");
    for next in ["kB", "MB", "GB", "TB", "PB"] {
        if value < 1000.0 {
            break;
        }
        (value, unit) = (value / 1000.0, next);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

/// Stage memory by kind, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Peak {
    /// Parameters, gradients and optimizer state.
    pub state: u64,
    /// Activations saved for the backward passes, over all microbatches in flight.
    pub activations: u64,
    /// Memory for the layer, or the LM head, being computed.
    pub working_set: u64,
    /// All other allocations: communication, workspaces, fragmentation.
    pub buffers: u64,
}

impl Peak {
    /// Returns the sum, saturating.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.state
            .saturating_add(self.activations)
            .saturating_add(self.working_set)
            .saturating_add(self.buffers)
    }
}

/// Returns the number of microbatches whose activations a 1F1B pipeline stage holds at once.
///
/// - `stage`: 0 is the first of `stages`, which count encoder and LLM stages together
/// - `microbatches`: number of microbatches in a step
///
/// # Source
/// Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, arXiv:2104.04473,
/// section 2.2.1: a stage has warmed up by as many microbatches as stages follow it. In the DFLOP paper
/// (section 3.2.1), `E_pp + L_pp` for an encoder and `L_pp` for an LLM are the first stages' values.
#[must_use]
pub const fn microbatches_in_flight(stage: u32, stages: u32, microbatches: u32) -> u32 {
    let following = stages.saturating_sub(stage);
    if following < microbatches { following } else { microbatches }
}

/// Splits layers over stages as equally as possible, the larger shares first.
///
/// # Panics
/// If `stages` is 0.
#[must_use]
pub fn split_layers(layers: u32, stages: u32) -> Vec<u32> {
    assert!(stages > 0, "a pipeline has at least one stage");
    let (share, rest) = (layers / stages, layers % stages);
    (0..stages).map(|stage| share + u32::from(stage < rest)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_shown_with_their_unit() {
        let shown = [0, 999, 1_500, 75_000_000].map(format_bytes);
        assert_eq!(shown, ["0 B", "999 B", "1.5 kB", "75.0 MB"]);
    }

    #[test]
    fn the_first_stage_holds_the_most_microbatches() {
        let held = |stages, microbatches| {
            (0..stages).map(|stage| microbatches_in_flight(stage, stages, microbatches)).collect::<Vec<_>>()
        };
        assert_eq!(held(4, 8), [4, 3, 2, 1]);
        assert_eq!(held(4, 2), [2, 2, 2, 1]);
        assert_eq!(held(1, 8), [1]);
    }

    #[test]
    fn layers_are_split_without_loss() {
        assert_eq!(split_layers(28, 4), [7, 7, 7, 7]);
        assert_eq!(split_layers(30, 4), [8, 8, 7, 7]);
        assert_eq!(split_layers(2, 3), [1, 1, 0]);
    }

    #[test]
    fn a_peak_is_the_sum_of_its_kinds() {
        let peak = Peak { state: 1, activations: 20, working_set: 300, buffers: 4000 };
        assert_eq!(peak.total(), 4321);
        assert_eq!(Peak { state: u64::MAX, ..peak }.total(), u64::MAX);
    }
}
