//! Arguments for the plan kinds that are searched.

use clap::{Args, ValueEnum};
use dflop_balancer::schedule::ScheduleKind;
use dflop_planner::SearchSpaceOptions;

/// Plan kinds to search, and what ranks share.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "flags of a command line")]
pub(crate) struct SpaceArgs {
    /// Kinds of plans and costs [default: `full` with a device preset, `basic` with a profile].
    #[arg(long, value_enum)]
    space: Option<SpaceArg>,
    /// Encoder placement.
    #[arg(long, value_enum, default_value_t = PlacementArg::Disaggregated)]
    pub(super) placement: PlacementArg,
    /// Allow fewer layers in the stage with the LM head.
    #[arg(long)]
    uneven_layers: bool,
    /// Allow an encoder on separate GPUs to run some rounds ahead, so that LLM ranks wait less.
    #[arg(long)]
    encoder_ahead: bool,
    /// Share optimizer state over the data-parallel ranks of a module (ZeRO stage 1).
    #[arg(long)]
    zero1: bool,
    /// Split norms and inputs of layers over the tensor-parallel ranks (sequence parallelism); measured
    /// memory stays as it is.
    #[arg(long)]
    pub(crate) sequence_parallel: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SpaceArg {
    /// Even layers, stated rates alike for all widths, transfers free unless links are given.
    Basic,
    /// Uneven layers, recomputation and encoders that run ahead as well; links and matrix-width rates from
    /// the device preset.
    Full,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum PlacementArg {
    /// On separate GPUs.
    Disaggregated,
    /// On the LLM's GPUs, before and after it.
    Colocated,
    /// In the LLM's stages: every rank holds layers from both.
    Joint,
    /// Whichever is fastest.
    Any,
}

impl SpaceArgs {
    /// Whether the full space is searched.
    pub(crate) fn is_full(&self, has_profile: bool) -> bool {
        self.space.map_or(!has_profile, |space| space == SpaceArg::Full)
    }

    /// Returns the plan kinds that are searched.
    pub(crate) fn options(
        &self,
        is_full: bool,
        schedule: ScheduleKind,
        has_recomputation: bool,
    ) -> SearchSpaceOptions {
        let has = |placement| self.placement == placement || self.placement == PlacementArg::Any;
        // Other schedules have no rounds ahead.
        let is_plain = schedule == ScheduleKind::OneForwardOneBackward;
        SearchSpaceOptions {
            is_disaggregated: has(PlacementArg::Disaggregated),
            is_colocated: has(PlacementArg::Colocated),
            is_joint: has(PlacementArg::Joint),
            has_uneven_layers: is_full || self.uneven_layers,
            has_recomputation: is_full || has_recomputation,
            has_encoder_ahead: is_plain && (is_full || self.encoder_ahead),
            has_sharded_optimizer: self.zero1,
            schedule,
        }
    }
}
