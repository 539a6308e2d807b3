//! What is to be planned: modules, workload, cluster and options, checked.

use super::cluster::Cluster;
use super::costs::ModuleCosts;
use super::space::{EncoderSplit, SearchSpace, SearchSpaceOptions};
use super::workload::Workload;
use crate::error::{Error, Result};

/// What is to be planned.
#[derive(Clone, Copy)]
pub struct PlanProblem<'a> {
    /// Costs of the encoder, whose units are tiles.
    pub encoder: &'a dyn ModuleCosts,
    /// Costs of the LLM, whose units are tokens.
    pub llm: &'a dyn ModuleCosts,
    /// Batches that plans are judged on.
    pub workload: &'a Workload,
    /// The devices.
    pub cluster: Cluster,
    /// What may be planned.
    pub options: SearchSpaceOptions,
    /// How encoder ranks share a slot.
    pub encoder_split: EncoderSplit,
    /// What is allocated over what is counted: fragments, communication buffers. 1 counts on none, and is the
    /// least.
    pub memory_margin: f64,
}

impl<'a> PlanProblem<'a> {
    pub(super) fn space(&self) -> Result<SearchSpace<'a>> {
        self.cluster.check()?;
        if self.encoder.layers() == 0 || self.llm.layers() == 0 {
            return Err(Error::Config { setting: "layers", reason: "a module has at least one".to_owned() });
        }
        if !(self.memory_margin >= 1.0 && self.memory_margin.is_finite()) {
            let reason = format!("{} is no number of at least 1", self.memory_margin);
            return Err(Error::Config { setting: "memory_margin", reason });
        }
        let mut space = SearchSpace::new(self.encoder, self.llm, self.workload, self.cluster, self.options);
        space.encoder_split = self.encoder_split;
        space.budget_bytes = self.cluster.memory_bytes as f64 / self.memory_margin;
        Ok(space)
    }
}
