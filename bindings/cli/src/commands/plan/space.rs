//! Arguments for the kinds of plans that are searched.

use clap::{Args, ValueEnum};
use dflop_balancer::planner::SearchSpaceOptions;
use dflop_balancer::schedule::ScheduleKind;

/// Kinds of plans to search, and what ranks share.
#[derive(Debug, Args)]
pub(crate) struct SpaceArgs {
    /// Placement of the encoder.
    #[arg(long, value_enum, default_value_t = PlacementArg::Disaggregated)]
    pub(super) placement: PlacementArg,
    /// Allow fewer layers in the stage with the LM head.
    #[arg(long)]
    uneven_layers: bool,
    /// Allow an encoder on separate GPUs to run some rounds ahead, so that LLM ranks wait less for each other.
    #[arg(long)]
    encoder_ahead: bool,
    /// Share optimizer state over the data-parallel ranks of a module (ZeRO stage 1).
    #[arg(long)]
    zero1: bool,
    /// Split norms and inputs of layers over the tensor-parallel ranks (sequence parallelism); measured memory
    /// stays as it is.
    #[arg(long)]
    pub(super) sequence_parallel: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum PlacementArg {
    /// On separate GPUs.
    Disaggregated,
    /// On the LLM's GPUs, before and after it.
    Colocated,
    /// In the LLM's stages: every rank holds layers of both.
    Joint,
    /// Whichever is fastest.
    Any,
}

impl SpaceArgs {
    /// Returns the kinds of plans that are searched.
    pub(crate) fn options(&self, schedule: ScheduleKind, has_recomputation: bool) -> SearchSpaceOptions {
        let has = |placement| self.placement == placement || self.placement == PlacementArg::Any;
        SearchSpaceOptions {
            is_disaggregated: has(PlacementArg::Disaggregated),
            is_colocated: has(PlacementArg::Colocated),
            is_joint: has(PlacementArg::Joint),
            has_uneven_layers: self.uneven_layers,
            has_recomputation,
            has_encoder_ahead: self.encoder_ahead,
            has_sharded_optimizer: self.zero1,
            schedule,
        }
    }
}
