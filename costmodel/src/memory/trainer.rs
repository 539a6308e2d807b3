//! Names the programs that train, whose memory differs for the same plan.

use super::activation::Kernels;
use super::state::StateBytes;

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
}
