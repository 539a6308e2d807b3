//! Layers that are recomputed in the backward pass.

/// Layers in a module whose activations are recomputed in the backward pass: only layer inputs are kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RecomputedLayers {
    /// Every layer keeps all activations.
    #[default]
    None,
    /// Every second layer in a stage, starting with the first.
    EverySecond,
    /// All layers.
    All,
}

impl RecomputedLayers {
    /// Returns the number of recomputed layers in a stage.
    #[must_use]
    pub const fn of(self, layers: u32) -> u32 {
        match self {
            Self::None => 0,
            Self::EverySecond => layers.div_ceil(2),
            Self::All => layers,
        }
    }

    /// Returns the fraction of a module's layers that are recomputed.
    pub(in crate::planner) const fn fraction(self) -> f64 {
        match self {
            Self::None => 0.0,
            Self::EverySecond => 0.5,
            Self::All => 1.0,
        }
    }
}
