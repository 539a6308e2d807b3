//! Arguments for `order` and `simulate`, which plan dataset steps and read no payload.

use clap::Args;
use dflop_loader::StepPlanner;
use dflop_loader::settings::Settings;

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
    /// Opens the data and builds the planner; step 0 starts at the first sample of the first epoch, unless
    /// the run is resumed.
    pub(crate) fn planner(&self, settings: &Settings, resume: &ResumeArgs) -> Result<StepPlanner, Failure> {
        let token_counts = self.tokenizer.token_counts(Some(&self.plan.model.spec()?), settings)?;
        self.plan.planner(settings, self.data.open(settings, token_counts)?, resume)
    }
}
