//! Describes a planning problem: modules, workload, cluster and options.

use super::cluster::Cluster;
use super::costs::ModuleCosts;
use super::item_size::{ENCODERS_MAX, too_many_encoders};
use super::space::{EncoderSplit, SearchSpace, SearchSpaceOptions};
use super::workload::Workload;
use dflop_balancer::schedule::ScheduleKind;
use dflop_balancer::{Error, Result};

/// Planning problem: modules, workload, cluster and options.
#[derive(Clone)]
pub struct PlanProblem<'a> {
    /// Encoder costs, in tiles, or patches for native-resolution media; sample sizes have the same order.
    pub encoders: Vec<&'a dyn ModuleCosts>,
    /// LLM costs, in tokens.
    pub llm: &'a dyn ModuleCosts,
    /// Batches for judging plans.
    pub workload: &'a Workload,
    /// GPUs and links.
    pub cluster: Cluster,
    /// Kinds of plans to search.
    pub options: SearchSpaceOptions,
    /// How encoder ranks split the media in a slot.
    pub encoder_split: EncoderSplit,
    /// Allocated memory divided by counted memory, at least 1: fragmentation, communication buffers.
    pub memory_margin: f64,
}

impl<'a> PlanProblem<'a> {
    /// Lists the encoder names used in reports: `encoder` if there is a single encoder.
    #[must_use]
    pub fn encoder_names(&self) -> Vec<&'static str> {
        match self.encoders[..] {
            [_] => vec!["encoder"],
            _ => self.encoders.iter().map(|encoder| encoder.name()).collect(),
        }
    }

    /// Describes the searched plans, which lower bounds are about.
    #[must_use]
    pub fn searched(&self) -> String {
        let shared =
            if self.encoders.len() > 1 { ", GPUs shared so that the slowest encoder is fastest" } else { "" };
        format!("{}{shared}", self.options)
    }

    /// Calls a function with the problem at an expert-parallel degree.
    ///
    /// # Errors
    /// [`Error::Config`] if the LLM does not support the degree.
    pub(super) fn with_expert_parallel<T>(
        &self,
        degree: u32,
        call: impl FnOnce(&PlanProblem<'_>) -> T,
    ) -> Result<T> {
        if degree == self.llm.expert_parallel() {
            return Ok(call(self));
        }
        let llm = self.llm.at_expert_parallel(degree).ok_or_else(|| {
            let reason = format!("expert parallelism of {degree} is not one of the language model's degrees");
            Error::Config { setting: "ep", reason }
        })?;
        Ok(call(&PlanProblem { llm: &*llm, encoders: self.encoders.clone(), ..*self }))
    }

    pub(super) fn space(&self) -> Result<SearchSpace<'a>> {
        self.cluster.check()?;
        check_schedule(self.options.schedule)?;
        if self.encoders.is_empty() || self.encoders.len() > ENCODERS_MAX {
            return Err(too_many_encoders(self.encoders.len()));
        }
        if self.encoders.iter().any(|encoder| encoder.layers() == 0) || self.llm.layers() == 0 {
            return Err(Error::Config { setting: "layers", reason: "a module has at least one".to_owned() });
        }
        if !(self.memory_margin >= 1.0 && self.memory_margin.is_finite()) {
            let reason = format!("must be a finite number of at least 1, got {}", self.memory_margin);
            return Err(Error::Config { setting: "memory_margin", reason });
        }
        if self.workload.is_native() && self.encoder_split == EncoderSplit::Tile {
            let reason = "media in native resolution have no tiles: encoder ranks share whole samples";
            return Err(Error::Config { setting: "encoder_split", reason: reason.to_owned() });
        }
        let mut space = SearchSpace::new(&self.encoders, self.llm, self.workload, self.cluster, self.options);
        space.encoder_split = self.encoder_split;
        space.budget_bytes = self.cluster.memory_bytes as f64 / self.memory_margin;
        space.share_gpus();
        Ok(space)
    }
}

/// Checks that the executor can run a schedule with encoder and LLM stages and whole backward passes.
fn check_schedule(kind: ScheduleKind) -> Result<()> {
    if matches!(kind, ScheduleKind::Interleaved { .. } | ScheduleKind::ZeroBubble) {
        let reason = format!(
            "encoders beside a language model run under gpipe, 1f1b and 1f1b-ahead, for which plans are made, not \
             under {kind}"
        );
        return Err(Error::Config { setting: "schedule", reason });
    }
    Ok(())
}
