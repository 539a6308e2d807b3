//! Argument for the trainer that plans and memory are for.

use clap::{Args, ValueEnum};
use dflop_costmodel::memory::Trainer;
use dflop_loader::settings::{EncoderShare, Settings};

use super::set::{Accepted, SetArgs};
use crate::failure::Failure;

/// Settings without effect on plans whose stages run on one rank each.
const OF_SEVERAL_RANKS: [&str; 3] =
    ["space.sequence_parallel", "space.expert_parallel", "space.expert_imbalance"];

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum TrainerName {
    /// `dflop train`.
    #[default]
    Dflop,
    /// PyTorch modules.
    Torch,
}

/// Trainer.
#[derive(Debug, Default, Args)]
pub(crate) struct TrainerArgs {
    /// Trainer that the answer is for: `dflop train`, or eager PyTorch modules in `dflop.torch.Pipeline`.
    #[arg(long, value_enum, default_value_t = TrainerName::Dflop)]
    trainer: TrainerName,
}

impl TrainerArgs {
    pub(crate) const fn trainer(&self) -> Trainer {
        match self.trainer {
            TrainerName::Dflop => Trainer::Dflop,
            TrainerName::Torch => Trainer::Torch,
        }
    }

    /// Rejects settings that the trainer does not run, or that have no effect on it.
    ///
    /// # Errors
    /// [`Failure::Misuse`] with the first such setting.
    pub(crate) fn check<A: Accepted>(&self, set: &SetArgs<A>, settings: &Settings) -> Result<(), Failure> {
        if self.trainer() == Trainer::Dflop {
            return Ok(());
        }
        let reason = "has no effect with `--trainer torch`, whose stages run on one rank each; leave it out";
        set.refuse(&OF_SEVERAL_RANKS, reason)?;
        if settings.space.encoder_share == EncoderShare::Tile {
            return Err(Failure::Misuse(
                "invalid `space.encoder_share`: `dflop.torch.Pipeline` shares whole media between ranks, not \
                 tiles; give `medium` or `sample`"
                    .to_owned(),
            ));
        }
        Ok(())
    }
}
