//! Names a model's modules; each has a separate time and separate pipeline stages.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Maximum number of modules in a model.
pub(crate) const MODULES_MAX: usize = 3;

/// Model component that has a separate time and separate pipeline stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Module {
    /// Image and video encoder with projector.
    Vision,
    /// Audio encoder with projector.
    Audio,
    /// Language model with LM head.
    Llm,
}

impl Module {
    /// All modules, in model order.
    pub const ALL: [Self; MODULES_MAX] = [Self::Vision, Self::Audio, Self::Llm];

    /// Returns the module's name: `vision`, `audio` or `llm`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vision => "vision",
            Self::Audio => "audio",
            Self::Llm => "llm",
        }
    }
}

impl fmt::Display for Module {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// Nanoseconds per module in a model, in [`crate::CostModel::modules`] order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct ModuleTimes {
    nanoseconds: [u64; MODULES_MAX],
    modules: u8,
}

impl ModuleTimes {
    pub(crate) const EMPTY: Self = Self { nanoseconds: [0; MODULES_MAX], modules: 0 };

    /// Creates the times from one value per module, LLM last; `None` for more modules than a model can have.
    #[must_use]
    pub fn new(nanoseconds: &[u64]) -> Option<Self> {
        let mut times = Self::EMPTY;
        times.nanoseconds.get_mut(..nanoseconds.len())?.copy_from_slice(nanoseconds);
        // `get_mut` has checked that there are at most `MODULES_MAX`.
        times.modules = nanoseconds.len() as u8;
        Some(times)
    }

    /// Returns one time per module, LLM last.
    #[must_use]
    pub fn as_slice(&self) -> &[u64] {
        &self.nanoseconds[..usize::from(self.modules)]
    }

    /// Adds to the LLM time, which is the last module's; saturates.
    pub fn add_llm(&mut self, nanoseconds: u64) {
        if let Some(llm) = self.nanoseconds[..usize::from(self.modules)].last_mut() {
            *llm = llm.saturating_add(nanoseconds);
        }
    }

    pub(crate) fn push(&mut self, nanoseconds: u64) {
        self.nanoseconds[usize::from(self.modules)] = nanoseconds;
        self.modules += 1;
    }
}
