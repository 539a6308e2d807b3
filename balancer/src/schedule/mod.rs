//! Pipeline schedules as pure data: each rank's actions, in order.
//!
//! A *schedule* is a list of [`Action`]s per pipeline rank. The simulator sums predicted times over the same
//! lists that an executor runs. A kind orders a rank's passes (`lagged.rs`, `interleaved.rs`); messages are
//! inserted between the passes in the same way for all kinds (`messages.rs`), such that lists are safe
//! whether a send returns immediately or waits for the receive.
//!
//! A [`PipelineLayout`] maps stages to ranks: a single pipeline, optionally with several chunks of layers per
//! rank, or a whole job with modules that differ in stages and DP size.

mod action;
mod graph;
mod kind;
mod lagged;
mod layout;
mod messages;
mod step_order;
mod step_shape;
mod step_walk;

pub use action::{Action, Message, Part, Pass, PassKind};
pub use kind::ScheduleKind;
pub use layout::PipelineLayout;
pub use step_order::StagePass;
pub(crate) use step_shape::ENCODERS_MAX;
pub use step_shape::{EncoderChain, EncoderChains, ModuleStages, StepShape};
pub use step_walk::{LanePasses, StageLanes, StepLanes, StepNodes, StepWalk, WalkState};

use crate::error::{Error, Result};
use lagged::{RankWork, StagePlace, lagged_passes};

/// Lists the actions for a pipeline rank in a step with `microbatches` microbatches.
///
/// Each microbatch runs once forward and once backward in each stage on the rank; the first stage receives no
/// activations and the last no gradients. [`PipelineLayout::schedule`] lists all ranks together.
///
/// # Panics
/// If `rank` is not below `ranks`, or the layout would be too large.
///
/// # Examples
/// ```
/// use dflop_balancer::schedule::{ScheduleKind, schedule};
///
/// let last = schedule(ScheduleKind::OneForwardOneBackward, 1, 2, 2);
/// let last: Vec<String> = last.iter().map(ToString::to_string).collect();
/// assert_eq!(last[..3], ["recv 0 in stage 1 from 0", "forward 0 in stage 1", "backward 0 in stage 1"]);
/// assert_eq!(last[3..5], ["send gradient 0 in stage 1 to 0", "recv 1 in stage 1 from 0"]);
/// assert_eq!(last.last().unwrap(), "reduce gradients of stage 1");
/// ```
#[must_use]
pub fn schedule(kind: ScheduleKind, rank: usize, ranks: usize, microbatches: usize) -> Vec<Action> {
    assert!(rank < ranks, "rank {rank} of {ranks}");
    let lists =
        PipelineLayout::chain(ranks, kind.chunks(), microbatches).and_then(|layout| layout.schedule(kind));
    lists.map_or_else(|error| panic!("{error}"), |mut lists| lists.swap_remove(rank))
}

impl PipelineLayout {
    /// Lists the actions for every rank, `[ranks]`.
    ///
    /// # Errors
    /// [`Error::Config`] if the number of chunks per rank differs from the kind's, or the kind is
    /// `interleaved` and the layout is more than a single pipeline.
    pub fn schedule(&self, kind: ScheduleKind) -> Result<Vec<Vec<Action>>> {
        messages::insert(self, &self.passes(kind)?)
    }

    /// Lists the passes on every rank, in order.
    pub(crate) fn passes(&self, kind: ScheduleKind) -> Result<Vec<Vec<Pass>>> {
        if kind.chunks() != self.chunks() {
            let reason = format!("{kind} does not fit ranks with {} chunks each", self.chunks());
            return Err(Error::Config { setting: "schedule", reason });
        }
        // The other kinds order each stage separately; interleaving mixes the stages on a rank.
        if let ScheduleKind::Interleaved { chunks } = kind {
            let (ranks, microbatches) = (self.ranks(), self.microbatches());
            if ranks * usize::from(chunks) != self.stages() {
                let reason = format!("{kind} is for a single pipeline, got {ranks} ranks");
                return Err(Error::Config { setting: "schedule", reason });
            }
            let of_rank = |rank| kind::passes(rank, ranks, usize::from(chunks), microbatches);
            return Ok((0..ranks).map(of_rank).collect());
        }
        let stages_in_all = (0..self.stages()).map(|stage| self.stages_after(stage) + 1).max().unwrap_or(1);
        let last_module = self.module(self.stages() - 1);
        let mut lists = vec![Vec::new(); self.ranks()];
        for stage in 0..self.stages() {
            let place = StagePlace {
                stages_after: self.stages_after(stage),
                stages_in_all,
                rounds: self.stage_microbatches(stage).div_ceil(self.round(stage)),
                is_encoder: self.module(stage) != last_module,
            };
            let lags = kind.lags(&place);
            for (rank, microbatches) in self.shares(stage) {
                let (stage, round) = (stage as u16, self.round(stage));
                lists[rank] = lagged_passes(&RankWork { stage, microbatches: &microbatches, round }, &lags);
            }
        }
        Ok(lists)
    }

    /// Lists the microbatches on every rank that holds a stage, ascending.
    fn shares(&self, stage: usize) -> Vec<(usize, Vec<u32>)> {
        let mut shares: Vec<(usize, Vec<u32>)> = self.holders(stage).map(|rank| (rank, Vec::new())).collect();
        for microbatch in 0..self.stage_microbatches(stage) as u32 {
            let rank = self.rank(Part { microbatch, stage: stage as u16 });
            if let Ok(place) = shares.binary_search_by_key(&rank, |share| share.0) {
                shares[place].1.push(microbatch);
            }
        }
        shares
    }
}
