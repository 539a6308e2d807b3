//! Completes microbatches so that a model can run them: padding where there is no sample, blank media where
//! an encoder would otherwise have no input.

use dflop_costmodel::Module;

use super::PreparedSample;

/// Sequences that complete microbatches.
#[derive(Debug, Clone)]
pub struct Filler {
    /// Padding token for empty microbatches; `None` if rows have a fixed length anyway.
    padding: Option<PreparedSample>,
    /// Blank medium for every encoder that has to run in all microbatches.
    blanks: Vec<(Module, PreparedSample)>,
}

impl Filler {
    /// Creates a filler from a padding token and blank encoder media.
    #[must_use]
    pub fn new(padding: Option<PreparedSample>, blanks: Vec<(Module, PreparedSample)>) -> Self {
        Self { padding, blanks }
    }

    /// Returns the sequences that complete a microbatch with these `samples`.
    pub fn of(&self, samples: &[PreparedSample]) -> impl Iterator<Item = &PreparedSample> {
        let is_missing = |module: Module| !samples.iter().any(|sample| sample.runs_encoder(module));
        let blanks = || self.blanks.iter().filter(move |(module, _)| is_missing(*module));
        let is_empty = samples.is_empty() && blanks().next().is_none();
        blanks().map(|(_, blank)| blank).chain(self.padding.as_ref().filter(move |_| is_empty))
    }

    /// Returns the number of blank-media tokens that complete a microbatch with these `samples`.
    #[must_use]
    pub fn tokens_for(&self, samples: &[PreparedSample]) -> u64 {
        let is_blank = |filler: &&PreparedSample| !filler.runs.is_empty();
        self.of(samples).filter(is_blank).map(|filler| filler.tokens() as u64).sum()
    }
}
