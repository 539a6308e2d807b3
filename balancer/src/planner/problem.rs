//! Describes a planning problem: modules, workload, cluster and options.

use super::cluster::Cluster;
use super::costs::ModuleCosts;
use super::space::{EncoderSplit, SearchSpace, SearchSpaceOptions};
use super::workload::Workload;
use crate::error::{Error, Result};
use crate::schedule::StepShape;

/// Planning problem: modules, workload, cluster and options.
#[derive(Clone, Copy)]
pub struct PlanProblem<'a> {
    /// Costs of the encoder, whose units are tiles, or patches of media in native resolution.
    pub encoder: &'a dyn ModuleCosts,
    /// Costs of the LLM, whose units are tokens.
    pub llm: &'a dyn ModuleCosts,
    /// Batches that plans are judged on.
    pub workload: &'a Workload,
    /// GPUs and links.
    pub cluster: Cluster,
    /// Kinds of plans to search.
    pub options: SearchSpaceOptions,
    /// Way in which encoder ranks split the media of a slot.
    pub encoder_split: EncoderSplit,
    /// Allocated memory over counted memory, at least 1: fragmentation, communication buffers.
    pub memory_margin: f64,
}

impl<'a> PlanProblem<'a> {
    pub(super) fn space(&self) -> Result<SearchSpace<'a>> {
        self.cluster.check()?;
        StepShape::check_kind(self.options.schedule)?;
        if self.encoder.layers() == 0 || self.llm.layers() == 0 {
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
        let mut space = SearchSpace::new(self.encoder, self.llm, self.workload, self.cluster, self.options);
        space.encoder_split = self.encoder_split;
        space.budget_bytes = self.cluster.memory_bytes as f64 / self.memory_margin;
        Ok(space)
    }
}
