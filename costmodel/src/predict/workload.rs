//! Reduces a sample to the work in each module, as far as the module's time depends on it.

use crate::module::{MODULES_MAX, Module};
use crate::tokens::EncoderWork;

/// Module work, in the quantities for time lookup.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ModuleWorkload {
    /// All tokens: linear work.
    pub(super) tokens: f64,
    /// Target tokens: LM head work, if it runs only for them.
    pub(super) targets: f64,
    /// Number of sequences and tokens per sequence, in layers with full attention.
    pub(super) attention: [f64; 2],
    /// Number of sequences and tokens per sequence, in layers with windowed attention.
    pub(super) windows: [f64; 2],
}

impl ModuleWorkload {
    /// Reduces media to equal sequences with the same tokens and query-key pairs.
    ///
    /// Exact for tiles, and for sequences with different lengths if attention takes `a tokens + b pairs`.
    pub(super) fn from_encoder(work: &EncoderWork) -> Self {
        let tokens = work.encoder_tokens as f64;
        let sequences = |pairs: u64| match pairs {
            0 => [0.0, 0.0],
            // n sequences of length s have n s tokens and n s² pairs, so s is the ratio of the two.
            pairs => {
                let length = pairs as f64 / tokens;
                [tokens / length, length]
            }
        };
        Self {
            tokens,
            targets: 0.0,
            attention: sequences(work.attention_pairs),
            windows: sequences(work.window_pairs),
        }
    }

    /// Creates the workload for an LLM sample: all tokens, and the number of target tokens among them.
    pub(super) const fn from_llm(tokens: u64, targets: u64) -> Self {
        let tokens = tokens as f64;
        Self { tokens, targets: targets as f64, attention: [1.0, tokens], windows: [0.0, 0.0] }
    }
}

/// Work for all modules in a sample.
pub(super) struct SampleWork {
    pub(super) encoders: [Option<(Module, EncoderWork)>; MODULES_MAX],
    pub(super) tokens: u64,
    /// Target tokens.
    pub(super) targets: u64,
}

impl SampleWork {
    pub(super) fn encoder(&self, module: Module) -> Option<&EncoderWork> {
        self.encoders.iter().flatten().find(|(of, _)| *of == module).map(|(_, work)| work)
    }

    pub(super) fn workload(&self, module: Module) -> ModuleWorkload {
        self.encoder(module)
            .map_or_else(|| ModuleWorkload::from_llm(self.tokens, self.targets), ModuleWorkload::from_encoder)
    }

    /// Returns the tokens inside a module, used to look up the correction.
    pub(super) fn size(&self, module: Module) -> u64 {
        self.encoder(module).map_or(self.tokens, |work| work.encoder_tokens)
    }
}
