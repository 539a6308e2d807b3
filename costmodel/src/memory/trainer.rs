//! Describes trainers: what they keep in memory, and which plans they run.
//!
//! The search is restricted to those plans, and plans from elsewhere are rejected with the first part that
//! the trainer lacks. `dflop.torch.Pipeline` has stages on one rank each, under every schedule and in every
//! placement; the executor has tensor parallelism as well.

use super::state::StateBytes;

/// Fused operations, which save nothing between the fused parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Kernels {
    /// Norms, attention with grouped key heads, and gated MLP activations.
    #[default]
    Fused,
    /// Attention with grouped key heads, and layer norms, as in eager modules of transformers.
    AttentionOnly,
}

/// Program that trains a model in pipeline stages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Trainer {
    /// The executor, `dflop train`.
    #[default]
    Dflop,
    /// Eager PyTorch modules in `dflop.torch.Pipeline`.
    Torch,
}

impl Trainer {
    /// Returns the name in settings and plan files: `dflop` or `torch`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dflop => "dflop",
            Self::Torch => "torch",
        }
    }

    /// Returns the kernels in the trainer's layers.
    #[must_use]
    pub const fn kernels(self) -> Kernels {
        match self {
            Self::Dflop => Kernels::Fused,
            Self::Torch => Kernels::AttentionOnly,
        }
    }

    /// Returns the bytes per trained parameter in 16-bit training, depending on whether replicas share the
    /// optimizer state.
    #[must_use]
    pub const fn state(self, is_sharded: bool) -> StateBytes {
        match (self, is_sharded) {
            (Self::Dflop, _) => StateBytes::ADAM,
            (Self::Torch, true) => StateBytes::TORCH_SHARDED,
            (Self::Torch, false) => StateBytes::TORCH_REPLICATED,
        }
    }

    /// Returns the maximum TP degree; `u32::MAX` without a limit.
    #[must_use]
    pub const fn tp_max(self) -> u32 {
        match self {
            Self::Dflop => u32::MAX,
            Self::Torch => 1,
        }
    }

    /// Returns the maximum expert-parallel degree; `u32::MAX` without a limit. Reports mark the executor's
    /// plans with degrees above 1 instead.
    #[must_use]
    pub const fn expert_parallel_max(self) -> u32 {
        match self {
            Self::Dflop => u32::MAX,
            Self::Torch => 1,
        }
    }

    /// Returns whether ranks can share the tiles of a sample; otherwise they share whole media.
    #[must_use]
    pub const fn divides_media(self) -> bool {
        matches!(self, Self::Dflop)
    }

    /// Returns whether gradient sums and weight gathers of a stage run beside the passes of the same stage;
    /// otherwise after the last pass and before the first.
    #[must_use]
    pub const fn overlaps_sums(self) -> bool {
        matches!(self, Self::Dflop)
    }

    /// Returns whether a split backward pass computes the gradients of rows a second time for those of
    /// weights.
    #[must_use]
    pub const fn repeats_split_passes(self) -> bool {
        matches!(self, Self::Torch)
    }
}
