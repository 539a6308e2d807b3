//! Decides which encoders run in every microbatch, on a blank medium where it has none of its own.

use dflop_costmodel::Module;

use crate::dataset::Dataset;

/// Microbatches without a medium that get a blank one.
///
/// An encoder that one rank runs and another does not leaves parameters without gradients (DDP), or ranks
/// that wait for each other (FSDP).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum BlankMedia {
    /// Where several ranks train on data that has such media: all microbatches of all ranks. A text-only
    /// dataset, or a single rank, needs none.
    #[default]
    Auto,
    /// All microbatches, whatever the data and the ranks.
    Always,
    /// None.
    Never,
}

impl BlankMedia {
    /// Returns the encoders that run in every microbatch, of those that the model has.
    pub(super) fn towers(
        self,
        encoders: &[(Module, u64)],
        dp_size: usize,
        datasets: &[Dataset],
    ) -> Vec<Module> {
        let is_run = |module: Module| match self {
            Self::Always => true,
            Self::Never => false,
            Self::Auto => dp_size > 1 && datasets.iter().any(|set| set.index().has_media_of(module)),
        };
        encoders.iter().map(|(module, _)| *module).filter(|module| is_run(*module)).collect()
    }
}
