//! Selects how a profile applies to a model: the TP degree for each module.

use crate::module::{MODULES_MAX, Module};

/// Settings that apply a profile to a model; the default is TP degree 1, with held-out microbatches checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProfileOptions {
    tp: [u32; MODULES_MAX],
    is_checked: bool,
}

impl Default for ProfileOptions {
    fn default() -> Self {
        Self { tp: [1; MODULES_MAX], is_checked: true }
    }
}

impl ProfileOptions {
    /// Sets a module's tensor-parallel degree; the profile must contain it. Default: 1.
    #[must_use]
    pub const fn tp(mut self, module: Module, tp: u32) -> Self {
        self.tp[module as usize] = tp;
        self
    }

    /// Accepts a profile that does not predict the held-out microbatches within bounds. Default: rejected.
    #[must_use]
    pub const fn unchecked(mut self) -> Self {
        self.is_checked = false;
        self
    }

    pub(super) const fn is_checked(&self) -> bool {
        self.is_checked
    }

    pub(super) const fn module_tp(&self, module: Module) -> u32 {
        self.tp[module as usize]
    }
}
