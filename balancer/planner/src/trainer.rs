//! Lists the plans that a trainer runs.
//!
//! The search is restricted to them, and plans from elsewhere are rejected with the first part that the
//! trainer lacks. `dflop.torch.Pipeline` has stages on one rank each, under every schedule and in every
//! placement; the executor has tensor parallelism as well.

use dflop_costmodel::memory::Trainer;

/// Maximum TP degree.
pub(crate) const fn tp_max(trainer: Trainer) -> u32 {
    match trainer {
        Trainer::Dflop => u32::MAX,
        Trainer::Torch => 1,
    }
}

/// Maximum expert-parallel degree. Reports mark the executor's plans with degrees above 1 instead.
pub(crate) const fn expert_parallel_max(trainer: Trainer) -> u32 {
    match trainer {
        Trainer::Dflop => u32::MAX,
        Trainer::Torch => 1,
    }
}

/// Whether ranks can share the tiles of a sample; otherwise they share whole media.
pub(crate) const fn divides_media(trainer: Trainer) -> bool {
    matches!(trainer, Trainer::Dflop)
}

/// Whether gradient sums and weight gathers of a stage run beside the passes of the same stage; otherwise
/// after the last pass and before the first.
pub(crate) const fn overlaps_sums(trainer: Trainer) -> bool {
    matches!(trainer, Trainer::Dflop)
}

/// Whether a split backward pass computes the gradients of rows a second time for those of weights.
pub(crate) const fn repeats_split_passes(trainer: Trainer) -> bool {
    matches!(trainer, Trainer::Torch)
}
