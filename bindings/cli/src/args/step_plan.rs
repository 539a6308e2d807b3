//! Arguments for step plans: global batches, microbatches, caps, shuffle, tail and resumption.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{Args, ValueEnum};
use dflop_balancer::{Caps, Strategy};
use dflop_loader::sample::BatchLayout;
use dflop_loader::{LoaderState, Mixture, Shuffle, StepPlanner, StepPlannerBuilder, Tail};

use crate::args::model::ModelArgs;
use crate::failure::Failure;
use dflop_loader::store::file;

/// Assignment of global batches to DP ranks and microbatches.
#[derive(Debug, Args)]
pub(crate) struct StepPlanArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Number of samples in a global batch, over all DP ranks.
    #[arg(long, value_name = "B")]
    pub(crate) global_batch: u64,
    /// Number of data-parallel ranks.
    #[arg(long, value_name = "R")]
    pub(crate) dp_size: usize,
    /// Number of microbatches per DP rank.
    #[arg(long, value_name = "M", default_value_t = 1)]
    pub(crate) microbatches: usize,
    /// Number of pipeline stages per module, such as `1,3` [default: 1 each].
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    pub(crate) stages: Option<Vec<usize>>,
    /// Search effort per step, in work units; the same units give the same plan on every machine.
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    pub(crate) work: u64,
    #[command(flatten)]
    pub(crate) caps: CapArgs,
    /// Plan for microbatches padded to this many tokens, or, in padded layouts, for rows padded to it;
    /// padding has a cost.
    #[arg(long, value_name = "N")]
    pub(crate) pad_to_tokens: Option<u64>,
    /// Seed for the global order.
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Treatment of the samples that remain at the end of an epoch and do not fill a global batch.
    #[arg(long, value_enum, default_value_t = TailArg::Carry)]
    pub(crate) tail: TailArg,
    /// Allow a global batch that is larger than the data, so that a step has samples several times.
    #[arg(long)]
    pub(crate) repeat_samples: bool,
    /// End after this many epochs over every dataset [default: no end].
    #[arg(long, value_name = "N")]
    pub(crate) epochs: Option<u64>,
    /// Read every sample exactly once, in index order: `--epochs 1 --tail short --shuffle none`.
    #[arg(long, conflicts_with_all = ["epochs", "tail", "shuffle"])]
    pub(crate) validation: bool,
    #[command(flatten)]
    pub(crate) shuffle: ShuffleArgs,
}

/// Sample shuffle within an epoch.
#[derive(Debug, Args)]
pub(crate) struct ShuffleArgs {
    /// Sample shuffle within an epoch [default: global, or blocks if block sizes are given].
    #[arg(long, value_enum)]
    shuffle: Option<ShuffleArg>,
    /// Maximum run of samples that `--shuffle blocks` keeps together; a run never crosses a shard [default:
    /// 1024].
    #[arg(long, value_name = "N", conflicts_with = "validation")]
    block_samples: Option<u64>,
    /// Number of runs that `--shuffle blocks` shuffles together, about the number of open shards [default:
    /// 64].
    #[arg(long, value_name = "N", conflicts_with = "validation")]
    open_blocks: Option<u64>,
}

const BLOCK_SAMPLES: u64 = 1024;
const OPEN_BLOCKS: u64 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ShuffleArg {
    /// All samples in the epoch; shard by shard if shards are compressed.
    Global,
    /// Runs of neighbors, and samples within run windows: for media that are slow to seek.
    Blocks,
    /// No shuffle: index order.
    None,
}

impl StepPlanArgs {
    /// Returns the shuffle.
    ///
    /// # Errors
    /// [`Failure::Misuse`] for block sizes with a shuffle that has no blocks.
    pub(crate) fn shuffle(&self) -> Result<Shuffle, Failure> {
        let ShuffleArgs { shuffle, block_samples, open_blocks } = self.shuffle;
        let has_sizes = block_samples.is_some() || open_blocks.is_some();
        let blocks = Shuffle::Blocks {
            block_samples: block_samples.unwrap_or(BLOCK_SAMPLES),
            open_blocks: open_blocks.unwrap_or(OPEN_BLOCKS),
        };
        Ok(match shuffle {
            // `--validation` excludes `--shuffle`, so that there is nothing to override.
            _ if self.validation => Shuffle::None,
            Some(ShuffleArg::Blocks) => blocks,
            // Sizes of blocks imply the shuffle that uses them.
            None if has_sizes => blocks,
            Some(_) if has_sizes => {
                let reason = "`--block-samples` and `--open-blocks` need `--shuffle blocks`";
                return Err(Failure::Misuse(reason.into()));
            }
            Some(ShuffleArg::Global) | None => Shuffle::Global,
            Some(ShuffleArg::None) => Shuffle::None,
        })
    }
}

