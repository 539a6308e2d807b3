//! Arguments for `order` and `simulate`, which plan dataset steps and read no payload.

use clap::Args;
use dflop_loader::StepPlanner;

use super::mixture::MixtureArgs;
use super::step_plan::{ResumeArgs, StepPlanArgs};
use super::tokenizer::TokenizerArgs;
use crate::failure::Failure;

/// Dataset or mixture, step plan, and token counting.
#[derive(Debug, Args)]
pub(crate) struct PlannedStepsArgs {
    #[command(flatten)]
    data: MixtureArgs,
    #[command(flatten)]
    pub(crate) plan: StepPlanArgs,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
}

impl PlannedStepsArgs {
    /// Opens the data and builds the planner; step 0 starts at the first sample of `epoch`, unless the run is
    /// resumed.
    pub(crate) fn planner(&self, epoch: u64, resume: &ResumeArgs) -> Result<StepPlanner, Failure> {
        let token_counts = self.tokenizer.token_counts(Some(&self.plan.model.spec()?))?;
        self.plan.planner(self.data.open(token_counts)?, epoch, resume)
    }
}
