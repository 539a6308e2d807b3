//! Selects how a profile applies to a model: the TP degree of each module.

use crate::module::{MODULES_MAX, Module};

/// Settings that apply a profile to a model; the default is TP degree 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProfileOptions {
    tp: [u32; MODULES_MAX],
}

impl Default for ProfileOptions {
    fn default() -> Self {
        Self { tp: [1; MODULES_MAX] }
    }
}

impl ProfileOptions {
    /// Sets the tensor-parallel degree of a module; the profile must contain it. Default: 1.
    #[must_use]
    pub const fn tp(mut self, module: Module, tp: u32) -> Self {
        self.tp[module as usize] = tp;
        self
    }

    pub(super) const fn tp_of(&self, module: Module) -> u32 {
        self.tp[module as usize]
    }
}
