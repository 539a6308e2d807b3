//! The arguments that say how global batches are cut.

use std::str::FromStr;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use dflop_balancer::{Caps, Strategy};
use dflop_costmodel::{CostModel, DeviceRate, ModelSpec};
use dflop_loader::index::Index;
use dflop_loader::plan::StepPlanner;
use dflop_loader::steps::Tail;

use crate::output::Failure;

/// The model that costs are predicted for.
#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// Model preset; an unknown name lists them.
    #[arg(long, value_name = "NAME", default_value = "omni-7b")]
    pub(crate) model: String,
    /// Device preset: a stated rate, not a measurement.
    #[arg(long, value_name = "NAME", default_value = "h100")]
    pub(crate) device: String,
}

impl ModelArgs {
    pub(crate) fn cost_model(&self) -> Result<CostModel, Failure> {
        Ok(CostModel::new(ModelSpec::preset(&self.model)?, DeviceRate::preset(&self.device)?))
    }
}

/// How global batches are cut.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Samples of a global batch.
    #[arg(long, value_name = "B")]
    pub(crate) global_batch: u64,
    /// Data-parallel ranks.
    #[arg(long, value_name = "R")]
    pub(crate) dp_size: usize,
    /// Microbatches of each rank.
    #[arg(long, value_name = "M", default_value_t = 1)]
    pub(crate) microbatches: usize,
    /// Pipeline stages of every module, such as `1,3` [default: one each].
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    pub(crate) stages: Option<Vec<usize>>,
    /// Work units that the search for one step spends, about.
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    pub(crate) work: u64,
    #[command(flatten)]
    pub(crate) caps: CapArgs,
    /// Seed of the global order.
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
    /// What happens to samples that do not fill a global batch.
    #[arg(long, value_enum, default_value_t = TailArg::Carry)]
    pub(crate) tail: TailArg,
}

/// Hard limits of a microbatch.
#[derive(Debug, Args)]
pub(crate) struct CapArgs {
    /// Most tokens in a microbatch [planning a data set: a quarter above the mean unless set].
    #[arg(long, value_name = "N")]
    tokens_max: Option<u64>,
    /// Most payload bytes in a microbatch.
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
    /// They begin a batch that the next epoch fills.
    Carry,
    /// They are left out of the epoch.
    Drop,
    /// They make a short last batch.
    Short,
}

/// Reads a strategy; the name of the comparison that looks at no cost is accepted too.
pub(crate) fn parse_strategy(name: &str) -> Result<Strategy, String> {
    match name {
        "data-blind" | "data_blind" => Ok(Strategy::RoundRobin),
        "balanced" => Ok(Strategy::Search),
        _ => Strategy::from_str(name).map_err(|error| error.to_string()),
    }
}

impl PlanArgs {
    /// Builds the planner over an index; step 0 is the first of `epoch`.
    pub(crate) fn planner(&self, index: Arc<Index>, epoch: u64) -> Result<StepPlanner, Failure> {
        let model = self.model.cost_model()?;
        let tail = match self.tail {
            TailArg::Carry => Tail::Carry,
            TailArg::Drop => Tail::Drop,
            TailArg::Short => Tail::Short,
        };
        let mut builder = StepPlanner::builder(index, model)
            .global_batch(self.global_batch)
            .dp_size(self.dp_size)
            .microbatches(self.microbatches)
            .caps(self.caps.caps())
            .work(self.work)
            .seed(self.seed)
            .first_epoch(epoch)
            .tail(tail);
        if let Some(stages) = &self.stages {
            builder = builder.stages(stages.clone());
        }
        Ok(builder.build()?)
    }
}
