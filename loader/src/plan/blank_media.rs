//! Decides which encoders run in every microbatch, on a blank medium where it has none.

use dflop_costmodel::Module;

use crate::dataset::Dataset;

/// Microbatches without a medium that receive a blank medium.
///
/// An encoder that runs on only some ranks leaves parameters without gradients (DDP), or ranks that wait for
/// each other (FSDP).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum BlankMedia {
    /// All microbatches on all ranks, if multiple ranks train on data with such media. A text-only dataset,
    /// or one rank, needs none.
    #[default]
    Auto,
    /// All microbatches, whatever the data and the ranks.
    Always,
    /// None.
    Never,
}

impl BlankMedia {
    /// Returns the model encoders that run in every microbatch.
    pub(super) fn towers(
        self,
        encoders: &[(Module, u64)],
        dp_size: usize,
        datasets: &[Dataset],
    ) -> Vec<Module> {
        let is_run = |module: Module| match self {
            Self::Always => true,
            Self::Never => false,
            Self::Auto => dp_size > 1 && datasets.iter().any(|set| set.index().has_media(module)),
        };
        encoders.iter().map(|(module, _)| *module).filter(|module| is_run(*module)).collect()
    }
}
