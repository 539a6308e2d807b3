//! Argument for the treatment of damaged media.

use clap::Args;
use dflop_loader::media::Strictness;

/// Treatment of damaged media.
#[derive(Debug, Args)]
pub(crate) struct StrictArgs {
    /// Treat any media damage as an error, also where all pixels or audio samples can be decoded.
    #[arg(long)]
    strict: bool,
}

impl StrictArgs {
    /// Returns which damage is an error.
    pub(crate) fn strictness(&self) -> Strictness {
        if self.strict { Strictness::Strict } else { Strictness::Standard }
    }
}
