//! Settings of how global batches are drawn and cut, checked.

use dflop_balancer::schedule::ScheduleKind;
use dflop_balancer::{Caps, Strategy};
use dflop_costmodel::{KeyExchange, Module};
use dflop_samples::sample::BatchLayout;

use super::lockstep::Synchronization;
use super::stage_layers::StageLayers;

/// Largest step or epoch; far from where their arithmetic would overflow.
pub(super) const COUNT_MAX: u64 = 1 << 40;
/// Largest fixed length in tokens: `cu_seqlens` are 32-bit.
pub(super) const PAD_TO_TOKENS_MAX: u64 = i32::MAX as u64;

/// Settings of how global batches are cut.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PlanConfig {
    pub(super) dp_size: usize,
    pub(super) microbatches: usize,
    /// Pipeline stages of every module, in the model's order; one of all modules where they share a device,
    /// and those of each kind where stages hold several modules.
    pub(super) stages: Vec<usize>,
    /// DP ranks of every module, in the same order; empty if all have `dp_size`.
    pub(super) module_dp_sizes: Vec<usize>,
    /// Layers of every module in every stage, where stages hold several modules.
    pub(super) stage_layers: Option<StageLayers>,
    /// Point at which ranks wait for each other, where the modules share a device.
    pub(super) synchronization: Option<Synchronization>,
    pub(super) strategy: Strategy,
    /// Schedule that runs the microbatches.
    pub(super) schedule: ScheduleKind,
    pub(super) caps: Caps,
    /// Fixed length of microbatches or rows.
    pub(super) pad_to: Option<PadTo>,
    /// Encoders that run in every microbatch.
    pub(super) required_encoders: Vec<Module>,
    /// Ranks that may share samples; `None` if every sample is whole on one rank.
    pub(super) context: Option<ContextGroups>,
    /// Work units that the search for one step may spend.
    pub(super) work: u64,
}

/// Ranks that may share a sample, and their exchange of keys and values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ContextGroups {
    /// Smallest and largest number of ranks for a sample, powers of two; equal for one degree for all
    /// samples.
    pub ranks: [usize; 2],
    /// Exchange of keys and values.
    pub exchange: KeyExchange,
}

/// Fixed length in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PadTo {
    /// Tokens of a packed microbatch, `[1, tokens]`, or of every row of a padded one, `[samples, tokens]`.
    pub tokens: u64,
    /// Layout of the padded tensors.
    pub layout: BatchLayout,
    /// Tokens of a packed microbatch that samples leave free, for blank media
    /// ([`StepPlannerBuilder::blank_media`](super::StepPlannerBuilder::blank_media)).
    pub blank_tokens: u64,
}

impl PadTo {
    /// Returns the maximum tokens of the samples of a packed microbatch, or of a row.
    #[must_use]
    pub fn capacity_tokens(self) -> u64 {
        self.tokens.saturating_sub(if self.layout.is_packed() { self.blank_tokens } else { 0 })
    }

    /// Returns the tokens of padding in a microbatch of `samples` samples and `tokens` tokens; with padded
    /// layouts a microbatch without a sample has one row.
    #[must_use]
    pub fn padding_tokens(self, samples: usize, tokens: u64) -> u64 {
        let rows = if self.layout.is_packed() { 1 } else { samples.max(1) as u64 };
        (rows * self.tokens).saturating_sub(tokens)
    }
}