/// State to resume from.
#[derive(Debug, Default, Args)]
pub(crate) struct ResumeArgs {
    /// Resume from a state that `--state-out` or a loader saved, with any number of ranks.
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    /// Resume even if a dataset has changed: a changed dataset continues with the next epoch, an unchanged
    /// dataset where it was.
    #[arg(long, requires = "resume")]
    accept_changed_data: bool,
}

impl ResumeArgs {
    fn apply(&self, builder: StepPlannerBuilder) -> Result<StepPlannerBuilder, Failure> {
        let Some(path) = &self.resume else { return Ok(builder) };
        let builder = builder.restore(read_state(path)?);
        Ok(if self.accept_changed_data { builder.accept_changed_data() } else { builder })
    }
}

fn read_state(path: &Path) -> Result<LoaderState, Failure> {
    let document = file::read_named_text(path).map_err(|error| Failure::from(error).in_file(path))?;
    LoaderState::from_json(&document).map_err(|error| Failure::from(error).in_file(path))
}

/// Microbatch caps.
#[derive(Debug, Args)]
pub(crate) struct CapArgs {
    /// Maximum tokens of a microbatch [default: a quarter above the mean if a dataset is planned, else no
    /// cap].
    #[arg(long, value_name = "N")]
    tokens_max: Option<u64>,
    /// Maximum payload bytes per microbatch.
    #[arg(long, value_name = "N")]
    bytes_max: Option<u64>,
}

impl CapArgs {
    pub(crate) fn caps(&self) -> Caps {
        Caps { tokens_max: self.tokens_max, bytes_max: self.bytes_max }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TailArg {
    /// Start the batch that the next epoch fills.
    Carry,
    /// Leave the samples out.
    Drop,
    /// Make a short last batch.
    Short,
}

/// Parses a strategy name or alias.
pub(crate) fn parse_strategy(name: &str) -> Result<Strategy, String> {
    Strategy::from_str(name).map_err(|error| error.to_string())
}

impl StepPlanArgs {
    /// Builds the planner for packed microbatches; step 0 starts at the first sample of `epoch`, unless the
    /// run is resumed.
    pub(crate) fn planner(
        &self,
        data: impl Into<Mixture>,
        epoch: u64,
        resume: &ResumeArgs,
    ) -> Result<StepPlanner, Failure> {
        self.planner_for(BatchLayout::Packed, data, epoch, resume)
    }

    /// Builds the planner for a microbatch layout.
    pub(crate) fn planner_for(
        &self,
        layout: BatchLayout,
        data: impl Into<Mixture>,
        epoch: u64,
        resume: &ResumeArgs,
    ) -> Result<StepPlanner, Failure> {
        let model = self.model.cost_model()?;
        let tail = match self.tail {
            TailArg::Carry => Tail::Carry,
            TailArg::Drop => Tail::Drop,
            TailArg::Short => Tail::Short,
        };
        let mut builder = StepPlanner::builder(data, model)
            .global_batch(self.global_batch)
            .dp_size(self.dp_size)
            .microbatches(self.microbatches)
            .caps(self.caps.caps())
            .work(self.work)
            .seed(self.seed)
            .first_epoch(epoch)
            .tail(tail)
            .shuffle(self.shuffle()?);
        if self.repeat_samples {
            builder = builder.repeat_samples();
        }
        if self.validation {
            builder = builder.validation();
        }
        if let Some(epochs) = self.epochs {
            builder = builder.epochs(epochs);
        }
        if let Some(tokens) = self.pad_to_tokens {
            builder = builder.pad_to_tokens(tokens, layout);
        }
        if let Some(stages) = &self.stages {
            builder = builder.stages(stages.clone());
        }
        Ok(resume.apply(builder)?.build()?)
    }
}
