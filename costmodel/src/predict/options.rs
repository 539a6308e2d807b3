//! Selects how a profile applies to a model: TP degree and packed length of each module.

use crate::module::{MODULES_MAX, Module};

/// Settings that apply a profile to a model; the default is TP degree 1 and samples that run alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProfileOptions {
    tp: [u32; MODULES_MAX],
    packed_tokens: [Option<u64>; MODULES_MAX],
}

impl Default for ProfileOptions {
    fn default() -> Self {
        Self { tp: [1; MODULES_MAX], packed_tokens: [None; MODULES_MAX] }
    }
}

impl ProfileOptions {
    /// Sets the tensor-parallel degree of a module; the profile must contain it. Default: 1.
    #[must_use]
    pub const fn tp(mut self, module: Module, tp: u32) -> Self {
        self.tp[module as usize] = tp;
        self
    }

    /// Sets the tokens of a module that run together, as one packed sequence.
    ///
    /// The linear work of a shorter sample is charged as its share of a sequence of this length, and so is
    /// the attention of an encoder. Default: a sample runs alone and bears all launch costs.
    #[must_use]
    pub const fn packed_tokens(mut self, module: Module, tokens: u64) -> Self {
        self.packed_tokens[module as usize] = Some(tokens);
        self
    }

    pub(super) const fn tp_of(&self, module: Module) -> u32 {
        self.tp[module as usize]
    }

    pub(super) const fn packed_tokens_of(&self, module: Module) -> Option<u64> {
        self.packed_tokens[module as usize]
    }
}
