//! Arguments for commands that plan dataset steps.

use super::mixture::MixtureArgs;
use super::model::{ModelArgs, TokenizerArgs};
use super::set::{Accepted, SetArgs};
use crate::failure::{Failure, did_you_mean};
use clap::Args;
use dflop_balancer::{Caps, Strategy};
use dflop_loader::settings::Settings;
use dflop_loader::store::file;
use dflop_loader::{LoaderState, Mixture, StepPlanner, StepPlannerBuilder};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Assignment of global batches to DP ranks and microbatches.
#[derive(Debug, Args)]
pub(crate) struct StepPlanArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Number of samples in a global batch, over all DP ranks.
    #[arg(long, value_name = "B")]
    pub(crate) global_batch_size: u64,
    /// Number of data-parallel ranks.
    #[arg(long, value_name = "R")]
    pub(crate) dp_size: usize,
    /// Number of microbatches per DP rank.
    #[arg(long, value_name = "M", default_value_t = 1)]
    pub(crate) microbatches: usize,
    /// Seed for the global order.
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
    /// End after this many epochs over every dataset [default: no end].
    #[arg(long, value_name = "N")]
    pub(crate) epochs: Option<u64>,
    /// Whether ranks without `plan.stages` run all modules even if they wait only at the end of a step.
    #[arg(skip)]
    pub(crate) is_one_device: bool,
}

/// State to resume from.
#[derive(Debug, Default, Args)]
pub(crate) struct ResumeArgs {
    /// Resume from a state that `--state-out` or a loader saved, with any number of ranks.
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
}

impl ResumeArgs {
    fn apply(&self, builder: StepPlannerBuilder, settings: &Settings) -> Result<StepPlannerBuilder, Failure> {
        let Some(path) = &self.resume else {
            if settings.order.accept_changed_data {
                return Err(Failure::Misuse("`order.accept_changed_data` needs `--resume`".into()));
            }
            return Ok(builder);
        };
        if settings.order.first_epoch != 0 {
            let reason = "`order.first_epoch` has no effect with `--resume`; leave it out";
            return Err(Failure::Misuse(reason.into()));
        }
        Ok(builder.restore(read_state(path)?))
    }
}

/// Reads the state of a loader that draws samples through an index.
pub(crate) fn read_state(path: &Path) -> Result<LoaderState, Failure> {
    let document = file::read_named_text(path).map_err(|error| Failure::from(error).in_file(path))?;
    LoaderState::from_json(&document).map_err(|error| Failure::from(error).in_file(path))
}

/// Microbatch caps.
#[derive(Debug, Args)]
pub(crate) struct CapArgs {
    /// Maximum tokens of a group [default: no limit].
    #[arg(long, value_name = "N")]
    tokens_max: Option<u64>,
    /// Maximum payload bytes of a group.
    #[arg(long, value_name = "N")]
    bytes_max: Option<u64>,
}

impl CapArgs {
    pub(crate) fn caps(&self) -> Caps {
        Caps { tokens_max: self.tokens_max, bytes_max: self.bytes_max }
    }
}

/// Parses a strategy by name or alias.
pub(crate) fn parse_strategy(name: &str) -> Result<Strategy, String> {
    Strategy::from_str(name).map_err(|_| {
        let names = Strategy::ALL.iter().map(|strategy| strategy.name());
        let similar = did_you_mean(name, names.chain(["data-blind", "balanced"]));
        format!("expected {}, found `{name}`{similar}", Strategy::describe(Strategy::ALL.iter().copied()))
    })
}

/// Whether a strategy spends work units; other strategies have a single answer.
pub(crate) fn is_search(strategy: Strategy) -> bool {
    [Strategy::SEARCH, Strategy::EXACT].contains(&strategy)
}

/// Rejects settings for planned steps that have no effect beside other settings.
///
/// # Errors
/// [`Failure::Misuse`] with the first such setting.
pub(crate) fn check_plan_settings<A: Accepted>(set: &SetArgs<A>, settings: &Settings) -> Result<(), Failure> {
    if settings.plan.stages.is_some() && settings.plan.synchronization().is_some() {
        set.refuse(&["plan.schedule"], "has no effect with `plan.stages`; leave it out")?;
    }
    Ok(())
}

/// Rejects a schedule of ranks without a pipeline, for commands that plan pipelines.
///
/// # Errors
/// [`Failure::Misuse`] with the setting.
pub(crate) fn check_pipeline<A: Accepted>(set: &SetArgs<A>, settings: &Settings) -> Result<(), Failure> {
    if settings.plan.synchronization().is_none() {
        return Ok(());
    }
    set.refuse(&["plan.schedule"], "has no effect on plans of pipelines; leave it out")
}

/// Rejects the layout of microbatches without tensors, unless they have a fixed length, as rows do.
///
/// # Errors
/// [`Failure::Misuse`] with the setting.
pub(crate) fn check_layout<A: Accepted>(set: &SetArgs<A>, settings: &Settings) -> Result<(), Failure> {
    if settings.processor.fixed_tokens().is_some() || settings.processor.layout.rows.is_some() {
        return Ok(());
    }
    let reason = "has no effect on plans without `processor.length_buckets=fixed:N`; leave it out";
    set.refuse(&["processor.layout", "processor.length_buckets"], reason)
}

impl StepPlanArgs {
    /// Builds the planner; step 0 starts at the first sample of the first epoch, unless the run is resumed.
    /// Without `plan.stages` every module is a pipeline stage, unless ranks run all modules.
    pub(crate) fn planner(
        &self,
        settings: &Settings,
        data: impl Into<Mixture>,
        resume: &ResumeArgs,
    ) -> Result<StepPlanner, Failure> {
        let model = self.model.cost_model(settings)?;
        let mut builder = StepPlanner::builder(data, model)
            .global_batch(self.global_batch_size)
            .dp_size(self.dp_size)
            .microbatches(self.microbatches)
            .seed(self.seed);
        builder = settings.order.apply(settings.plan.apply(builder));
        let synchronization = settings.plan.synchronization();
        let is_one_device = self.is_one_device || synchronization.is_some();
        if is_one_device && settings.plan.stages.is_none() {
            builder = builder.one_device(synchronization.unwrap_or_default());
        }
        if let Some(epochs) = self.epochs {
            builder = builder.epochs(epochs);
        }
        if let Some(tokens) = settings.processor.fixed_tokens() {
            builder = builder.pad_to_tokens(tokens, settings.processor.layout());
        }
        if let Some(rows) = settings.processor.rows()? {
            builder = builder.rows(rows);
        }
        Ok(resume.apply(builder, settings)?.build()?)
    }
}

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
